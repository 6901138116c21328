"""Processes of a node are one worker: real processes that average over gloo, and real servers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import psclient
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl.client import call
from tests.system.node_processes import bags, launch, launch_all
from tests.system.tools import QUICK, make_data, make_model, train_step

ROOT = Path(__file__).resolve().parents[3]


def status(server: LocalServer) -> pb.GetStatusResponse:
    return call(server.addresses[0], "GetStatus", pb.GetStatusRequest(), 10.0)


def assert_equal(*lists):
    for tensors in zip(*lists, strict=True):
        assert all(torch.equal(tensors[0], other) for other in tensors[1:])


def of_server(server, model):
    state = psclient.download(server.server)
    return [state[name] for name, _ in model.named_parameters() if name in state]


def test_a_node_is_one_worker_with_the_whole_batch(tmp_path):
    model = make_model(0, batch_norm=False)
    with LocalServer(down_mode="exact") as server, LocalServer(down_mode="exact") as for_one:
        leader, follower = launch("trains", 2, tmp_path, server.server)
        with psclient.DGS(
            model.parameters(), lr=0.1, momentum=0.5, density=0.1, model=model, server=for_one, settings=QUICK
        ) as one:
            scheduler = torch.optim.lr_scheduler.StepLR(one, 3, 0.5)
            for _ in range(6):
                train_step(model, one, *make_data())
                scheduler.step()
            assert (leader["version"], leader["samples"]) == (one.version, one.totals.samples) == (6, 6 * 256)
        assert status(server).samples == status(for_one).samples == 6 * 256
        for ours, expected in zip(leader["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-6)
        assert_equal(leader["parameters"], follower["parameters"])

        assert leader["rate"] == follower["rate"] == leader["loaded"] == follower["loaded"] == pytest.approx(0.025)
        assert_equal(leader["residuals"], leader["saved residuals"], leader["collected"])
        assert leader["version then"] == follower["version then"] == 6
        assert not follower["collected"]
        assert any(residual.any() for residual in leader["residuals"])
        assert not follower["residuals"]
        assert_equal(leader["flushed"], follower["flushed"], of_server(server, model))


def test_rows_that_processes_have_touched_are_averaged_and_sent_as_rows(tmp_path):
    with LocalServer(down_mode="exact") as server:
        leader, follower = launch("averages_rows", 2, tmp_path, server.server)
    assert leader["is sparse"]
    assert follower["is sparse"]
    assert leader["entries"] <= 3 * (8 * 3 * 8 + 9), "three steps' rows of both, and the layer"
    assert_equal(leader["parameters"], follower["parameters"])
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(500, 8, mode="sum"), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for parameter, begin in zip(model.parameters(), leader["begin"], strict=True):
            parameter.copy_(begin)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        plain.zero_grad()
        model(bags(step)).square().mean().backward()
        plain.step()
    for ours, expected in zip(leader["parameters"], model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-6)


def test_a_model_of_which_each_process_has_a_part_is_refused_by_all_of_them_at_once(tmp_path):
    """Reading such a parameter is a collective: one process alone would wait in it for the others."""
    with LocalServer() as server:
        for found in launch("shards_its_model", 2, tmp_path, server.server):
            for (kind, method), (error, message, _) in found.items():
                assert error == "ConfigurationError", f"{kind}, {method}: {error}: {message}"
                assert "docs/guide/fsdp.md" in message, f"{kind}, {method}"
                assert message.startswith("'0.weight'") or kind.startswith("FSDP") or "bare" in method


@pytest.mark.long
@pytest.mark.parametrize("loader", [0, 1])
def test_a_node_has_the_model_that_its_leader_has(loader, tmp_path):
    with LocalServer(down_mode="exact") as server:
        leader, follower = launch("loads_a_model", 2, tmp_path, server.server, str(loader))
        assert_equal(leader["parameters"], follower["parameters"], of_server(server, make_model(batch_norm=False)))
    mean = torch.cat([each.reshape(-1) for each in leader["parameters"]]).mean().item()
    assert mean == pytest.approx(5.0 if loader == 0 else 0.0, abs=0.1)


def test_all_processes_meet_the_same_end_and_the_same_errors(tmp_path):
    with LocalServer(down_mode="exact", buffer_period_steps=2, end_versions=4) as server:
        leader, follower = launch("meets_errors", 2, tmp_path, server.server)
        end = of_server(server, make_model())
    for name in ("joined", "buffers", "parameters"):
        assert_equal(leader[name], follower[name])
    assert_equal(leader["parameters"][2:], end)  # which has no frozen layer
    assert_equal(leader["joined"][:2], leader["parameters"][:2])  # the frozen layer
    assert not torch.equal(leader["joined"][2], leader["parameters"][2])
    for name in ("not finite", "finished", "closed twice", "version", "end"):
        assert leader[name] == follower[name]
    kind, message, attributes = leader["not finite"]
    assert kind == "NonFiniteGradientError"
    assert "scale the loss" in message
    assert attributes == {"parameter": "1.bias"}
    assert leader["version"] == 2
    assert leader["end"] == 4
    assert leader["finished"][0] == "RunFinishedError"
    assert leader["closed"][0] == follower["closed twice"][0] == "ConfigurationError"
    assert follower["closed"][0] == "NodeBrokenError"
    for found in (leader, follower):
        assert found["other calls"][0] == found["other models"][0] == "ConfigurationError"
        assert "same calls in the same order" in found["other calls"][1]
        assert "differs from that of rank 0" in found["other models"][1]


def test_a_node_goes_on_after_its_server_was_silent(tmp_path):
    model = make_model(batch_norm=False)
    with LocalServer(down_mode="exact", lease_seconds=60) as server:
        pid = str(server.processes[0].pid)
        leader, follower = launch("outlasts_a_standstill", 2, tmp_path, server.server, pid)
        assert leader["error"] == follower["error"]
        assert leader["error"][0] == "ServerUnreachableError"
        assert leader["losses"] == follower["losses"] == ["loss 0", "loss 1"]
        assert leader["error"][2]["address"] == server.addresses[0]
        assert (leader["version"], leader["samples"]) == (follower["version"], follower["samples"]) == (3, 3 * 256)
        assert status(server).samples == 3 * 256
        assert_equal(leader["parameters"], follower["parameters"], of_server(server, model))


def test_two_nodes_share_one_server(tmp_path):
    with LocalServer(down_mode="exact") as server:
        found = launch("two_nodes", 4, tmp_path, server.server)
        assert status(server).version == 8
        assert status(server).samples == 2 * 4 * 256
        assert_equal(*(rank["joined"] for rank in found))
        assert_equal(*(rank["parameters"] for rank in found), of_server(server, make_model(batch_norm=False)))
    assert [rank["worker"] for rank in found] == ["rank-0", "rank-0", "rank-2", "rank-2"]
    assert [rank["still training"] for rank in found] == [None, None, ("rank-0",), ("rank-0",)]
    assert [(rank["version"], rank["live"], rank["samples"]) for rank in found] == [(8, 2, 1024)] * 4


@pytest.mark.long
def test_gradients_that_ddp_has_averaged_are_refused_without_a_node(tmp_path):
    """Each rank would push the same mean. Who wraps nothing, or in a group of one, is a worker by itself."""
    with LocalServer() as a, LocalServer() as b, LocalServer() as c, LocalServer() as d:
        ranks = launch("averages_without_a_node", 2, tmp_path, a.server, b.server, c.server, d.server)
        assert [status(server).version for server in (a, b, c, d)] == [0, 0, 0, 4]
    for found in ranks:
        for name in ("no DDP", "DDP alone"):
            assert found.pop(name)["error"][0] == "NoneType"
        for name, outcome in found.items():
            kind, message, _ = outcome["error"]
            assert kind == "ConfigurationError", name
            assert "NodeOptimizer" in message
            assert "docs/guide/nodes.md" in message


SURVIVORS = {
    "follower_dies": 0,
    "follower_stands_still": 0,
    "leader_dies_in_a_step": 1,
    "leader_is_told_to_end_in_a_step": 1,
}


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """All of these at once: nodes of one server."""
    with LocalServer() as server:
        return launch_all([*SURVIVORS], 2, tmp_path_factory.mktemp("left"), server.server)


@pytest.mark.parametrize("scenario", SURVIVORS)
def test_who_is_left_behind_gets_an_error_in_time(left_behind, scenario):
    survivor = SURVIVORS[scenario]
    found = left_behind[scenario]
    assert found[1 - survivor] is None
    kind, message, _ = found[survivor]["error"]
    assert kind == found[survivor]["again"][0] == "NodeBrokenError"
    assert "starts the whole node again" in message
    assert found[survivor]["seconds"] < 20  # the limit is 8 s; the rest is what a loaded machine may take


def test_the_script_of_the_documentation_trains_under_torchrun(tmp_path):
    page = (ROOT / "docs" / "guide" / "nodes.md").read_text()
    (tmp_path / "train.py").write_text(page.split("```python\n")[1].split("```")[0])
    with LocalServer() as server:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
        environment = dict(os.environ) | {"PSCLIENT_SERVER": server.server, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(launcher, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        loss, version, samples = re.findall(r": loss ([\d.]+), version (\d+), (\d+) samples", done.stdout)[0]
        assert (int(version), int(samples)) == (30, 30 * 2 * 64)
        assert float(loss) < 1.2
        assert status(server).version == 30
