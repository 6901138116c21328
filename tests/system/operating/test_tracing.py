"""A worker's step is one trace over worker and servers, also where a call is repeated; and nothing where it is off."""

import collections
import os
import socket
import subprocess
import sys
import time
import uuid

import grpc
import pytest
import torch

import psclient
from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN, TracingError
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.process.server import Server, StartError
from psservice.settings import ServerSettings
from tests.system.scripts import ROOT
from tests.system.tools import wait_until
from tests.tiers import long_but

pytest.importorskip("opentelemetry.proto.collector.trace.v1", reason="the extra sparseps[tracing] is not installed")

from tests.system.collector import Collector

TOKEN = "a-token-that-nobody-may-see"

WORKER = """
import sys
import psclient
from tests.system.tools import QUICK, make_data, make_model, train_step

server, overlap, tracing = sys.argv[1], sys.argv[2] == "overlap", sys.argv[3] == "on"
model = make_model()
settings = QUICK.model_copy(update={"tracing": tracing})
optimizer = psclient.DGS(
    model.parameters(), lr=0.1, model=model, server=server, worker="anna", overlap=overlap, settings=settings
)
for _ in range(2):
    train_step(model, optimizer, *make_data())
print("between", flush=True)
sys.stdin.readline()
train_step(model, optimizer, *make_data())
optimizer.pull()
optimizer.close()
print("opentelemetry" in sys.modules, flush=True)
"""


def start_worker(server, collector, mode="plain", tracing="on"):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, server, mode, tracing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **collector.environment, "PSCLIENT_TOKEN": TOKEN},
    )


def trees(spans):
    """The spans of each whole step, by the step's number."""
    by_trace = collections.defaultdict(list)
    for span in spans:
        by_trace[span.trace].append(span)
    roots = {span.attributes["sparseps.step"]: span for span in spans if span.name == "step" and not span.parent}
    return {step: by_trace[root.trace] for step, root in roots.items()}


def below(tree, parent):
    return sorted((span for span in tree if span.parent == parent.span), key=lambda span: (span.name, span.instance))


def one(spans, name, shard):
    (found,) = [span for span in spans if span.name == name and span.attributes.get("sparseps.shard") == shard]
    return found


@pytest.fixture(scope="module")
def collector():
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(collector, tmp_path_factory):
    """Two shards that trace, with a data directory each."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in collector.environment.items():
            patched.setenv(name, value)
        running = LocalServer(shards=2, tracing=True, data_dir=tmp_path_factory.mktemp("data"))
    with running:
        yield running


@pytest.mark.parametrize("mode", long_but(["overlap"], ["plain", "overlap"]))
def test_a_step_is_one_trace_over_a_worker_and_two_shards_also_after_a_restart(mode, server, collector, monkeypatch):
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)
    known = {span.trace for span in collector.spans}

    def new_trees():
        return trees([span for span in collector.spans if span.trace not in known])

    def whole(steps):
        """As many steps, with both servers' part of each."""
        found = [span.name for tree in new_trees().values() for span in tree]
        return all(found.count(name) >= 2 * steps for name in ("PushSparse", "PullDiff"))

    worker = start_worker(server.server, collector, mode)
    assert worker.stdout.readline() == "between\n"
    if mode == "plain":
        wait_until(lambda: whole(2))  # spans that are not exported yet die with the process
        server.processes[1].kill()
        worker.stdin.write("\n")
        worker.stdin.flush()
        server.restart(1)
    said, _ = worker.communicate("\n", timeout=60)
    assert (said, worker.returncode) == ("True\n", 0)
    wait_until(lambda: whole(3))
    assert len(new_trees()) == 3
    for tree in new_trees().values():
        ids = {span.span for span in tree}
        (root,) = [span for span in tree if span.parent not in ids]
        assert (root.service, root.instance, root.name) == ("psclient", "anna", "step")
        assert root.attributes["sparseps.worker"] == "anna"
        assert {"select", "encode", "send", "apply", "push", "pull"} == {span.name for span in below(tree, root)}
        for shard in (0, 1):
            push, pull = one(below(tree, root), "push", shard), one(below(tree, root), "pull", shard)
            assert push.attributes["sparseps.staleness"] in (0, 1)
            received = [span for span in below(tree, push) if not span.error]
            assert {(span.service, span.instance, span.name) for span in received} == {
                ("psservice", f"shard-{shard}", "PushSparse")
            }
            (taken,) = received
            names = [span.name for span in below(tree, taken)]
            assert [name for name in names if name != "queue"] == ["apply", "journal", "receive"]
            (answered,) = [span for span in below(tree, pull) if not span.error]
            assert (answered.instance, answered.name) == (f"shard-{shard}", "PullDiff")
            assert [span.name for span in below(tree, answered)] == ["encode", "select"]


def test_a_call_that_is_repeated_is_part_of_the_same_trace(server, collector):
    trace, span = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    with grpc.insecure_channel(server.addresses[0]) as channel:
        for _ in range(2):
            identity = pb.WorkerIdentity(run_id="other", worker_id="w", incarnation="1")
            header = pb.PushHeader(identity=identity, step=1, traceparent=f"00-{trace}-{span}-01")
            request = pb.PushSparseRequest(header=header)
            call = ParameterServerServiceStub(channel).PushSparse(iter([request]), timeout=30)
            with pytest.raises(grpc.RpcError):
                next(call)
    wait_until(lambda: sum(found.trace == trace for found in collector.spans) >= 2)
    found = [found for found in collector.spans if found.trace == trace]
    calls = [each for each in found if each.name == "PushSparse"]
    assert [each.parent for each in calls] == [span, span]
    assert {each.error for each in calls} == {"FAILED_PRECONDITION"}


def test_no_header_that_makes_no_sense_does_any_harm(server, collector):
    channel = grpc.insecure_channel(server.addresses[0])
    stub = ParameterServerServiceStub(channel)
    before = len(collector.spans)
    for header in (
        "",
        "x",
        "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        "00-" + "g" * 32 + "-" + "1" * 16 + "-01",
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16,
        "00-" + "1" * 4000 + "-" + "1" * 16 + "-01",
        "00-" + "2" * 32 + "-" + "2" * 16 + "-00",
    ):
        stub.GetStatus(pb.GetStatusRequest(), timeout=30, metadata=[("traceparent", header)])
    two = [("traceparent", f"00-{'3' * 32}-{'3' * 16}-01"), ("tracestate", "a=" + "b" * 3000), ("baggage", "k=secret")]
    stub.GetStatus(pb.GetStatusRequest(), timeout=30, metadata=two)
    channel.close()
    wait_until(lambda: any(span.trace == "3" * 32 for span in collector.spans))
    assert [span.name for span in collector.spans[before:]] == ["GetStatus"]
    assert b"secret" not in b"".join(collector.received)


def test_no_token_is_in_any_span(server, collector):
    before = len(collector.spans)
    said, _ = start_worker(server.server, collector).communicate("\n", timeout=60)
    assert said == "between\nTrue\n"
    wait_until(lambda: {span.service for span in collector.spans[before:]} == {"psclient", "psservice"})
    assert TOKEN.encode() not in b"".join(collector.received)


def test_without_the_setting_nothing_is_loaded_and_nothing_sent(server, collector):
    before = {span.trace for span in collector.spans}
    worker = start_worker(server.server, collector, tracing="off")
    assert worker.stdout.readline() == "between\n"
    said, _ = worker.communicate("\n", timeout=60)
    assert (said, worker.returncode) == ("False\n", 0)
    assert {span.trace for span in collector.spans} == before
    probe = "import sys, psservice.process.server, psclient.optim.base; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT, timeout=60).returncode == 0


@pytest.fixture
def without_opentelemetry(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "pscore.telemetry.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


def test_a_missing_package_is_named_with_what_to_install(without_opentelemetry):
    settings = psclient.ClientSettings(server="127.0.0.1:9", tracing=True)
    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigurationError, match=r"pip install 'sparseps\[tracing\]'"):
        psclient.DGS([parameter], lr=0.1, settings=settings)
    with pytest.raises(StartError, match=r"pip install 'sparseps\[tracing\]'"):
        Server(ServerSettings(listen="127.0.0.1:0", health_listen="", metrics_listen="", tracing=True))


def test_an_exporter_that_there_is_not_is_named_with_those_that_there_are(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(TracingError, match=r"OTEL_TRACES_EXPORTER=pigeon: use one of otlp, .*console"):
        tracing.start("psservice", "shard-0")
    assert tracing.begin_step(step=1) is NO_SPAN


def test_a_collector_that_does_not_answer_keeps_no_process_from_ending(monkeypatch):
    from pscore.telemetry import spans

    monkeypatch.setattr(spans, "_LAST_SECONDS", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        made = spans.Spans("psservice", "shard-0")
        made.begin("step", {}, root=True).end()
        begun = time.monotonic()
        made.close()
        assert time.monotonic() - begun < 20, "OpenTelemetry itself waits for 30 s"
