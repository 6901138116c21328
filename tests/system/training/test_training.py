"""Every method trains through real server processes."""

import pytest
import torch

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, train_step

METHODS = {
    "asgd": lambda m, **c: psclient.ASGD(m.parameters(), lr=0.1, model=m, **c),
    "asgd_momentum": lambda m, **c: psclient.ASGD(m.parameters(), lr=0.05, momentum=0.5, model=m, **c),
    "gradient_dropping": lambda m, **c: psclient.GradientDropping(m.parameters(), lr=0.1, density=0.1, model=m, **c),
    "dgc": lambda m, **c: psclient.DGC(m.parameters(), lr=0.05, momentum=0.5, density=0.1, clip_norm=5.0, model=m, **c),
    "dgs": lambda m, **c: psclient.DGS(m.parameters(), lr=0.05, momentum=0.5, density=0.1, model=m, **c),
}


@pytest.mark.parametrize(("method", "shards"), [("dgs", 1), *((method, 2) for method in METHODS)])
def test_three_workers_learn(method, shards):
    with LocalServer(shards=shards, buffer_period_steps=5) as server:
        models = [make_model(seed) for seed in range(3)]
        optimizers = [METHODS[method](m, server=server, worker=f"w{i}", settings=QUICK) for i, m in enumerate(models)]
        data = [make_data(i, 96) for i in range(3)]
        first = [train_step(m, o, *d) for m, o, d in zip(models, optimizers, data, strict=True)]
        for _ in range(60):
            last = [train_step(m, o, *d) for m, o, d in zip(models, optimizers, data, strict=True)]
        assert sum(last) < 0.5 * sum(first)
        assert optimizers[-1].version == 3 * 61
        for optimizer in optimizers:
            optimizer.close()
        trained = make_model(7)
        trained.load_state_dict(psclient.download(server.server))
        x, y = make_data(5, 400)
        trained.eval()
        assert (trained(x).argmax(1) == y).float().mean() > 0.7


def test_all_workers_start_from_the_first_workers_model():
    with LocalServer() as server:
        first, second = make_model(1), make_model(2)
        a = psclient.DGS(first.parameters(), lr=0.1, model=first, server=server, worker="a", settings=QUICK)
        b = psclient.DGS(second.parameters(), lr=0.1, model=second, server=server, worker="b", settings=QUICK)
        for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        a.close()
        b.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_replica_equals_server_bit_for_bit(dtype):
    with LocalServer(down_mode="exact", shards=2) as server:
        models = [make_model(i, batch_norm=False).to(dtype) for i in range(2)]
        optimizers = [
            psclient.DGS(m.parameters(), lr=0.1, density=0.05, model=m, server=server, worker=f"w{i}", settings=QUICK)
            for i, m in enumerate(models)
        ]
        x, y = make_data()
        for step in range(12):
            model, optimizer = models[step % 2], optimizers[step % 2]
            train_step(model, optimizer, x.to(dtype), y)
            assert optimizer.report.reply_mode == "exact"
            assert_same_parameters(model, server.server)


def test_a_model_is_uploaded_in_the_dtypes_of_its_parameters():
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    with LocalServer(shards=2) as server:
        model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(150_000, dtype=dtype)) for dtype in dtypes)
        with psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, worker="a", settings=QUICK) as one:
            assert_same_parameters(model, server.server)
            nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
            assert nbytes < one.totals.upload_bytes < 1.01 * nbytes


def test_two_shards_give_the_same_parameters_as_one():
    def run(shards: int) -> dict[str, torch.Tensor]:
        with LocalServer(down_mode="exact", shards=shards) as server:
            models = [make_model(i) for i in range(2)]
            optimizers = [
                psclient.DGS(
                    m.parameters(), lr=0.1, density=0.07, model=m, server=server, worker=f"w{i}", settings=QUICK
                )
                for i, m in enumerate(models)
            ]
            data = [make_data(i) for i in range(2)]
            for step in range(20):
                which = step % 3 % 2  # a fixed, uneven order of pushes
                train_step(models[which], optimizers[which], *data[which])
            return psclient.download(server.server)

    one, two = run(1), run(2)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_replies_train_too(dtype):
    with LocalServer(down_mode="topk", down_density=0.1, down_dense_below=0) as server:
        models = [make_model(i, batch_norm=False).to(dtype) for i in range(2)]
        optimizers = [
            psclient.DGS(m.parameters(), lr=0.05, momentum=0.5, density=0.1, model=m, server=server, worker=f"w{i}",
                         settings=QUICK)
            for i, m in enumerate(models)
        ]  # fmt: skip
        x, y = make_data()
        losses = [train_step(models[s % 2], optimizers[s % 2], x.to(dtype), y) for s in range(120)]
        assert losses[-1] < 0.6 * losses[0]
        assert optimizers[0].report.reply_mode == "topk"
        # Density of the reply: 10 % of each tensor, rounded down, at least one entry each.
        assert optimizers[0].report.pull_entries <= 0.13 * 804 + 4, "the counts of small tensors vary by chance"


def test_a_pull_brings_the_servers_very_model_after_topk_replies_too():
    with LocalServer(down_mode="topk", down_density=0.05, down_dense_below=0) as server:
        model, (x, y) = make_model(batch_norm=False), make_data()
        with psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, settings=QUICK) as optimizer:
            for _ in range(3):
                train_step(model, optimizer, x, y)
            optimizer.pull()
            served = psclient.download(server.server)
            assert [name for name, value in model.state_dict().items() if not torch.equal(value, served[name])] == []


def test_auto_switches_to_topk_when_the_union_is_dense():
    with LocalServer(exact_limit=0.2, down_density=0.05, down_dense_below=0) as server:
        models = [make_model(i, batch_norm=False) for i in range(4)]
        optimizers = [
            psclient.DGS(m.parameters(), lr=0.05, density=0.1, model=m, server=server, worker=f"w{i}", settings=QUICK)
            for i, m in enumerate(models)
        ]
        modes = set()
        for step in range(24):
            train_step(models[step % 4], optimizers[step % 4], *make_data(step))
            modes.add(optimizers[step % 4].report.reply_mode)
        assert modes == {"exact", "topk"}


def test_one_dense_worker_follows_sgd():
    """ASGD with one worker is SGD without momentum, through the wire and back, within rounding."""
    plain = make_model(3, batch_norm=False)
    remote = make_model(3, batch_norm=False)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=1e-3)
    x, y = make_data()
    with (
        LocalServer() as server,
        psclient.ASGD(remote.parameters(), lr=0.1, weight_decay=1e-3, model=remote, server=server) as asgd,
    ):
        for _ in range(20):
            train_step(plain, sgd, x, y)
            train_step(remote, asgd, x, y)
    for a, b in zip(plain.parameters(), remote.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_density_one_follows_sgd_with_momentum():
    plain = make_model(3, batch_norm=False)
    remote = make_model(3, batch_norm=False)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.7)
    x, y = make_data()
    with (
        LocalServer() as server,
        psclient.DGS(remote.parameters(), lr=0.05, momentum=0.7, density=1.0, model=remote, server=server) as dgs,
    ):
        for _ in range(20):
            train_step(plain, sgd, x, y)
            train_step(remote, dgs, x, y)
    for a, b in zip(plain.parameters(), remote.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value_type", ["fp16", "bf16"])
def test_narrow_values_halve_the_value_bytes_and_train(value_type):
    settings = QUICK.model_copy(update={"value_type": value_type})
    model = make_model(0, batch_norm=False)
    x, y = make_data()
    with (
        LocalServer() as server,
        psclient.DGS(model.parameters(), lr=0.05, momentum=0.5, density=0.1, model=model, server=server,
                     settings=settings) as optimizer,
    ):  # fmt: skip
        losses = [train_step(model, optimizer, x, y) for _ in range(80)]
        assert losses[-1] < 0.6 * losses[0]


def test_buffers_are_averaged_and_shared():
    with LocalServer(buffer_period_steps=1) as server:
        models = [make_model(i) for i in range(2)]
        optimizers = [
            psclient.DGS(m.parameters(), lr=0.01, model=m, server=server, worker=f"w{i}", settings=QUICK)
            for i, m in enumerate(models)
        ]
        x, y = make_data()
        for step in range(20):
            train_step(models[step % 2], optimizers[step % 2], x + step % 2, y)
        state = psclient.download(server.server)
        assert torch.equal(models[1][1].running_mean, state["1.running_mean"])
        assert not torch.allclose(state["1.running_mean"], torch.zeros(32))
        assert state["1.num_batches_tracked"] >= 10


@pytest.mark.parametrize("policy", ["local", "none"])
def test_buffers_may_stay_with_the_worker(policy):
    with LocalServer(buffer_period_steps=1, buffers=policy) as server:
        models = [make_model(i) for i in range(2)]
        optimizers = [
            psclient.DGS(m.parameters(), lr=0.01, model=m, server=server, worker=f"w{i}", settings=QUICK)
            for i, m in enumerate(models)
        ]
        x, y = make_data()
        for step in range(10):
            train_step(models[step % 2], optimizers[step % 2], x + 3 * (step % 2), y)
        assert not torch.allclose(models[0][1].running_mean, models[1][1].running_mean)
        state = psclient.download(server.server)
        assert ("1.running_mean" in state) == (policy == "local")


def test_a_model_larger_than_a_message_arrives_whole():
    with LocalServer(shards=2, chunk_bytes=64 * 1024) as server:
        model = torch.nn.Linear(1500, 1000)  # 6 MB; messages are 64 KiB
        with psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, settings=QUICK) as optimizer:
            model(torch.randn(8, 1500)).square().sum().backward()
            optimizer.step()
            assert_same_parameters(model, server.server)
