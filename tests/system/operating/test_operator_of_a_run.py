"""What an operator's commands do to a run: checkpoint, drain, evict and finish, with real processes."""

import re
import threading

import grpc
import pytest
import torch

import psclient
from psclient.cli import main as psclient_main
from psclient.errors import EvictedError
from psclient.rpc.local_server import LocalServer
from pscore.model.layout import Span, layout_of
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.frames import Checksum, WireForm, encode
from pscore.wire.layouts import pack_layout
from pscore.wire.protocol import NEWEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.ctl.client import call
from tests.system.operating.asking import health, refused, run, run_json, status, versions
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, run_of, train_step, wait_until


def test_the_same_shard_under_two_names_is_noticed_before_anything_is_done(two_shards, worker, capsys):
    other_name = two_shards.addresses[0].replace("127.0.0.1", "localhost")
    for command in (["drain"], ["checkpoint", "create"], ["restore", "--version", "1"]):
        code, printed = run(capsys, *command, two_shards.server, other_name)
        assert code == 2
        assert "both shard 0; nothing was done" in printed.err
    assert not any(status(address).draining for address in two_shards.addresses)


def test_a_checkpoint_is_taken_with_addresses_in_any_order_and_gone_back_to(two_shards, worker, capsys):
    model, optimizer = worker
    code, taken = run_json(capsys, "checkpoint", "create", *reversed(two_shards.addresses))
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
    _, listed = run_json(capsys, "checkpoint", "list", two_shards.server)
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
        identity = run_of(optimizer).identity
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
        protocol_version=NEWEST_PROTOCOL, identity=identity, layout=pack_layout(layout), method="raw"
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
        optimizer = psclient.DGS(
            model.parameters(), lr=0.1, density=0.01, model=model, server=server.server, settings=QUICK
        )
        train_step(model, optimizer, *make_data())
        code, stopped = run_json(capsys, "drain", "--stop", server.server)
        assert (code, stopped[0]["stopping"]) == (0, True)
        assert server.processes[0].wait(60) == 0
        server.restart()
        train_step(model, optimizer, *make_data(1))
        assert versions(server) == [2]
        for name, tensor in psclient.download(server.server).items():
            assert torch.equal(tensor, dict(model.named_parameters())[name]), name
