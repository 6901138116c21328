"""``lookahead()``: gradients where the model will be once this worker's residuals arrive."""

import signal

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError
from tests.system.tools import QUICK

METHODS = {
    "dgs": (psclient.DGS, {"lr": 0.1, "momentum": 0.5}, 1.0),
    "dgc": (psclient.DGC, {"lr": 0.1, "momentum": 0.5}, 0.1),
    "gradient_dropping": (psclient.GradientDropping, {"lr": 0.1}, 1.0),
}
SETTINGS = QUICK.model_copy(update={"dense_below": 8})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_the_parameters_less_what_the_residuals_would_send(method, dtype):
    kind, given, unit = METHODS[method]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)).to(dtype)
    twin = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)).to(dtype)
    batch = torch.randn(8, 12, dtype=dtype)
    with kind(model.parameters(), model=model, density=0.05, settings=SETTINGS, **given) as optimizer:
        for step in range(4):
            optimizer.zero_grad()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.no_grad():
                for own, parameter in zip(twin.parameters(), model.parameters(), strict=True):
                    residual = optimizer.state.get(parameter, {}).get("residual", torch.zeros(parameter.numel()))
                    own.copy_(parameter).sub_(residual.reshape(own.shape), alpha=unit)
            twin.zero_grad()
            twin(batch).square().sum().backward()
            with optimizer.lookahead():
                model(batch).square().sum().backward()
            for own, parameter, old in zip(twin.parameters(), model.parameters(), before, strict=True):
                assert torch.equal(parameter.grad, own.grad)
                assert torch.equal(parameter, old)
                assert step == 0 or own.numel() < 8 or not torch.equal(own, parameter)
            optimizer.step()
        optimizer.pull()
        state = psclient.download(optimizer.server)
        assert all(torch.equal(value, state[name].to(dtype)) for name, value in model.state_dict().items())


def test_an_error_in_the_body_leaves_the_parameters_as_they_were():
    model = torch.nn.Linear(30, 30)
    with psclient.GradientDropping(
        model.parameters(), lr=0.1, density=0.01, model=model, settings=SETTINGS
    ) as optimizer:
        model(torch.ones(1, 30)).sum().backward()
        optimizer.step()
        before = [parameter.detach().clone() for parameter in model.parameters()]

        def fail():
            assert not torch.equal(model.weight, before[0])
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), optimizer.lookahead():
            fail()
        assert all(map(torch.equal, model.parameters(), before))
        optimizer.step()


@pytest.mark.parametrize("call", ["step", "pull", "flush", "lookahead"])
def test_calls_that_change_the_parameters_come_after_the_body(call):
    model = torch.nn.Linear(30, 30)
    with psclient.DGS(model.parameters(), lr=0.1, model=model, settings=SETTINGS) as optimizer:
        with optimizer.lookahead():
            model(torch.ones(1, 30)).sum().backward()
            with pytest.raises(ConfigurationError, match="leave its body before"):
                getattr(optimizer, call)().__enter__() if call == "lookahead" else getattr(optimizer, call)()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (psclient.DGS, {"overlap": True}),
        (psclient.GradientDropping, {"rounds": psclient.Rounds()}),
        (psclient.ServerRMSprop, {}),
        (psclient.ASGD, {}),
    ],
)
def test_where_it_means_nothing_it_is_refused(kind, options):
    model = torch.nn.Linear(4, 4)
    with (
        kind(model.parameters(), lr=0.1, model=model, settings=SETTINGS, **options) as optimizer,
        pytest.raises(ConfigurationError, match=r"lookahead\(\) is for DGS, DGC and GradientDropping"),
    ):
        optimizer.lookahead()


def test_an_interrupt_while_the_parameters_are_put_back_leaves_none_behind(monkeypatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(6)))
    with psclient.GradientDropping(
        model.parameters(), lr=0.1, density=0.01, model=model, settings=SETTINGS
    ) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 30)).sum().backward()
            optimizer.step()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        copy, done = torch.Tensor.copy_, []

        def interrupted(self, *given):
            done.append(self)
            if len(done) == 3:
                signal.raise_signal(signal.SIGINT)
            return copy(self, *given)

        def interrupt():
            with optimizer.lookahead():
                monkeypatch.setattr(torch.Tensor, "copy_", interrupted)

        with pytest.raises(KeyboardInterrupt):
            interrupt()
        optimizer.pull()
        assert len(done) >= 12
        assert all(map(torch.equal, model.parameters(), before))
        state = psclient.download(optimizer.server)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_worker_that_is_terminated_in_the_body_pushes_its_residual():
    model = torch.nn.Linear(30, 30, bias=False)
    old = model.weight.detach().clone()
    with psclient.LocalServer() as server:
        optimizer = psclient.GradientDropping(
            model.parameters(), lr=0.1, density=0.01, model=model, server=server, settings=SETTINGS
        )
        model(torch.ones(1, 30)).sum().backward()
        optimizer.step()

        def terminated():
            with optimizer.lookahead():
                signal.raise_signal(signal.SIGTERM)

        with pytest.raises(SystemExit):
            terminated()
        assert (psclient.download(server.server)["weight"] != old).all()
