"""What an operator sees and does: commands, health, metrics, files, settings."""

import json
import os
import subprocess
import sys

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from safetensors.torch import load_file, save_file

import psclient
from psclient.errors import FingerprintMismatchError, ServerNotReadyError
from psclient.rpc.local_server import LocalServer
from tests.system.operating.asking import metrics
from tests.system.tools import QUICK, make_data, make_model, train_step


def run(*arguments: str, program: str = "psservice", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def dgs(model, server, **options):
    return psclient.DGS(model.parameters(), lr=0.1, model=model, server=server, settings=QUICK, **options)


def test_status_in_words_and_as_json():
    with LocalServer(shards=2) as server:
        model = make_model()
        optimizer = dgs(model, server, worker="worker-a")
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        words = run("status", *server.addresses)
        assert words.returncode == 0, words.stderr
        assert "worker-a" in words.stdout
        assert "0 of 2, on cpu" in words.stdout
        shards = json.loads(run("status", *server.addresses, "--output=json").stdout)
        assert [shard["version"] for shard in shards] == [3, 3]
        assert [shard["shard_index"] for shard in shards] == [0, 1]
        assert shards[0]["method"] == "dgs"
        assert shards[0]["workers"][0]["last_step"] == 3
        assert shards[0]["samples"] == 3 * 256
        assert sum(s["push_bytes"] for s in shards) == optimizer.totals.push_bytes
        assert sum(s["pull_bytes"] for s in shards) == optimizer.totals.pull_bytes
        assert sum(s["buffer_bytes"] for s in shards) == optimizer.totals.buffer_bytes


def test_status_of_nothing_says_so():
    answer = run("status", "127.0.0.1:9", "--timeout", "2")
    assert answer.returncode == 1
    assert "127.0.0.1:9" in answer.stderr


def test_finish_writes_the_final_model(tmp_path):
    final = tmp_path / "final.safetensors"
    with LocalServer(final_model=final) as server:
        model = make_model()
        optimizer = dgs(model, server)
        train_step(model, optimizer, *make_data())
        answer = run("finish", *server.addresses)
        assert answer.returncode == 0, answer.stderr
        assert str(final) in answer.stdout
        train_step(model, optimizer, *make_data())
        assert optimizer.finished
        assert optimizer.report.refused == 1
        loaded = make_model(1)
        loaded.load_state_dict(load_file(final))
        for name, tensor in psclient.download(server.server).items():
            assert torch.equal(tensor, loaded.state_dict()[name]), name
        optimizer.close()  # it would live on, and wait at exit for a server that is gone


def test_save_and_merge(tmp_path):
    part = tmp_path / "part.safetensors"
    with LocalServer(shards=2, final_model=part, run_id="r7") as server:
        model = make_model()
        optimizer = dgs(model, server)
        assert optimizer.run_id == "r7"
        train_step(model, optimizer, *make_data())
        saved = run("save", *server.addresses, "--out", str(tmp_path / "saved.safetensors"), program="psclient")
        assert saved.returncode == 0, saved.stderr
        assert run("finish", *server.addresses).returncode == 0
    parts = [str(path) for path in sorted(tmp_path.glob("part-*"))]
    merged = run("merge", *parts, "--out", str(tmp_path / "merged.safetensors"), program="psclient")
    assert merged.returncode == 0, merged.stderr
    one, other = load_file(tmp_path / "saved.safetensors"), load_file(tmp_path / "merged.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    incomplete = run("merge", parts[0], "--out", str(tmp_path / "x"), program="psclient")
    assert incomplete.returncode == 1
    assert "elements found" in incomplete.stderr


@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_starts_from_a_file(tmp_path, shards):
    start = make_model(5)
    save_file(start.state_dict(), tmp_path / "start.safetensors")
    with LocalServer(shards=shards, init=tmp_path / "start.safetensors") as server:
        model = make_model(1)
        dgs(model, server)
        assert torch.equal(model[0].weight, start[0].weight)
        assert torch.equal(model[1].running_mean, start[1].running_mean)


def test_a_file_of_another_model_is_refused(tmp_path):
    save_file({"0.weight": torch.ones(3)}, tmp_path / "start.safetensors")
    with LocalServer(init=tmp_path / "start.safetensors") as server, pytest.raises(FingerprintMismatchError):
        dgs(make_model(), server)


def test_a_missing_start_file_ends_the_server_with_its_name(tmp_path):
    answer = run("serve", "--listen", "127.0.0.1:0", "--init", str(tmp_path / "no.safetensors"))
    assert answer.returncode == 1
    assert "no.safetensors" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_health_and_reflection_and_metrics():
    with LocalServer(health_listen="127.0.0.1:0") as server:
        for address in (server.health_addresses[0], server.addresses[0]):
            with grpc.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                for service in ("", "sparseps.v1.ParameterServerService"):
                    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with grpc.insecure_channel(server.addresses[0]) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            answer = next(stub.ServerReflectionInfo(iter([request]), timeout=30))
            names = {service.name for service in answer.list_services_response.service}
            assert "sparseps.v1.ParameterServerService" in names
            v1 = channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )
            for symbol in ("sparseps.v1.ParameterServerService", "grpc.reflection.v1.ServerReflection"):
                request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
                answer = next(v1(iter([request]), timeout=30))
                assert answer.file_descriptor_response.file_descriptor_proto, symbol

        model = make_model()
        optimizer = dgs(model, server)
        for _ in range(2):
            train_step(model, optimizer, *make_data())
        values = dict(line.rsplit(" ", 1) for line in metrics(server).splitlines() if not line.startswith("#"))
        assert values["psservice_pushes_total"] == "2.0"
        assert values["psservice_version"] == "2.0"
        assert values["psservice_live_workers"] == "1.0"
        assert values["psservice_staleness_count"] == "2.0"
        assert values["psservice_apply_seconds_count"] == "2.0"
        assert float(values['psservice_received_bytes_total{rpc="PushSparse"}']) == optimizer.totals.push_bytes
        assert float(values['psservice_sent_bytes_total{rpc="PullDiff"}']) == optimizer.totals.pull_bytes


def test_reflection_may_be_off():
    with LocalServer(reflection="off") as server, grpc.insecure_channel(server.addresses[0]) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.ServerReflectionInfo(iter([request]), timeout=30))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_taken_port_and_a_missing_device_are_said():
    with LocalServer() as server:
        answer = run("serve", "--listen", server.addresses[0], "--health-listen", "", "--metrics-listen", "")
        assert answer.returncode == 1
        assert f"cannot listen on {server.addresses[0]}" in answer.stderr
    if not torch.cuda.is_available():
        answer = run("serve", "--listen", "127.0.0.1:0", "--device", "cuda")
        assert answer.returncode == 1
        assert "--device cpu" in answer.stderr


def test_addresses_beyond_loopback_need_a_word():
    answer = run("serve", "--listen", "0.0.0.0:0")
    assert answer.returncode == 2
    assert "--insecure" in answer.stderr


def test_settings_are_printed_at_start():
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "psservice", "serve", "--listen=127.0.0.1:0", "--health-listen=", "--metrics-listen=",
         f"--ready-fd={write_end}"],
        pass_fds=(write_end,), stderr=subprocess.PIPE, text=True, env={**os.environ, "PSSERVICE_LEASE_SECONDS": "7"},
    )  # fmt: skip
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        assert json.loads(stream.readline())["address"].startswith("127.0.0.1:")
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    lines = [json.loads(line) for line in err.splitlines()]
    assert lines[0]["message"] == "serving"
    assert lines[0]["settings"]["lease_seconds"] == 7
    assert lines[-1]["message"] == "stopped"


def test_a_download_before_there_is_a_model_says_so():
    with LocalServer() as server, pytest.raises(ServerNotReadyError):
        psclient.download(server.server)


def test_shards_in_the_wrong_order_are_refused():
    with LocalServer(shards=2) as server:
        with pytest.raises(psclient.errors.RefusedError, match="shard 0 of 2"):
            dgs(make_model(), server.addresses[::-1])
        with pytest.raises(psclient.errors.RefusedError, match="SHARD_MISMATCH"):
            dgs(make_model(), server.addresses[0])
