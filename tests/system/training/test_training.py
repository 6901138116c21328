"""Every method trains through real server processes."""

from functools import partial

import pytest
import torch

import psclient
from psclient import ASGD, DGC, DGS, GradientDropping
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, assert_same_parameters, fleet, make_data, make_model
from tests.tiers import long_but

METHODS = {
    "asgd": partial(ASGD, lr=0.1),
    "asgd_momentum": partial(ASGD, lr=0.05, momentum=0.5),
    "gradient_dropping": partial(GradientDropping, lr=0.1, density=0.1),
    "dgc": partial(DGC, lr=0.05, momentum=0.5, density=0.1, clip_norm=5.0),
    "dgs": partial(DGS, lr=0.05, momentum=0.5, density=0.1),
}


@pytest.mark.parametrize(
    ("method", "shards"),
    long_but([("dgs", 2)], [("dgs", 1), *((method, 2) for method in METHODS)]),
)
def test_three_workers_learn(method, shards):
    with LocalServer(shards=shards, buffer_period_steps=5) as server:
        workers = fleet(METHODS[method], server, 3)
        data = [make_data(i, 96) for i in range(3)]
        losses = [sum(worker.train(*batch) for worker, batch in zip(workers, data, strict=True)) for _ in range(61)]
        assert losses[-1] < 0.5 * losses[0]
        assert workers[-1].optimizer.version == 3 * 61
        for worker in workers:
            worker.optimizer.close()
        trained = make_model(7)
        trained.load_state_dict(psclient.download(server.server))
        x, y = make_data(5, 400)
        trained.eval()
        assert (trained(x).argmax(1) == y).float().mean() > 0.7


def test_all_workers_start_from_the_first_workers_model():
    with LocalServer() as server:
        for worker in fleet(METHODS["dgs"], server):
            assert_same_parameters(worker.model, server.server)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_replica_equals_server_bit_for_bit(dtype):
    with LocalServer(down_mode="exact", shards=2) as server:
        workers = fleet(partial(DGS, lr=0.1, density=0.05), server, batch_norm=False, dtype=dtype)
        x, y = make_data(dtype=dtype)
        for worker in 6 * workers:
            worker.train(x, y)
            assert worker.optimizer.report.reply_mode == "exact"
            assert_same_parameters(worker.model, server.server)


def test_a_model_is_uploaded_in_the_dtypes_of_its_parameters():
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    with LocalServer(shards=2) as server:
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(150_000, dtype=dtype)) for dtype in dtypes)
        with psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, worker="a", settings=QUICK) as one:
            assert_same_parameters(model, server.server)
            nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
            assert nbytes < one.totals.upload_bytes < 1.01 * nbytes


def test_two_shards_give_the_same_parameters_as_one():
    states = []
    for shards in (1, 2):
        with LocalServer(down_mode="exact", shards=shards) as server:
            workers = fleet(partial(DGS, lr=0.1, density=0.07), server)
            for step in range(20):
                which = step % 3 % 2  # a fixed, uneven order of pushes
                workers[which].train(*make_data(which))
            states.append(psclient.download(server.server))
    one, two = states
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


@pytest.mark.long
@pytest.mark.parametrize("dtype", long_but([torch.float32], [torch.float32, torch.bfloat16]))
def test_topk_replies_train_too(dtype):
    with LocalServer(down_mode="topk", down_density=0.1, down_dense_below=0) as server:
        workers = fleet(METHODS["dgs"], server, batch_norm=False, dtype=dtype)
        x, y = make_data(dtype=dtype)
        losses = [worker.train(x, y) for worker in 60 * workers]
        assert losses[-1] < 0.6 * losses[0]
        report = workers[0].optimizer.report
        assert report.reply_mode == "topk"
        # Density of the reply: 10 % of each tensor, rounded down, at least one entry each.
        assert report.pull_entries <= 0.13 * 804 + 4, "the counts of small tensors vary by chance"


def test_a_pull_brings_the_servers_very_model_after_topk_replies_too():
    with LocalServer(down_mode="topk", down_density=0.05, down_dense_below=0) as server:
        [worker] = fleet(METHODS["asgd"], server, 1, batch_norm=False)
        for _ in range(3):
            worker.train(*make_data())
        worker.optimizer.pull()
        served = psclient.download(server.server)
        state = worker.model.state_dict()
        assert [name for name, value in state.items() if not torch.equal(value, served[name])] == []


def test_auto_switches_to_topk_when_the_union_is_dense():
    with LocalServer(exact_limit=0.2, down_density=0.05, down_dense_below=0) as server:
        workers, modes = fleet(partial(DGS, lr=0.05, density=0.1), server, 4, batch_norm=False), set()
        for step, worker in enumerate(6 * workers):
            worker.train(*make_data(step))
            modes.add(worker.optimizer.report.reply_mode)
        assert modes == {"exact", "topk"}


@pytest.mark.parametrize("value_type", ["fp16", "bf16"])
def test_narrow_values_halve_the_value_bytes_and_train(value_type):
    settings = QUICK.model_copy(update={"value_type": value_type})
    with LocalServer() as server:
        [worker] = fleet(METHODS["dgs"], server, 1, batch_norm=False, settings=settings)
        losses = [worker.train(*make_data()) for _ in range(80)]
        assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("policy", ["average", "local", "none"])
def test_buffers_are_averaged_and_shared_or_stay_with_the_worker(policy):
    with LocalServer(buffer_period_steps=1, **({} if policy == "average" else {"buffers": policy})) as server:
        one, other = workers = fleet(partial(DGS, lr=0.01), server)
        x, y = make_data()
        for _ in range(10):
            for shift, worker in enumerate(workers):
                worker.train(x + 3 * shift, y)
        state = psclient.download(server.server)
        if policy == "average":
            assert torch.equal(other.model[1].running_mean, state["1.running_mean"])
            assert not torch.allclose(state["1.running_mean"], torch.zeros(32))
            assert state["1.num_batches_tracked"] >= 10
        else:
            assert not torch.allclose(one.model[1].running_mean, other.model[1].running_mean)
            assert ("1.running_mean" in state) == (policy == "local")


@pytest.mark.long
def test_a_model_larger_than_a_message_arrives_whole():
    with LocalServer(shards=2, chunk_bytes=64 * 1024) as server:
        model = torch.nn.Linear(1500, 1000)  # 6 MB; messages are 64 KiB
        with psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, settings=QUICK) as optimizer:
            model(torch.randn(8, 1500)).square().sum().backward()
            optimizer.step()
            assert_same_parameters(model, server.server)
