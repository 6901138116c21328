"""Models that are unlike most: they are trained, or refused by the name of a tensor before anything is sent."""

import logging

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import psclient
from psclient.errors import ConfigurationError, FingerprintMismatchError, ModelChangedError
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, make_data, make_model, optimizer_of, train_step
from tests.tiers import long_but

NOWHERE = "127.0.0.1:9"


def joined(model, server, worker="w0", method=psclient.DGS, **options):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return method(trained, lr=0.1, model=model, server=server, worker=worker, settings=QUICK, **options)


def with_part(put):
    model = make_model()
    put(model)
    return model


def inference(make):
    with torch.inference_mode():
        return make()


REFUSED = {
    "Embedding(max_norm=)": (
        lambda m: m.append(nn.Embedding(10, 4, max_norm=1.0)),
        r"'4\.weight'.*max_norm=1.*torch\.renorm",
    ),
    "EmbeddingBag(max_norm=)": (
        lambda m: m.append(nn.EmbeddingBag(10, 4, max_norm=1.0)),
        r"'4\.weight'.*max_norm=1.*torch\.renorm",
    ),
    "lazy parameter": (lambda m: m.append(nn.LazyLinear(5)), r"'4\.weight'.*one batch.*before the optimizer"),
    "lazy buffer": (lambda m: m.append(nn.LazyBatchNorm1d(affine=False)), r"'4\.running_mean'.*one batch"),
    "inference-mode parameter": (
        lambda m: m.append(inference(lambda: nn.Linear(4, 4))),
        r"'4\.weight'.*inference_mode.*outside",
    ),
    "inference-mode buffer": (
        lambda m: m.register_buffer("b", inference(lambda: torch.zeros(3))),
        r"'b'.*inference_mode.*outside",
    ),
    "sparse parameter": (
        lambda m: setattr(m, "s", nn.Parameter(torch.eye(4).to_sparse())),
        r"'s'.*sparse_coo.*to_dense\(\)",
    ),
    "sparse buffer, COO": (lambda m: m.register_buffer("adj", torch.eye(4).to_sparse()), r"'adj'.*persistent=False"),
    "sparse buffer, CSR": (
        lambda m: m.register_buffer("adj", torch.eye(4).to_sparse_csr()),
        r"'adj'.*persistent=False",
    ),
    "quantized buffer": (
        lambda m: m.register_buffer("q", torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8)),
        r"'q'.*persistent=False",
    ),
    "complex buffer": (
        lambda m: m.register_buffer("c", torch.zeros(4, dtype=torch.complex64)),
        r"'?c'?.*complex64.*persistent=False",
    ),
    "fp8 buffer": (
        lambda m: m.register_buffer("f", torch.zeros(4).to(torch.float8_e4m3fn)),
        r"'?f'?.*float8_e4m3fn.*persistent=False",
    ),
    "parameter of several tensors": (
        lambda m: setattr(m, "t", nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3)))),
        r"'t'.*TwoTensor",
    ),
    "buffer in overlapping memory": (
        lambda m: m.register_buffer("o", torch.zeros(6).as_strided((3, 3), (1, 1))),
        r"'o'.*clone\(\)",
    ),
}


@pytest.mark.parametrize(("put", "said"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_no_worker_can_train_is_refused_by_name(put, said):
    with pytest.raises(ConfigurationError, match=said):
        joined(with_part(put), NOWHERE)


FROZEN = {
    **{
        str(dtype).removeprefix("torch."): lambda dtype=dtype: torch.ones(4).to(dtype)
        for dtype in (
            *(torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
            *(torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
        )
    },
    "conjugate view": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "scalar": lambda: torch.tensor(1, dtype=torch.uint16),
    "sparse, COO": lambda: torch.eye(4).to_sparse(),
    "sparse, CSR": lambda: torch.eye(4).to_sparse_csr(),
    "of several tensors": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
    "expanded": lambda: torch.ones(1).expand(4),
    "inference mode": lambda: inference(lambda: torch.ones(4)),
}


@pytest.mark.parametrize("make", long_but(list(FROZEN.values())[::3], FROZEN.values()), ids=FROZEN)
def test_a_frozen_tensor_of_any_kind_is_compared_and_trained_around(make):
    def model(tensor):
        return with_part(lambda m: m.register_parameter("f", nn.Parameter(tensor, requires_grad=False)))

    first = model(make())
    with LocalServer() as server, joined(first, server) as optimizer:
        for _ in range(2):
            train_step(first, optimizer, *make_data())
        assert optimizer.version == 2
        joined(model(make()), server, "w1").close()
        other = torch.zeros_like(make()) if not make().is_sparse else (2 * torch.eye(4)).to_sparse()
        with pytest.raises(FingerprintMismatchError) as refused:
            joined(model(other), server, "w2")
        assert refused.value.tensor == "f"


@pytest.mark.parametrize(
    "buffer",
    [
        torch.arange(4.0).expand(3, 4),
        torch.arange(4).expand(1, 4),
        torch.ones(1, 1).expand(3, 4),
        torch.ones(2).expand(0, 2),
    ],
    ids=["floats", "integers", "one number", "empty"],
)
def test_an_expanded_buffer_travels(buffer):
    model = with_part(lambda m: m.register_buffer("pos", buffer))
    with LocalServer(buffer_period_steps=1) as server, joined(model, server) as optimizer:
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        assert torch.equal(psclient.download(server.server)["pos"], buffer)
    assert model.pos.stride() == buffer.stride()


def test_statistics_of_a_batch_that_is_no_number_stop_nobody(caplog):
    """The loop leaves such a batch out, after a BatchNorm has seen it."""
    model = make_model()
    with LocalServer(buffer_period_steps=2) as server, joined(model, server) as optimizer:
        for step in range(12):
            x, y = make_data(step)
            if step == 3:
                with torch.no_grad():
                    model(torch.full_like(x, float("nan")))
                assert model[1].running_mean.isnan().all()
            train_step(model, optimizer, x, y)
        assert optimizer.version == 12
        for state in (psclient.download(server.server), model.state_dict()):
            assert all(tensor.isfinite().all() for tensor in state.values())
    said = [record.getMessage() for record in caplog.records if "1.running_mean" in record.getMessage()]
    assert len(said) == 1


def test_a_buffer_that_is_no_number_from_the_beginning_stops_nobody():
    model = with_part(lambda m: m.register_buffer("unset", torch.tensor([float("nan"), 1.0])))
    with LocalServer(buffer_period_steps=1) as server, joined(model, server) as optimizer:
        before = model[1].running_mean.clone()
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        state = psclient.download(server.server)
        assert torch.equal(state["1.running_mean"], model[1].running_mean)
        assert not torch.equal(before, model[1].running_mean)
        assert state["unset"].isnan().tolist() == [True, False]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_first_model_that_is_not_finite_is_named(value, shards):
    model = with_part(lambda m: m[3].weight.data[1].fill_(value))
    with LocalServer(shards=shards) as server:
        with pytest.raises(ConfigurationError, match=r"'3\.weight'.*not finite"):
            joined(model, server)
        joined(make_model(), server, "w1").close()
        joined(model, server, "w2").close()  # whose values are the server's by now


METHODS = {
    "DGS": lambda model, server: joined(model, server),
    "overlap": lambda model, server: joined(model, server, overlap=True),
    "Outer": lambda model, server: optimizer_of("outer", model, server=server),
    "bare": lambda model, server: psclient.DGS(model.parameters(), lr=0.1, server=server, settings=QUICK),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_step_after_everything_was_frozen_is_an_error(method):
    """As by an adapter that is put around the model after its optimizer was made."""
    model, adapter = make_model(batch_norm=False), nn.Linear(4, 4)
    with LocalServer() as server, method(model, server) as optimizer:
        train_step(model, optimizer, *make_data())
        model.requires_grad_(False)
        optimizer.zero_grad()
        adapter(model(make_data()[0])).sum().backward()
        for _ in range(2):
            with pytest.raises(ModelChangedError, match=r"no gradient any more.*get_peft_model"):
                optimizer.step()
        model.requires_grad_(True)
        train_step(model, optimizer, *make_data())


def test_parts_may_be_frozen_in_turns():
    parts = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    with LocalServer() as server, joined(parts, server, method=psclient.ASGD) as optimizer:
        for step in range(4):
            parts["g"].requires_grad_(step % 2 == 0)
            parts["d"].requires_grad_(step % 2 == 1)
            optimizer.zero_grad()
            parts["d"](parts["g"](torch.ones(2, 4))).sum().backward()
            optimizer.step()
        parts["d"](parts["g"](torch.ones(2, 4))).sum().backward()
        parts.requires_grad_(False)  # the gradients are there
        optimizer.step()
        assert optimizer.version == 5


def test_a_step_without_gradients_of_a_model_that_can_be_trained_is_none(caplog):
    model = make_model()
    with LocalServer() as server, joined(model, server) as optimizer:
        caplog.set_level(logging.WARNING)
        optimizer.step()
        assert "no gradient in any" in caplog.text


def test_a_group_that_the_inner_optimizer_gets_later_is_an_error():
    model = make_model(batch_norm=False)
    inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with (
        LocalServer() as server,
        psclient.Outer(inner, None, sync_every=1, model=model, server=server, settings=QUICK) as optimizer,
    ):
        train_step(model, optimizer, *make_data())
        before = model[0].weight.detach().clone()
        inner.add_param_group({"params": model[0].parameters()})
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=r"'0\.weight'.*inner optimizer.*new"):
                train_step(model, optimizer, *make_data())
        assert torch.equal(model[0].weight, before)
        inner.param_groups.pop()
        inner.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(4, 32))
        with pytest.raises(ConfigurationError, match="inner optimizer"):
            train_step(model, optimizer, *make_data())


def outer_at(model, rate, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return psclient.Outer(inner, ("SGD", {"lr": rate}), sync_every=1, model=model, **options)


def scheduled_at(model, rate, **options):
    scheduler = ("ExponentialLR", {"gamma": rate})
    return psclient.ServerOptimizer(model.parameters(), "SGD", {"lr": 0.1}, scheduler=scheduler, model=model, **options)


def adam_at(model, rate, **options):
    return psclient.ServerOptimizer(model.parameters(), "AdamW", {"lr": rate}, model=model, **options)


def rmsprop_at(model, rate, **options):
    return psclient.ServerRMSprop(model.parameters(), lr=rate, model=model, **options)


def group_at(model, rate, **options):
    group = {"params": model.parameters(), "lr": rate}
    return psclient.ServerOptimizer([group], "SGD", {"lr": 0.3}, model=model, **options)


def rmsprop_group_at(model, rate, **options):
    return psclient.ServerRMSprop([{"params": model.parameters(), "lr": rate}], model=model, **options)


RATES = [rmsprop_at, adam_at, group_at, rmsprop_group_at, outer_at, scheduled_at]


@pytest.mark.parametrize("rate", [torch.tensor(0.25), torch.tensor([0.25])], ids=["0-d", "1-d"])
@pytest.mark.parametrize("method", long_but(list(RATES)[::3], RATES))
def test_a_tensor_is_a_rate_of_the_servers_optimizer(method, rate):
    with LocalServer() as server:
        for worker, given in (("tensor", rate), ("number", 0.25)):  # of the same settings
            model = make_model(batch_norm=False)
            with method(model, given, server=server, worker=worker, settings=QUICK) as optimizer:
                train_step(model, optimizer, *make_data())
