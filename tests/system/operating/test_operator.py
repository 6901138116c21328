"""What an operator does to running servers, with real processes: every command, its exit status, and its JSON."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

import psclient
from psclient.cli import main as psclient_main
from psclient.errors import EvictedError
from psclient.rpc.local_server import LocalServer
from pscore.model.layout import Span, layout_of
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.frames import Checksum, WireForm, encode
from pscore.wire.messages import PROTOCOL_VERSION, layout_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.cli import main as cli
from psservice.operator.client import call
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, train_step, wait_until

NOWHERE = "127.0.0.1:9"


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory):
    """A run of two shards with a data directory; each test leaves it serving."""
    with LocalServer(shards=2, health_listen="127.0.0.1:0", data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def worker(two_shards):
    """A model and its optimizer, after one step."""
    model = make_model(batch_norm=False)
    with_dgs = psclient.DGS(
        model.parameters(), lr=0.1, model=model, server=two_shards.server, worker="w", settings=QUICK
    )
    train_step(model, with_dgs, *make_data())
    yield model, with_dgs
    with_dgs.close()


def status(address):
    return call(address, "GetStatus", pb.GetStatusRequest(), 30.0)


def versions(server):
    return [status(address).version for address in server.addresses]


def run(capsys, *words):
    """Run a command in this process; return its exit status and what it has printed."""
    capsys.readouterr()
    code = cli.main([*words])
    return code, capsys.readouterr()


def run_json(capsys, *words):
    code, printed = run(capsys, *words, "--json")
    return code, json.loads(printed.out)


def metric(metrics_address, line):
    text = urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=30).read().decode()
    found = re.search(rf"{re.escape(line)} (\S+)", text)
    return float(found[1]) if found else 0.0


def refused(metrics_address, reason):
    """How many calls a shard has refused for a reason."""
    return metric(metrics_address, f'psservice_refusals_total{{reason="{reason}"}}')


def looks(metrics_address):
    """How many times a shard has told its status."""
    return metric(metrics_address, 'psservice_call_seconds_count{rpc="GetStatus"}')


def health(address):
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def test_workers_of_all_shards_in_one_table(two_shards, worker, capsys):
    code, found = run_json(capsys, "workers", *reversed(two_shards.addresses))
    assert code == 0
    (only,) = found["workers"]
    assert only["worker_id"] == "w"
    assert set(only["staleness"]) == {"0", "1"}
    assert only["missing_shards"] == found["unreached"] == []
    assert only["push_bytes"] == worker[1].totals.push_bytes
    assert only["step"] == status(two_shards.addresses[1]).workers[0].last_step
    code, printed = run(capsys, "workers", two_shards.server)
    assert code == 0
    assert only["incarnation"][:8] in printed.out


def test_a_frame_of_top_has_shards_rates_and_workers(two_shards, worker, capsys):
    code, frame = run_json(capsys, "top", two_shards.server, "--once", "--interval-seconds", "0.1")
    assert code == 0
    assert [shard["shard_index"] for shard in frame["shards"]] == [0, 1]
    assert [shard["pushes_per_second"] for shard in frame["shards"]] == [0, 0]
    assert all(shard["dense_push_bytes"] >= 4 * shard["length"] for shard in frame["shards"])
    assert [each["worker_id"] for each in frame["workers"]] == ["w"]
    code, printed = run(capsys, "top", NOWHERE, two_shards.server, "--interval-seconds", "0.1")
    assert code == 4, "one of three does not answer"
    assert "no answer" in printed.out
    assert "1 workers" in printed.out


def test_top_goes_on_line_by_line_until_it_is_interrupted(two_shards):
    command = [sys.executable, "-m", "psservice", "top", two_shards.server, "--json", "--interval-seconds", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        frames = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert frames[0]["unix_seconds"] < frames[1]["unix_seconds"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_exit_statuses_tell_unreachable_wrong_refused_and_partial(two_shards, worker, capsys):
    quick = ("--timeout", "20")
    for command in (
        ["status"],
        ["workers"],
        ["finish"],
        ["snapshot"],
        ["restore", "--version", "1"],
        ["drain"],
        ["evict", "w"],
    ):
        assert run(capsys, *command, NOWHERE, *quick)[0] == 1, command
    assert run(capsys, "status", NOWHERE, two_shards.server, *quick)[0] == 4
    assert run(capsys, "restore", two_shards.server, "--checkpoint", "no-such")[0] == 3
    assert run(capsys, "evict", "nobody", two_shards.server)[0] == 3
    assert run(capsys, "evict", "nobody", two_shards.addresses[0], NOWHERE, *quick)[0] == 1, "that one may have it"
    before = [status(address).snapshot_checkpoint for address in two_shards.addresses]
    code, printed = run(capsys, "snapshot", two_shards.server, NOWHERE, *quick)
    assert (code, "no snapshot was taken" in printed.err) == (1, True), "a checkpoint is of all shards or of none"
    assert [status(address).snapshot_checkpoint for address in two_shards.addresses] == before
    for wrong in (
        ["status", "no-port"],
        ["evict", "w", NOWHERE, "--ban-seconds", "nan"],
        ["top", NOWHERE, "--interval-seconds", "0"],
        ["restore", NOWHERE, "--version", "-1"],
        ["restore", NOWHERE, "--version", str(2**64)],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(wrong)
        assert ended.value.code == 2, wrong


@pytest.mark.parametrize(
    "words",
    [
        ["snapshot"],
        ["restore", "--version", "1"],
        ["drain"],
        ["drain", "--stop"],
        ["drain", "--undo"],
        ["evict", "w"],
        ["finish"],
    ],
    ids=" ".join,
)
def test_what_changes_a_run_takes_all_its_shards(words, two_shards, worker, capsys):
    def seen():
        found = [status(address) for address in two_shards.addresses]
        return [(s.generation, s.snapshot_checkpoint, s.run_state, s.draining, len(s.workers)) for s in found]

    before = seen()
    code, printed = run(capsys, *words, two_shards.addresses[1])
    assert code == 2
    assert "1 of the run's 2 shards were named; nothing was done" in printed.err
    assert seen() == before


def test_a_shard_that_goes_back_alone_holds_no_worker_up(tmp_path, capsys):
    with LocalServer(shards=2, data_dir=tmp_path) as server:
        model = make_model(batch_norm=False)
        optimizer = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK)
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        call(server.addresses[0], "RestoreModel", pb.RestoreModelRequest(version=1), 30.0)  # as if one had refused
        for _ in range(2):  # what shard 0 has refused of the first goes with the second
            train_step(model, optimizer, *make_data())
        optimizer.pull()
        assert_same_parameters(model, server.server)
        assert run(capsys, "restore", server.server, "--version", "1")[0] == 0
        for _ in range(2):
            train_step(model, optimizer, *make_data())
        optimizer.pull()
        assert_same_parameters(model, server.server)
        optimizer.close()


def test_what_is_no_server_and_a_token_that_cannot_be_sent_are_said(two_shards, capsys, monkeypatch):
    code, printed = run(capsys, "status", two_shards.health_addresses[0])
    assert code == 3
    assert "not its --health-listen" in printed.err
    monkeypatch.setenv("PSCLIENT_TOKEN", "two\nlines")
    code, printed = run(capsys, "status", two_shards.server)
    assert code == 2
    assert "PSCLIENT_TOKEN" in printed.err


def test_output_that_nobody_reads_or_no_terminal_can_show_is_no_traceback(two_shards):
    command = [sys.executable, "-m", "psservice"]
    for words in (["status", "--json"], ["workers", "--json"], ["top", "--once", "--interval-seconds", "0.1"]):
        read_end, write_end = os.pipe()
        os.close(read_end)
        with os.fdopen(write_end, "wb") as unread:
            ended = subprocess.run(
                [*command, *words, two_shards.server], stdout=unread, stderr=subprocess.PIPE, text=True, timeout=60
            )
        assert (ended.returncode, ended.stderr) == (141, ""), words
    ended = subprocess.run(
        [*command, "top", "--once", "--interval-seconds", "0.1", two_shards.server, NOWHERE],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert ended.returncode == 4, ended.stderr
    assert "no answer" in ended.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_output_that_cannot_be_written_has_a_message_and_a_status(two_shards):
    for words in (["status"], ["status", "--json"], ["top", "--once", "--interval-seconds", "0.1"]):
        with open("/dev/full", "wb") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "psservice", *words, two_shards.server],
                stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            )  # fmt: skip
        assert ended.returncode == 74, ended.stderr
        assert "could not be written" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert "ignored" not in ended.stderr


def test_json_stays_json_where_stderr_is_closed(two_shards):
    command = [sys.executable, "-m", "psservice", "evict", "nobody", two_shards.server, "--json"]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command],
        stdout=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 3
    assert [each["reason"] for each in json.loads(ended.stdout)] == ["NO_SUCH_WORKER"] * 2


def test_names_that_are_no_utf_8_are_wrong_usage(two_shards, capsys):
    name = os.fsdecode(b"worker-\xff")
    for words in (["evict", name, two_shards.server], ["restore", "--checkpoint", name, two_shards.server]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2
        assert "not valid UTF-8" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_that_waits(two_shards):
    pid = two_shards.processes[1].pid
    before = looks(two_shards.metrics_addresses[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "psservice", "drain", "--undo", two_shards.server], stderr=subprocess.PIPE, text=True
        )
        wait_until(lambda: looks(two_shards.metrics_addresses[0]) > before)  # so the other is asked too
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert process.returncode == 130
    assert "interrupted" in printed
    assert "Traceback" not in printed


def test_the_same_shard_under_two_names_is_noticed_before_anything_is_done(two_shards, worker, capsys):
    other_name = two_shards.addresses[0].replace("127.0.0.1", "localhost")
    for command in (["drain"], ["snapshot"], ["restore", "--version", "1"]):
        code, printed = run(capsys, *command, two_shards.server, other_name)
        assert code == 2
        assert "both shard 0; nothing was done" in printed.err
    assert not any(status(address).draining for address in two_shards.addresses)


def test_a_checkpoint_is_taken_with_addresses_in_any_order_and_gone_back_to(two_shards, worker, capsys):
    model, optimizer = worker
    code, taken = run_json(capsys, "snapshot", *reversed(two_shards.addresses))
    assert code == 0
    assert [each["address"] for each in taken] == two_shards.addresses
    assert len({each["checkpoint"] for each in taken}) == 1
    train_step(model, optimizer, *make_data(1))
    code, back = run_json(capsys, "restore", two_shards.server, "--checkpoint", taken[0]["checkpoint"])
    assert code == 0
    assert [each["version"] for each in back] == [each["version"] for each in taken] == versions(two_shards)
    train_step(model, optimizer, *make_data(2))
    optimizer.pull()
    assert_same_parameters(model, two_shards.server)


def test_a_drained_shard_takes_nothing_new_and_its_workers_wait_for_it(two_shards, worker, capsys):
    model, optimizer = worker
    before = versions(two_shards)
    code, drained = run_json(capsys, "drain", two_shards.server)
    assert code == 0
    assert all(each["drained"] and not each["stopping"] for each in drained)
    assert len({each["snapshot"]["checkpoint"] for each in drained}) == 1
    assert [each["snapshot"]["version"] for each in drained] == before
    assert [health(address) for address in two_shards.health_addresses] == ["NOT_SERVING"] * 2
    stepping = threading.Thread(target=train_step, args=(model, optimizer, *make_data(1)), daemon=True)
    stepping.start()
    wait_until(lambda: refused(two_shards.metrics_addresses[0], "DRAINING") >= 2)
    assert stepping.is_alive(), "it is refused again and again, and waits"
    assert versions(two_shards) == before
    code, opened = run_json(capsys, "drain", "--undo", two_shards.server)
    assert (code, [each["draining"] for each in opened]) == (0, [False, False])
    stepping.join(60)
    assert not stepping.is_alive()
    assert versions(two_shards) == [version + 1 for version in before], "once, and at both"
    assert [health(address) for address in two_shards.health_addresses] == ["SERVING"] * 2
    assert_same_parameters(model, two_shards.server)


def test_a_second_drain_names_the_checkpoint_of_the_first(two_shards, worker, capsys):
    drains = [run_json(capsys, "drain", two_shards.server) for _ in range(2)]
    first, second = ([each["snapshot"]["checkpoint"] for each in drained] for _, drained in drains)
    assert (first, [code for code, _ in drains]) == (second, [0, 0])
    _, listed = run_json(capsys, "checkpoints", two_shards.server)
    assert listed["checkpoints"][-1]["checkpoint"] == first[0]
    assert run(capsys, "drain", "--undo", two_shards.server)[0] == 0
    train_step(*worker, *make_data())
    _, later = run_json(capsys, "drain", two_shards.server)
    assert first[0] not in [each["snapshot"]["checkpoint"] for each in later]
    assert run(capsys, "drain", "--undo", two_shards.server)[0] == 0


def pushed(address, messages):
    """Make one push on a stream of its own."""
    with grpc.insecure_channel(address) as channel:
        return next(ParameterServerServiceStub(channel).PushSparse(messages, timeout=60))


def test_drain_waits_for_a_push_that_is_under_way(two_shards, worker, capsys):
    _, optimizer = worker
    address, answers = two_shards.addresses[1], []
    shard = status(address)
    commit = threading.Event()

    def messages():
        identity = optimizer._membership.identity
        header = pb.PushHeader(
            identity=identity, step=1000, generation=shard.generation, base_version=shard.version, samples=1
        )
        yield pb.PushSparseRequest(header=header)
        commit.wait(60)
        yield pb.PushSparseRequest(commit=pb.Commit())

    pushing = threading.Thread(target=lambda: answers.append(pushed(address, messages())), daemon=True)
    pushing.start()
    wait_until(lambda: status(address).calls_inside == 1)
    code, (_, late) = run_json(capsys, "drain", two_shards.server, "--timeout", "1")
    assert code == 4
    assert (late["drained"], late["calls_inside"], late["snapshot"]) == (False, 1, None)
    commit.set()
    code, (_, drained) = run_json(capsys, "drain", two_shards.server)
    assert (code, drained["drained"]) == (0, True)
    pushing.join(60)
    assert answers[0].version == drained["version"] == drained["snapshot"]["version"] == shard.version + 1
    assert run(capsys, "drain", "--undo", two_shards.server)[0] == 0


def test_a_model_whose_upload_a_drain_has_waited_for_is_in_its_checkpoint(tmp_path, capsys):
    layout = layout_of([("w", torch.ones(2))], [])
    identity = pb.WorkerIdentity(worker_id="uploader", incarnation="first")
    request = pb.JoinRequest(
        protocol_version=PROTOCOL_VERSION, identity=identity, layout=layout_to_message(layout), method="raw"
    )
    request.num_shards = 1
    [(chunk, _)] = encode(SparseSlice(Span(0, 2), None, torch.ones(2)), WireForm(), chunk_bytes=1 << 16)
    checksum = Checksum()
    checksum.add(chunk)
    commit = threading.Event()
    with LocalServer(data_dir=tmp_path) as server:
        joined = call(server.server, "Join", request, 30.0)
        identity.run_id = joined.run_id

        def messages():
            yield pb.UploadModelRequest(header=pb.UploadHeader(identity=identity, generation=joined.generation))
            yield pb.UploadModelRequest(chunk=chunk)
            commit.wait(60)
            yield pb.UploadModelRequest(commit=checksum.commit())

        def end_upload():
            wait_until(lambda: status(server.server).draining)
            commit.set()

        uploading = threading.Thread(target=call, args=(server.server, "UploadModel", messages(), 60.0), daemon=True)
        uploading.start()
        wait_until(lambda: status(server.server).calls_inside == 1)
        ending = threading.Thread(target=end_upload, daemon=True)
        ending.start()
        code, drained = run_json(capsys, "drain", server.server)
        for thread in (uploading, ending):
            thread.join(60)
        assert (code, drained[0]["drained"]) == (0, True)
        assert drained[0]["snapshot"]["checkpoint"]


def test_an_evicted_worker_joins_again_and_nothing_is_lost(two_shards, worker, capsys):
    model, optimizer = worker
    before = versions(two_shards)
    code, evicted = run_json(capsys, "evict", "w", two_shards.server)
    assert code == 0
    assert all(each["had_lease"] for each in evicted)
    assert run_json(capsys, "workers", two_shards.server)[1]["workers"] == []
    train_step(model, optimizer, *make_data(1))
    assert versions(two_shards) == [version + 1 for version in before]
    assert optimizer.report.refused == 0
    assert_same_parameters(model, two_shards.server)


def test_a_worker_that_is_kept_out_is_told_so_and_goes_on_afterwards(two_shards, worker, capsys):
    model, optimizer = worker
    before = versions(two_shards)
    assert run(capsys, "evict", "w", two_shards.server, "--ban-seconds", "600")[0] == 0
    with pytest.raises(EvictedError, match="evicted worker 'w'") as told:
        train_step(model, optimizer, *make_data(1))
    assert 0 < told.value.seconds <= 600
    assert versions(two_shards) == before
    code, found = run_json(capsys, "workers", two_shards.server)
    assert (code, found["workers"]) == (0, [])
    assert 0 < found["evicted"]["w"] <= 600
    assert run(capsys, "evict", "w", two_shards.server, "--ban-seconds", "0")[0] == 0
    train_step(model, optimizer, *make_data(2))
    assert versions(two_shards) == [version + 2 for version in before], "what was in doubt, and the new step, once each"
    assert_same_parameters(model, two_shards.server)
    assert run(capsys, "evict", "w", two_shards.server, "--ban-seconds", "1e9")[0] == 3


def test_a_name_without_a_lease_is_kept_out_before_it_comes(two_shards, worker, capsys):
    code, told = run_json(capsys, "evict", "intruder", two_shards.server, "--ban-seconds", "600")
    assert (code, [each["had_lease"] for each in told]) == (0, [False, False])
    model = make_model(batch_norm=False)
    with pytest.raises(EvictedError, match="'intruder'"):
        psclient.DGS(model.parameters(), lr=0.1, model=model, server=two_shards.server, worker="intruder")
    code, printed = run(capsys, "evict", "intruder", two_shards.server)
    assert (code, "is kept out no longer" in printed.out) == (0, True)
    assert run(capsys, "evict", "intruder", two_shards.server)[0] == 3, "neither here nor kept out"


def test_the_end_of_a_run_without_a_final_model_names_what_writes_it(tmp_path, capsys):
    with LocalServer(shards=2) as server:
        model = make_model(batch_norm=False)
        optimizer = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK)
        train_step(model, optimizer, *make_data())
        code, printed = run(capsys, "finish", *reversed(server.addresses))
        assert code == 0
        (command, *_) = re.findall(r"`psclient (save [^`]*) --out FILE`", printed.out)
        assert psclient_main([*command.split(), "--out", str(tmp_path / "model.safetensors")]) == 0
        optimizer.close()


def test_drain_and_stop_ends_the_process_and_the_run_goes_on_from_its_disk(tmp_path, capsys):
    with LocalServer(data_dir=tmp_path) as server:
        model = make_model(batch_norm=False)
        optimizer = psclient.DGS(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK)
        train_step(model, optimizer, *make_data())
        code, stopped = run_json(capsys, "drain", "--stop", server.server)
        assert (code, stopped[0]["stopping"]) == (0, True)
        assert server.processes[0].wait(60) == 0
        server.restart()
        train_step(model, optimizer, *make_data(1))
        assert versions(server) == [2]
        for name, tensor in psclient.download(server.server).items():
            assert torch.equal(tensor, dict(model.named_parameters())[name]), name
