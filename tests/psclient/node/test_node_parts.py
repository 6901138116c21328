"""The parts of a node that need no other process: which ranks it has, what its leader tells, what is refused."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import psclient
from psclient import errors
from psclient.errors import ConfigurationError, NodeBrokenError, SparsepsError
from psclient.node.comm import NodeComm, NodeStatus, RemoteError
from psclient.node.group import leader_settings, node_ranks, unwrap_ddp
from psclient.report import StepReport, Totals
from psclient.settings import load
from pscore.wire.errors import ErrorCode, Rejected

ERRORS = [
    errors.ModelChangedError("0.weight", "is gone", "put it back"),
    errors.ServerUnreachableError("host:1", 3.5, "no route", "Try again"),
    errors.HeldBackError("host:1", 3.5, "slow", "Try again"),
    errors.FingerprintMismatchError("differs", "0.weight"),
    errors.NonFiniteGradientError("0.weight"),
    errors.RefusedError(Rejected(ErrorCode.BAD_CHUNK, "too long")),
    errors.RunFinishedError("over"),
    NodeBrokenError("rank 1 is gone"),
]


@pytest.fixture
def alone(tmp_path):
    """A default group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def through(status: NodeStatus) -> NodeStatus:
    return NodeStatus.decode(status.encode())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_what_it_was(error):
    again = through(NodeStatus(error=RemoteError.of(error))).error.rebuild()
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_every_error_can_be_made_again_from_its_text():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SparsepsError)]
    assert len(kinds) > 10
    for kind in kinds:
        again = RemoteError(kind.__name__, "what happened", {}).rebuild()
        assert (type(again), str(again)) == (kind, "what happened")


@pytest.mark.parametrize("kind", ["TypeError", "Rejected", "Any", "no such"])
def test_an_error_of_another_library_says_that_the_leader_failed(kind):
    again = RemoteError(kind, "what happened", {}).rebuild()
    assert type(again) is NodeBrokenError
    assert f"{kind}: what happened" in str(again)


def test_a_status_arrives_whole():
    report = StepReport(7, version=9, reply_mode="topk", changed_density=0.25)
    report.seconds["wait"] = 1.5
    status = NodeStatus(
        9,
        True,
        True,
        3,
        "node",
        "run",
        "host:1",
        report,
        Totals(samples=5),
        {"lr": 0.1, "nesterov": False},
        [0, 2, 5000],
    )
    assert through(status) == status


@pytest.mark.parametrize(
    ("rank", "local_rank", "local_size", "ranks"),
    [(0, 0, 4, range(4)), (3, 3, 4, range(4)), (4, 0, 2, range(4, 6)), (5, 1, 2, range(4, 6))],
)
def test_the_ranks_of_a_node_are_neighbours(rank, local_rank, local_size, ranks):
    """A node of four and a node of two."""
    environment = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)}
    assert node_ranks(rank, 6, environment) == ranks


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, "not set"),
        ({"LOCAL_RANK": "0"}, "not set"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "do not fit"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "do not fit"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, "do not fit"),
    ],
)
def test_ranks_that_nobody_tells_or_that_do_not_fit_are_refused(environment, problem):
    with pytest.raises(ConfigurationError, match=problem):
        node_ranks(0, 2, environment)


def test_a_node_needs_torch_distributed():
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="init_process_group"):
        psclient.NodeOptimizer(psclient.ASGD, model.parameters(), lr=0.1, model=model, server="host:1")
    with pytest.raises(ConfigurationError, match="init_process_group"):
        psclient.node_group()


def test_the_group_and_the_module_are_those_of_ddp(alone):
    model = nn.Linear(2, 2)
    own = dist.new_group([0])
    ddp = nn.parallel.DistributedDataParallel(model, process_group=own)
    assert unwrap_ddp(ddp, None) == unwrap_ddp(ddp, own) == (model, own)
    assert unwrap_ddp(model, None) == (model, dist.group.WORLD)
    with pytest.raises(ConfigurationError, match="not the one"):
        unwrap_ddp(ddp, dist.group.WORLD)


def test_overlap_and_embedded_servers_are_refused(alone):
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="before DDP has averaged"):
        psclient.NodeOptimizer(psclient.ASGD, model.parameters(), lr=0.1, server="host:1", overlap=True)
    with pytest.raises(ConfigurationError, match="psservice serve"):
        psclient.NodeOptimizer(psclient.ASGD, model.parameters(), lr=0.1)


def test_a_node_that_was_launched_alone_is_not_called_rank_0(alone, monkeypatch):
    """Every node's launcher counts from 0 then."""
    settings = load(server="host:1")
    monkeypatch.setenv("RANK", "0")
    assert leader_settings(settings, dist.group.WORLD).worker not in ("", "rank-0")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert leader_settings(settings, dist.group.WORLD).worker == "job-3"
    assert leader_settings(load(server="host:1", worker="mine"), dist.group.WORLD).worker == "mine"


def test_nccl_gets_the_tensors_of_gpus_and_no_others(alone, monkeypatch):
    """NCCL refuses tensors on the host; here ``meta`` tensors stand for those of several GPUs."""
    comm, sent = NodeComm(dist.group.WORLD, 10.0), {"group": [], "messages": []}

    def over(name):
        def broadcast(memory, *_, **options):
            sent[name].append((memory.device.type, memory.numel()))
            return SimpleNamespace(wait=lambda: None)

        return broadcast

    monkeypatch.setattr(dist, "broadcast", over("group"))
    comm._messages = SimpleNamespace(broadcast=over("messages"))
    sizes = [3, 1 << 15, 5, 7, 1 << 15]
    tensors = [torch.ones(size, device=("meta", "cpu")[n % 2]) for n, size in enumerate(sizes)]
    comm.broadcast_tensors(tensors)
    assert sent["group"] == [("meta", 4 << 15), ("meta", 4 * (3 + 5))]
    assert sent["messages"] == [("cpu", 4 << 15), ("cpu", 4 * 7)]


def test_arguments_behind_the_parameters_are_the_method_s(alone, server):
    model = nn.Linear(4, 2)
    made = psclient.NodeOptimizer(
        psclient.ServerOptimizer, model.parameters(), "AdamW", {"lr": 0.5}, model=model, server=server
    )
    with made as optimizer:
        assert optimizer.param_groups[0]["lr"] == 0.5
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        assert optimizer.version == 1


def test_a_model_is_refused_before_the_processes_meet(alone, monkeypatch):
    """Else one that refuses it and leaves breaks another one's connecting, which then does not say why."""
    monkeypatch.setattr("psclient.node.optimizer.NodeComm", lambda *_: pytest.fail("it has met the others"))
    model = nn.Linear(4, 2)
    model.weight._fsdp_flattened = True
    with pytest.raises(ConfigurationError, match="FullyShardedDataParallel"):
        psclient.NodeOptimizer(psclient.DGS, model.parameters(), lr=0.1, model=model, server="127.0.0.1:1")
