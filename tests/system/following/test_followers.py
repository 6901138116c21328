"""Modules and directories that follow a run of real servers: one whole version at any time, and soon the newest."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import psclient
from psclient import DirectorySink, Follower, LocalServer, errors
from psclient.settings import ClientSettings
from tests.system.following.following_tools import (
    READING,
    SECONDS,
    SleepyEngine,
    loaded,
    parameters_of,
    same,
    training,
)
from tests.system.line import Line
from tests.system.scripts import marked
from tests.system.tools import QUICK, make_model, wait_until
from tests.tiers import long_but


@pytest.mark.long
@pytest.mark.parametrize("shards", long_but([2], [1, 2]))
def test_a_module_and_a_directory_have_every_version_whole_and_soon_the_newest(tmp_path, shards):
    module, wrong = make_model(1), []
    with LocalServer(shards=shards, cut_seconds=0.01) as server, training(server) as run:
        run.steps()

        def check(cut):
            is_one = len({shard.version for shard in cut.shards}) == 1
            if is_one and not same(parameters_of(module), run.versions[cut.version]):
                wrong.append(cut)

        with (
            psclient.follow(server, module, settings=READING, on_cut=check) as follower,
            Follower(server, DirectorySink(tmp_path), READING) as other,
        ):
            seen = set()
            for _ in range(10):
                version = run.steps(3)
                with follower.at_least(version - 3, SECONDS) as cut:
                    seen.add(cut.version)
            for each in (follower, other):
                each.wait_for(version, SECONDS)
                wait_until(lambda each=each: each.lag.versions == 0)
            assert wrong == []
            assert len(seen) > 2
            wait_until(lambda: same(parameters_of(module), run.versions[version]))  # and the other shard's push
            wait_until(lambda: follower.digest == other.digest)
            assert follower.cut == other.cut
            about, found = loaded(tmp_path)
            assert about["version"] == version
            state = psclient.download(server)
            assert all(torch.equal(found[name], value) for name, value in state.items() if name in found)
            assert found.keys() == state.keys()
            running = {
                name: value for name, value in module.state_dict().items() if "running" in name or "num_" in name
            }
            assert all(torch.equal(state[name], value) for name, value in running.items())


def test_the_guides_loop_follows_and_its_lines_load_a_directory(tmp_path):
    page = (Path(__file__).parents[3] / "docs/guide/following.md").read_text()
    loop, load = (block.split("```")[0] for block in page.split("```python\n")[1:3])
    with LocalServer() as server, training(server) as run:
        run.steps(2)
        assert '"host:50051"' in loop
        names = {"make_model": make_model, "batches": [torch.randn(4, 20)] * 3}
        exec(loop.replace('"host:50051"', repr(server.server)), names)
        assert same(parameters_of(names["module"]), run.versions[2])
        with Follower(server, DirectorySink(tmp_path), READING) as follower:
            follower.wait_for(2, SECONDS)
        names = {"directory": tmp_path}
        exec(load, names)
        module = make_model(1)
        module.load_state_dict(names["state"])
        assert same(parameters_of(module), run.versions[2])


def test_a_follower_may_be_there_before_the_first_worker():
    module = make_model(1)
    with LocalServer() as server, psclient.follow(server, module, settings=READING) as follower:
        assert not follower.ready
        with pytest.raises(errors.FollowerNotReadyError), follower.hold(seconds=0.3):
            pass
        with pytest.raises(errors.FollowerNotReadyError):
            _ = follower.version
        with training(server) as run:
            version = run.steps(2)
            follower.wait_for(version, SECONDS)
            assert same(parameters_of(module), run.versions[version])


def test_nothing_is_written_while_somebody_holds():
    module = make_model(1)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING) as follower:
            with follower.hold(SECONDS) as cut:
                version = run.steps(5)
                wait_until(lambda: follower.lag.versions > 0)
                assert same(parameters_of(module), run.versions[cut.version])
                assert follower.version == cut.version
            follower.wait_for(version, SECONDS)
            assert same(parameters_of(module), run.versions[version])


def test_a_thread_that_holds_is_not_left_waiting_for_what_cannot_come():
    module = make_model(1)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING) as follower:
            with follower.hold(SECONDS) as cut:
                version = run.steps(5)
                with follower.hold(), follower.at_least(cut.version):
                    pass
                with pytest.raises(errors.FollowerNotReadyError, match="while this thread holds"):
                    follower.at_least(version).__enter__()
                refused = []

                def hold():
                    try:
                        follower.hold(0.1).__enter__()
                    except errors.FollowerNotReadyError as error:
                        refused.append(error)

                wait_until(lambda: follower._holds._waiting_alone == 1)
                other = threading.Thread(target=hold)
                other.start()
                other.join(SECONDS)
                assert len(refused) == 1
            follower.wait_for(version, SECONDS)


def test_a_follower_may_be_closed_by_its_own_callback():
    module, closed = make_model(1), threading.Event()
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()

        def close(cut):
            follower.close()
            closed.set()

        follower = psclient.follow(server, module, settings=READING, on_cut=lambda cut: close(cut))
        assert closed.wait(SECONDS)
        wait_until(lambda: follower.is_over, SECONDS)
        follower.close()
        assert same(parameters_of(module), run.versions[1])


def test_buffers_follow_too_and_the_end_of_a_run_without_a_push():
    module = make_model(1)
    with (
        LocalServer(cut_seconds=0.01, buffer_period_steps=1) as server,
        training(server) as run,
        psclient.follow(server, module, settings=READING) as follower,
    ):
        version = run.steps(4)
        follower.wait_for(version, SECONDS)
        with follower.hold():
            module.train()(torch.randn(8, 20))  # which changes its running statistics
        follower.wait_for(run.steps(2), SECONDS)
        run.optimizer.close()
        subprocess.run([sys.executable, "-m", "psservice", "finish", *server.addresses], check=True, timeout=SECONDS)
        wait_until(lambda: follower.finished, SECONDS)
        state = psclient.download(server)
        wait_until(lambda: all(torch.equal(value, state[name]) for name, value in module.state_dict().items()), SECONDS)


@pytest.mark.parametrize("failure", ["removed", "cut", "full"])
def test_a_directory_that_fails_is_followed_again(tmp_path, failure, monkeypatch):
    path = tmp_path / "m"
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with Follower(server, DirectorySink(path), READING) as follower:
            follower.wait_for(1, SECONDS)
            if failure == "removed":
                shutil.rmtree(path)
                version = run.steps(2)
            elif failure == "cut":
                for file in path.glob("*00001.safetensors"):
                    os.truncate(file, 40)
                version = run.steps(2)
            else:
                with monkeypatch.context() as patch:
                    patch.setattr(shutil, "copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
                    version = run.steps(2)
                    wait_until(lambda: isinstance(follower.error, OSError), SECONDS)
                    assert loaded(path)[0]["version"] == 1
            wait_until(lambda: follower.ready and follower.version == version, SECONDS)
            assert loaded(path)[0]["version"] == version


@pytest.mark.parametrize("shards", [1, 2])
def test_followers_survive_kills_of_servers(tmp_path, shards):
    module = make_model(1)
    with (
        LocalServer(shards=shards, data_dir=tmp_path, cut_seconds=0.01) as server,
        training(server) as run,
        psclient.follow(server, module, settings=READING) as follower,
    ):
        for index in range(shards):
            follower.wait_for(run.steps(3), SECONDS)
            server.processes[index].send_signal(signal.SIGKILL)
            server.processes[index].wait()
            assert follower.ready
            server.restart(index)
        version = run.steps(3)
        follower.wait_for(version, SECONDS)
        wait_until(lambda: follower.lag.versions == 0)
        wait_until(lambda: same(parameters_of(module), run.versions[version]), SECONDS)
        assert follower.error is None


def restored(server, version):
    command = [sys.executable, "-m", "psservice", "restore", "--version", str(version), *server.addresses]
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)


def test_a_run_that_goes_back_pulls_no_reader_back_unless_it_allows_that(tmp_path):
    stays, goes_back = make_model(1), make_model(2)
    with LocalServer(data_dir=tmp_path, cut_seconds=0.01) as server, training(server) as run:
        version = run.steps(6)
        with (
            psclient.follow(server, stays, settings=READING) as one,
            psclient.follow(server, goes_back, settings=READING, allow_older=True) as other,
        ):
            for follower in (one, other):
                follower.wait_for(version, SECONDS)
            restored(server, 2)
            wait_until(lambda: other.version == 2, SECONDS)
            assert same(parameters_of(goes_back), run.versions[2])
            wait_until(lambda: isinstance(one.error, errors.RolledBackError), SECONDS)
            assert one.version == version
            assert same(parameters_of(stays), run.versions[version])
            assert one.lag.seconds > 0
            version = run.steps(8)  # ahead again, in a history of its own
            for follower, module in ((one, stays), (other, goes_back)):
                follower.wait_for(version, SECONDS)
                wait_until(lambda follower=follower: follower.cut.version == version, SECONDS)
                assert same(parameters_of(module), run.versions[version])


def test_another_run_at_the_same_address_is_not_followed():
    module = make_model(1)
    with LocalServer() as server:
        with training(server) as run:
            version = run.steps(3)
            follower = psclient.follow(server, module, settings=READING)
            follower.wait_for(version, SECONDS)
        server.processes[0].kill()
        server.restart()
        with training(server) as other:
            other.steps(5)
            with follower:
                wait_until(lambda: isinstance(follower.error, errors.RolledBackError), SECONDS)
                assert follower.version == version
                assert same(parameters_of(module), run.versions[version])


def test_what_others_have_written_into_a_module_is_found_and_mended(caplog):
    module = make_model(1)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING) as follower:
            follower.wait_for(1, SECONDS)
            with follower.hold(), torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1.0)
            version = run.steps(2)
            wait_until(lambda: follower.ready and follower.version == version, SECONDS)
            wait_until(lambda: same(parameters_of(module), run.versions[version]), SECONDS)
    assert "others have written to" in caplog.text


def replace_parameter(module):
    module[0].weight = torch.nn.Parameter(torch.zeros_like(module[0].weight))


def assign_state(module):
    module.load_state_dict({name: value.clone() for name, value in make_model(7).state_dict().items()}, assign=True)


def move_data(module):
    module[0].weight.data = module[0].weight.data.clone().add_(1.0)


@pytest.mark.parametrize("change", [replace_parameter, assign_state, move_data])
def test_tensors_that_were_replaced_are_found_and_follow(change):
    module = make_model(1)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING) as follower:
            follower.wait_for(1, SECONDS)
            with follower.hold(), torch.no_grad():
                change(module)
            version = run.steps(2)
            wait_until(lambda: follower.ready and follower.version == version, SECONDS)
            wait_until(lambda: same(parameters_of(module), run.versions[version]), SECONDS)


def replace_buffer(module):
    module[1].running_mean = torch.full_like(module[1].running_mean, 7.0)


def narrow_buffer(module):
    module[1].running_mean = module[1].running_mean.half()


@pytest.mark.parametrize("change", [replace_buffer, narrow_buffer])
def test_buffers_that_were_replaced_follow_too(change):
    module = make_model(1)
    with LocalServer(cut_seconds=0.01, buffer_period_steps=1) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING) as follower:
            follower.wait_for(1, SECONDS)
            with follower.hold():
                change(module)
            follower.wait_for(run.steps(2), SECONDS)

            def is_there():
                mean = psclient.download(server)["1.running_mean"]
                return torch.equal(module[1].running_mean, mean.to(module[1].running_mean.dtype))

            wait_until(is_there, SECONDS)


def test_writes_while_a_version_is_fetched_are_found_and_keep_no_version_away():
    table, module, seen = torch.nn.Embedding(100, 8), torch.nn.Embedding(100, 8), {}
    sink = psclient.ModuleSink(module)
    real = sink.stage

    def stage(staged):
        real(staged)
        if staged.cut.version > 1:  # what leads there is staged first, and all of it then
            with torch.no_grad():
                module.weight[50:].zero_()

    def note(cut):
        seen[cut.version] = module.weight.detach().clone()

    sink.stage = stage
    with LocalServer(cut_seconds=0.01) as server:
        optimizer = psclient.ASGD(table.parameters(), lr=0.1, model=table, server=server, settings=QUICK)
        with optimizer, Follower(server, sink, READING, on_cut=note):
            for _ in range(3):
                optimizer.zero_grad()
                table(torch.arange(50)).pow(2).sum().backward()
                optimizer.step()
                wait_until(lambda: optimizer.version in seen, SECONDS)
                assert torch.equal(seen[optimizer.version], table.weight)


def test_a_module_of_another_dtype_ends_the_follower():
    module = make_model(1)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING) as follower:
            follower.wait_for(1, SECONDS)
            with follower.hold():
                module.double()
            version = run.steps(2)
            with pytest.raises(errors.FollowerNotReadyError, match="float64, and the run"):
                follower.wait_for(version, SECONDS)
            assert follower.is_over


MISTAKES = {
    "a state dict": (lambda: psclient.follow("localhost:1", make_model().state_dict()), "pass the module itself"),
    "a module as sink": (lambda: Follower("localhost:1", make_model()), r"psclient\.follow"),
    "no function": (lambda: psclient.follow("localhost:1", make_model(), on_cut=3), "on_cut="),
    "a module in a PatchSink": (lambda: psclient.PatchSink(make_model()), "must have stage, commit and abort"),
    "no name": (lambda: DirectorySink(""), "the name is empty"),
    "a file": (lambda: DirectorySink(__file__), "cannot follow with the directory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_at_once(name):
    call, words = MISTAKES[name]
    with pytest.raises(errors.ConfigurationError, match=words):
        call()


def test_versions_are_whole_numbers_and_lag_grows_while_nobody_answers():
    with psclient.follow("localhost:1", make_model(), settings=READING) as follower:
        for version in (-1, 1.5, "5"):
            with pytest.raises(errors.ConfigurationError, match="whole number"):
                follower.wait_for(version)
        before = follower.lag.seconds
        wait_until(lambda: follower.lag.seconds > before + 0.2)
        assert repr(follower) == "<psclient.Follower: not ready>"


def test_an_error_in_a_callback_stops_nothing(caplog):
    module = make_model(1)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING, on_cut=lambda cut: 1 / 0) as follower:
            for _ in range(3):
                follower.wait_for(run.steps(), SECONDS)
    assert caplog.text.count("Traceback") == 1


def test_an_engine_that_fails_in_a_commit_is_not_ready_until_it_has_everything_again():
    engine, not_ready = SleepyEngine(), []
    engine.fails_at = {2, 3}
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with Follower(server, engine, READING) as follower:
            follower.wait_for(1, SECONDS)
            real = engine.commit

            def commit(cut):
                try:
                    real(cut)
                except RuntimeError:
                    not_ready.append(follower.ready)
                    raise

            engine.commit = commit
            version = run.steps(3)
            wait_until(lambda: follower.ready and follower.version == version and engine.commits > 3, SECONDS)
            found = {name: engine.tensors[name] for name in run.versions[version]}
            assert same(found, run.versions[version])
            assert len(not_ready) == 2
            assert engine.commits >= 4


def test_a_transfer_that_is_cut_goes_on_where_it_was():
    torch.manual_seed(0)
    model, module = torch.nn.Linear(2000, 1500), torch.nn.Linear(2000, 1500)
    nbytes = 4 * 1500 * 2001
    with LocalServer() as server:
        optimizer = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server)
        with optimizer, Line(server.addresses[0]) as line:
            line.stop_at("down", nbytes * 2 // 3)
            with psclient.follow(line.address, module, settings=READING) as follower:
                wait_until(lambda: line.down >= nbytes * 2 // 3, SECONDS)
                optimizer.zero_grad()
                model(torch.randn(1, 2000)).sum().backward()
                optimizer.step()  # the cut that was begun is not the newest any more
                line.go_on()
                line.reset()
                follower.wait_for(1, SECONDS)
                assert same(parameters_of(module), parameters_of(model))
                assert line.down < 1.8 * nbytes + nbytes  # two thirds, the rest, and what the step has changed


def test_a_reader_that_does_not_read_keeps_nobody_up(tmp_path):
    module = make_model(1)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with Line(server.addresses[0]) as line, psclient.follow(line.address, module, settings=READING) as follower:
            follower.wait_for(1, SECONDS)
            line.stop_at("down", line.down)
            began = time.monotonic()
            version = run.steps(20)
            assert time.monotonic() - began < SECONDS
            assert follower.ready
            line.go_on()
            line.reset()
            follower.wait_for(version, SECONDS)
            assert same(parameters_of(module), run.versions[version])


def test_the_end_of_a_run_is_told_and_its_last_version_held():
    module = make_model(1)
    with (
        LocalServer(end_versions=5) as server,
        training(server) as run,
        psclient.follow(server, module, settings=READING) as follower,
    ):
        run.steps(5)
        wait_until(lambda: follower.finished, SECONDS)
        assert same(parameters_of(module), run.versions[5])
        with pytest.raises(errors.FollowerNotReadyError, match="the run is over"):
            follower.wait_for(6, SECONDS)


def test_nothing_is_written_after_the_end_although_a_version_waited(tmp_path):
    module = make_model(1)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        follower = psclient.follow(server, module, settings=READING)
        with follower.hold(SECONDS) as cut:
            run.steps(3)
            wait_until(lambda: follower._holds._waiting_alone == 1)
            began = time.monotonic()
            follower.close()
            assert follower.is_over
            assert time.monotonic() - began < 4.0
        assert follower.version == cut.version
        assert same(parameters_of(module), run.versions[cut.version])


def test_writes_to_values_that_no_push_changes_are_found():
    table, module = torch.nn.Embedding(1000, 16), torch.nn.Embedding(1000, 16)
    with LocalServer(cut_seconds=0.01) as server:
        optimizer = psclient.GradientDropping(
            table.parameters(), lr=0.1, model=table, server=server, settings=QUICK, density=0.01
        )

        def step():
            optimizer.zero_grad()
            table(torch.randint(0, 50, (32, 1))).pow(2).sum().backward()
            optimizer.step()
            return optimizer.version

        with optimizer, psclient.follow(server, module, settings=READING) as follower:
            follower.wait_for(step(), SECONDS)
            with follower.hold(), torch.no_grad():
                module.weight[500:].zero_()
            version = step()
            wait_until(lambda: follower.ready and follower.version == version, SECONDS)
            wait_until(lambda: torch.equal(module.weight, psclient.download(server)["weight"]), SECONDS)


def test_what_was_held_is_not_forgotten_when_it_is_lost(tmp_path):
    module, fails = make_model(1), []
    with LocalServer(data_dir=tmp_path, cut_seconds=0.01) as server, training(server) as run:
        version = run.steps(6)
        sink = psclient.ModuleSink(module)
        real = sink.stage

        def stage(staged):
            if fails:
                raise OSError(5, "Input/output error")
            real(staged)

        sink.stage = stage
        with Follower(server, sink, READING) as follower:
            follower.wait_for(version, SECONDS)
            fails.append(True)
            with torch.no_grad():
                module[0].weight.add_(1.0)
            run.steps()
            wait_until(lambda: not follower.ready and isinstance(follower.error, OSError), SECONDS)
            restored(server, 2)
            fails.clear()
            wait_until(lambda: isinstance(follower.error, errors.RolledBackError), SECONDS)
            assert not follower.ready


def test_a_closed_follower_says_so_and_keeps_its_model():
    module = make_model(1)
    with LocalServer() as server, training(server) as run:
        run.steps()
        follower = psclient.follow(server, module, settings=READING)
        follower.wait_for(1, SECONDS)
        refused = []

        def wait():
            try:
                follower.wait_for(99)
            except errors.FollowerNotReadyError as error:
                refused.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        follower.close()
        waiting.join(SECONDS)
        assert len(refused) == 1
        assert follower.ready
        assert same(parameters_of(module), run.versions[1])
        follower.close()


def test_a_module_of_another_model_ends_the_follower_with_its_reason():
    with LocalServer() as server, training(server) as run:
        run.steps()
        with psclient.follow(server, torch.nn.Linear(3, 3), settings=READING) as follower:
            with pytest.raises(errors.FollowerNotReadyError, match=r"0\.weight"):
                follower.wait_for(0, SECONDS)
            assert isinstance(follower.error, errors.ConfigurationError)
            assert follower.is_over


def test_a_follower_needs_a_server():
    with pytest.raises(errors.ConfigurationError, match="no server is named"):
        psclient.follow(None, make_model(), settings=ClientSettings())


def test_readers_of_the_status_and_their_versions(tmp_path):
    module = make_model(1)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING, name="evaluation") as follower:
            version = run.steps(3)
            follower.wait_for(version, SECONDS)
            wait_until(lambda: f"version {version} for 1 reader" in status(server), SECONDS)
            with follower.hold():
                later = run.steps(3)
                wait_until(
                    lambda: f"version {later} for 1 reader; evaluation has version {version}, and" in status(server),
                    SECONDS,
                )


def status(server):
    command = [sys.executable, "-m", "psservice", "status", *server.addresses]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS).stdout


def test_a_reader_that_ends_is_forgotten():
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, make_model(1), settings=READING) as follower:
            follower.wait_for(1, SECONDS)
            wait_until(lambda: "1 reader" in status(server), SECONDS)
        assert "reader" not in status(server)


# The command


def follow_command(server, out, *options):
    environment, _ = marked()
    command = [sys.executable, "-m", "psclient", "follow", server.server.replace(",", " "), "--out", str(out), *options]
    command[4:5] = server.addresses
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_command_keeps_a_directory_and_runs_another_after_each_version(tmp_path):
    script = tmp_path / "note.py"
    script.write_text("import os, sys; open(sys.argv[1], 'a').write(os.environ['SPARSEPS_VERSION'] + ' ')")
    with LocalServer(cut_seconds=0.01, end_versions=6) as server, training(server) as run:
        run.steps(2)
        process = follow_command(server, tmp_path / "m", "--exec", f"{sys.executable} {script} {tmp_path / 'seen'}")
        wait_until(lambda: (tmp_path / "seen").exists(), SECONDS)
        run.steps(4)
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
        about, found = loaded(tmp_path / "m")
        assert about["version"] == 6
        assert all(torch.equal(found[name], value) for name, value in run.versions[6].items())
        seen = [*map(int, (tmp_path / "seen").read_text().split())]
        assert seen == sorted(set(seen))
        assert seen[-1] == 6
        assert "version 6 of run" in output


def test_once_ends_when_a_version_is_there_and_fails_if_none_comes(tmp_path):
    with LocalServer() as server, training(server) as run:
        run.steps(3)
        for _ in range(2):  # the first fetches it, the second finds it
            process = follow_command(server, tmp_path / "m", "--once")
            output, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, output
            assert loaded(tmp_path / "m")[0]["version"] == 3
        process = follow_command(server, tmp_path / "f", "--once", "--exec", f"{sys.executable} -c 'exit(3)'")
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 1
        assert output.count("has ended with status 3") == 1
        process = follow_command(server, tmp_path / "g", "--exec", "./nothere")
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 1
        assert "--exec: there is no program ./nothere" in output
    with LocalServer() as empty:
        process = follow_command(empty, tmp_path / "n", "--once", "--timeout", "4")
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 1
        assert "no worker has uploaded" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_well(tmp_path, number):
    with LocalServer() as server, training(server) as run:
        run.steps()
        process = follow_command(server, tmp_path / "m")
        wait_until(lambda: (tmp_path / "m" / "model.safetensors.index.json").exists(), SECONDS)
        process.send_signal(number)
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
