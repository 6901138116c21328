"""Conservation: what was accumulated = what was applied + what is still held, through refusals and quantisation."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.wire.codecs.names import VALUE_CODECS
from tests.psclient.method_makers import EPS, METHODS, Tensors, come_back, dense, flush, group, push, whole
from tests.tiers import examples, long_but

SIZE = 40
VALUES = tuple(VALUE_CODECS)
some = settings(deadline=None, max_examples=examples(10))  # of each of 64 cases


def close(left, right, magnitude, steps):
    """Equal but for fp32 rounding of what passed through."""
    assert bool(((left - right).abs() <= 8 * EPS * steps * (magnitude + 1e-6)).all()), (left - right).abs().max()


class Ledger:
    """Runs a method for some steps, gives random parts of its pushes back, and keeps the books in float64."""

    def __init__(self, name, momentum, density, value, generator):
        self.name, self.m = name, momentum
        self.density, self.value, self.generator = density, value, generator
        self.state = Tensors()
        self.accumulated, self.applied, self.magnitude = (torch.zeros(SIZE, dtype=torch.float64) for _ in range(3))
        self.steps = 0

    def held(self):
        memory = self.state.get("residual")
        return torch.zeros(SIZE).double() if memory is None else memory.double()

    def random(self):
        return torch.randn(SIZE, generator=self.generator)

    def step(self, lr, refused):
        """One push of which the share ``refused`` comes back, entry by entry."""
        g, before = self.random() * 10 ** float(self.random()[0].clamp(-2, 2)), dict(self.state)
        u = self.m * before["momentum"].double() + g if "momentum" in before else g.double()
        self.account(push(self.name, self.state, g, group(lr, self.m), self.density, self.value), lr, refused)
        gained = {"asgd": lr * u, "gradient_dropping": lr * g, "dgc": u, "dgs": lr * g}[self.name]
        self.accumulated += gained
        self.magnitude += gained.abs() + self.held().abs()

    def flush(self, lr, refused):
        self.account(flush(self.name, self.state, group(lr, self.m)), lr, refused)

    def account(self, sent, lr, refused):
        payload = dense(sent, SIZE)
        back = torch.where(torch.rand(SIZE, generator=self.generator) < refused, payload, 0)
        if back.any():
            come_back(self.name, self.state, group(lr, self.m), whole(back.clone()), back)
        arrived = (payload - back).double()
        self.applied += arrived / lr if self.name == "dgc" else arrived
        self.magnitude += payload.double().abs() / (lr if self.name == "dgc" else 1)
        self.steps += 1

    def check(self):
        """The formula of METHODS: DGS counts each applied entry (1 − m) times, DGC counts in units of r."""
        share = 1 - self.m if self.name == "dgs" else 1
        close(self.accumulated, share * self.applied + self.held(), self.magnitude, self.steps)


histories = st.lists(
    st.tuples(st.sampled_from([0.01, 0.1, 0.5]), st.sampled_from([0.0, 0.0, 0.3, 1.0])), min_size=1, max_size=15
)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", METHODS)
@given(histories, st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.02, 0.3, 1.0]), st.integers(0, 2**16))
@some
def test_nothing_is_lost_or_invented(name, value, history, momentum, density, seed):
    ledger = Ledger(name, momentum, density, value, torch.Generator().manual_seed(seed))
    for lr, refused in history:
        ledger.step(lr, refused)
        ledger.check()


@pytest.mark.parametrize("value", long_but(VALUES[-1:], VALUES))
@pytest.mark.parametrize("name", METHODS)
@given(histories, st.sampled_from([0.0, 0.5]), st.integers(0, 2**16))
@some
def test_a_flush_sends_what_is_held_and_loses_nothing(name, value, history, momentum, seed):
    ledger = Ledger(name, momentum, 0.1, value, torch.Generator().manual_seed(seed))
    for lr, refused in history:
        ledger.step(lr, refused)
    before = ledger.held()
    ledger.flush(0.1, refused=0.0)
    ledger.check()
    left = momentum if name == "dgs" else 0.0  # DGS keeps m times what it sends, as after any step
    assert bool(((ledger.held() - left * before).abs() <= 4 * EPS * before.abs() + 1e-6).all())


@pytest.mark.parametrize("name", METHODS)
def test_flushing_nothing_sends_nothing(name):
    sent = flush(name, Tensors(), group())
    assert sent.values.numel() == sent.offsets.numel() == 0


@pytest.mark.parametrize("name", METHODS)
def test_a_refusal_before_any_step_is_kept_too(name):
    state, payload = Tensors(), torch.arange(5.0)
    come_back(name, state, group(lr=0.5), whole(payload.clone()), payload)
    torch.testing.assert_close(dense(flush(name, state, group(lr=0.5)), 5), payload)


def choose_nothing(x, k):
    return np.empty(0, np.int64)


@pytest.mark.parametrize("name", ["gradient_dropping", "dgc"])
def test_a_push_refused_whole_leaves_the_residual_as_if_it_had_not_been_sent(name):
    """For DGS this holds in what is applied, not in r: see its conservation."""
    sending, waiting = Tensors(), Tensors()
    for seed in range(10):
        g = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
        sent = push(name, sending, g, group(0.25), 0.2)
        come_back(name, sending, group(0.25), sent, g)
        push(name, waiting, g, group(0.25), 0.2, selector=choose_nothing)
    torch.testing.assert_close(sending["residual"], waiting["residual"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", long_but(VALUES[-1:], VALUES[1:]))
@pytest.mark.parametrize("name", METHODS)
def test_what_quantisation_takes_from_one_push_comes_with_a_later_one(name, value):
    """Constant small gradients arrive in full though no single value of them can."""
    state, arrived, g = Tensors(), torch.zeros(3, dtype=torch.float64), torch.tensor([1.001, -0.3337, 0.77])
    for _ in range(300):
        arrived += push(name, state, g, group(1.0), value=value).values.double()
    torch.testing.assert_close(arrived / 300, g.double(), rtol=0.02, atol=0)
