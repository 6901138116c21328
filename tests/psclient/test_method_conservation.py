"""Conservation: what was accumulated = what was applied + what is still held, through refusals and quantisation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_makers import EPS, METHODS, dense, group, tools

SIZE = 40
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
some = settings(deadline=None, max_examples=60)


def close(left, right, magnitude, steps):
    """Equal but for fp32 rounding of what passed through."""
    assert bool(((left - right).abs() <= 8 * EPS * steps * (magnitude + 1e-6)).all()), (left - right).abs().max()


class Ledger:
    """Runs a method for some steps, gives random parts of its pushes back, and keeps the books in float64."""

    def __init__(self, name, momentum, density, dtype, generator):
        self.method, self.name, self.m = METHODS[name], name, momentum
        self.tools, self.dtype, self.generator = tools(density, dtype), dtype, generator
        self.state = {}
        self.accumulated, self.applied, self.magnitude = (torch.zeros(SIZE, dtype=torch.float64) for _ in range(3))
        self.steps = 0

    def held(self):
        memory = self.state.get("carry" if self.name == "asgd" else "residual")
        return torch.zeros(SIZE).double() if memory is None else memory.double()

    def random(self):
        return torch.randn(SIZE, generator=self.generator)

    def step(self, lr, refused):
        """One push of which the share ``refused`` comes back, entry by entry."""
        g, before = self.random() * 10 ** float(self.random()[0].clamp(-2, 2)), dict(self.state)
        u = self.m * before["momentum"].double() + g if "momentum" in before else g.double()
        self.account(self.method.compress(self.state, g, group(lr, self.m), self.tools), lr, refused)
        gained = {"asgd": lr * u, "gradient_dropping": lr * g, "dgc": u, "dgs": lr * g}[self.name]
        self.accumulated += gained
        self.magnitude += gained.abs() + self.held().abs()

    def flush(self, lr, refused):
        self.account(self.method.flush_state(self.state, group(lr, self.m), self.tools), lr, refused)

    def account(self, sent, lr, refused):
        assert torch.equal(sent.values.to(self.dtype).float(), sent.values), "what is sent is what travels"
        payload = dense(sent, SIZE)
        back = torch.where(torch.rand(SIZE, generator=self.generator) < refused, payload, 0)
        if back.any():
            self.method.give_back(self.state, back.clone(), group(lr, self.m))
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
@given(histories, st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.02, 0.3, 1.0]), st.integers(0, 2**16))
@some
def test_nothing_is_lost_or_invented(name, dtype, history, momentum, density, seed):
    ledger = Ledger(name, momentum, density, dtype, torch.Generator().manual_seed(seed))
    for lr, refused in history:
        ledger.step(lr, refused)
        ledger.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
@given(histories, st.sampled_from([0.0, 0.5]), st.integers(0, 2**16))
@some
def test_a_flush_sends_what_is_held_and_loses_nothing(name, dtype, history, momentum, seed):
    ledger = Ledger(name, momentum, 0.1, dtype, torch.Generator().manual_seed(seed))
    for lr, refused in history:
        ledger.step(lr, refused)
    before = ledger.held()
    ledger.flush(0.1, refused=0.0)
    ledger.check()
    left = momentum if name == "dgs" else 0.0  # DGS keeps m times what it sends, as after any step
    grain = {torch.float32: EPS, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    assert bool(((ledger.held() - left * before).abs() <= grain * before.abs() + 1e-6).all())


@pytest.mark.parametrize("name", METHODS)
def test_flushing_nothing_sends_nothing(name):
    state = {}
    sent = METHODS[name].flush_state(state, group(), tools(1.0))
    assert sent.values.numel() == sent.offsets.numel() == 0


@pytest.mark.parametrize("name", METHODS)
def test_a_refusal_before_any_step_is_kept_too(name):
    state, payload = {}, torch.arange(5.0)
    METHODS[name].give_back(state, payload.clone(), group(lr=0.5))
    sent = METHODS[name].flush_state(state, group(lr=0.5), tools(1.0))
    torch.testing.assert_close(dense(sent, 5), payload)


@pytest.mark.parametrize("name", ["gradient_dropping", "dgc"])
def test_a_push_refused_whole_leaves_the_residual_as_if_it_had_not_been_sent(name):
    """For DGS this holds in what is applied, not in r: see its conservation."""
    sending, waiting = {}, {}
    nothing = tools(1.0)._replace(choose=lambda x: torch.empty(0, dtype=torch.int64))
    for seed in range(10):
        g = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
        sent = METHODS[name].compress(sending, g, group(0.25), tools(0.2))
        METHODS[name].give_back(sending, dense(sent, SIZE), group(0.25))
        METHODS[name].compress(waiting, g, group(0.25), nothing)
    torch.testing.assert_close(sending["residual"], waiting["residual"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_what_quantisation_takes_from_one_push_comes_with_a_later_one(name, dtype):
    """A constant small gradient arrives in full though no single value of it can."""
    state, arrived, value = {}, 0.0, 1.001
    for _ in range(100):
        sent = METHODS[name].compress(state, torch.tensor([value]), group(1.0), tools(1.0, dtype))
        arrived += sent.values.double().sum().item()
    assert arrived == pytest.approx(100 * value, abs=0.02)
