"""Selectors: which entries go, and how near their number comes to what was asked for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.selection import DEFAULT_DENSE_BELOW, SELECTORS, entries_for, rule
from pscore.selection.exact import exact
from pscore.selection.host import rule_loops
from pscore.selection.host.segments import HostSegments
from pscore.selection.rule import deviation
from tests.pscore import selection_reference as reference
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(150))

# Few distinct magnitudes, so that ties, zeros and signed zeros are the rule.
tied = st.lists(st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, 1e-30, -3e38]), min_size=1, max_size=60)
spread = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60)

DISTRIBUTIONS = {
    "laplace": lambda rng, n: rng.laplace(size=n),
    "normal": lambda rng, n: rng.normal(size=n),
    "student t3": lambda rng, n: rng.standard_t(3, size=n),
    "mixed scales": lambda rng, n: rng.normal(size=n) * np.exp(2 * rng.normal(size=n)),
    "half zeros": lambda rng, n: rng.laplace(size=n) * (rng.random(n) < 0.5),
}
WITHIN = {"exact": (1.0, 1.0), "ldte": (0.9, 1.1), "warm": (0.9, 1.1)}
"""What k̂/k each selector keeps to."""


def numbers(kind, n, seed=0):
    return DISTRIBUTIONS[kind](np.random.default_rng(seed), n).astype(np.float32)


class OneTensor:
    """A residual of one tensor on the host, from which a selector takes ``k`` entries step by step."""

    def __init__(self, x, k, name="warm", keep=0.0, state=None):
        self.x, self.selector = np.array(x, np.float32), SELECTORS[name]
        self.state = {} if state is None else dict(state)
        self.segments = HostSegments(np.array([self.x.size]))
        self.rows = self.segments.rows
        self.rows["searched"], self.rows["keep"] = k < self.x.size, keep
        self.segments.want(np.array([k]))
        self.momentum = np.zeros_like(self.x)

    def take(self, gradient=None, scale=1.0):
        """Add a gradient, and select: offsets and values."""
        gradient = np.zeros_like(self.x) if gradient is None else gradient
        self.rows["gradient"], self.rows["scale"] = gradient.ctypes.data, scale
        states = {0: self.state} if self.rows["searched"][0] else {}
        found = self.segments.select(1.0, self.x, self.momentum, states, self.selector)
        return np.arange(found.values.size) if found.offsets is None else found.offsets, found.values


def slow_top(x, k):
    """The k largest magnitudes, ties to the lowest index, zeros never; ascending."""
    order = sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))
    return sorted(i for i in order[:k] if x[i] != 0)


def is_partition(before, after, offsets, values):
    """Nothing is lost: what was taken, and what stayed, bit for bit."""
    expected = before.copy()
    expected[offsets] = 0
    return np.array_equal(values, before[offsets]) and np.array_equal(np.abs(after), np.abs(expected))


@given(tied | spread, st.integers(1, 60))
@many
def test_exact_is_the_sorted_top_k(x, k):
    assert exact(np.array(x, np.float32), min(k, len(x))).tolist() == slow_top(x, min(k, len(x)))


@pytest.mark.parametrize("name", SELECTORS)
@given(tied | spread, st.integers(1, 60), st.integers(1, 4))
@many
def test_every_selector_is_sorted_deterministic_conserving_and_skips_zeros(name, x, k, steps):
    x, states = np.array(x, np.float32), ({}, {})
    for _ in range(steps):
        tensor, twin = (OneTensor(x, min(k, x.size), name, state=state) for state in states)
        (offsets, values), (others, _) = tensor.take(), twin.take()
        assert offsets.dtype == np.int64
        assert (np.diff(offsets) > 0).all()
        assert (values != 0).all()
        assert is_partition(x, tensor.x, offsets, values)
        assert np.array_equal(offsets, others)
        states = tensor.state, twin.state


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("size", [1, 50, 20_000])
def test_nothing_is_selected_from_nothing(name, size):
    for k in (1, size):
        for state in ({}, {"threshold": 1.0}):
            assert OneTensor(np.zeros(size), k, name, state=state).take()[0].size == 0


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_the_number_of_entries_is_near_what_was_asked_for(name, kind, density):
    n, state = 200_000, {}
    k, (low, high) = entries_for(n, density), WITHIN[name]
    for step in range(6):
        tensor = OneTensor(numbers(kind, n, step) * (0.9 if step < 3 else 0.09), k, name, state=state)
        assert low * k <= tensor.take()[0].size <= high * k
        state = tensor.state


start = st.sampled_from([{}, {"threshold": 0.0, "drift": 0.0}, {"threshold": 9.0}, {"threshold": 0.4}, {"ranked": 2}])


@given(
    st.sampled_from([1, 7, 300, 5000, 20_000]),
    st.sampled_from(["normal", "ties", "few", "wild"]),
    st.sampled_from([0.01, 0.2, 0.6]),
    start,
    st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=examples(200))
def test_the_rule_is_that_of_the_reference_bit_for_bit(n, kind, density, state, seed):
    """From no threshold and from thresholds far off; with ties, zeros, and a few that dwarf the rest."""
    rng, k = np.random.default_rng(seed), entries_for(n, density)
    tensor = OneTensor(np.zeros(n), k, keep=0.7, state=state)
    plain, own = reference.Tensor(np.zeros(n, np.float32), keep=0.7), dict(state)
    for _ in range(4):
        x = rng.normal(size=n)
        g = {"normal": x, "ties": x.round(), "few": x * (rng.random(n) < 0.02), "wild": x * 10 ** (4 * x).clip(-9, 9)}
        g = g[kind].astype(np.float32)
        offsets, values = tensor.take(g, 0.3)
        plain.x += reference.accumulate(g, None, None, 0.3, 0.0, 0.0)
        expected = reference.warm(plain, k, own)
        np.testing.assert_array_equal(offsets, expected[0])
        np.testing.assert_array_equal(values, expected[1])
        np.testing.assert_array_equal(tensor.x, plain.x)
        if k < n:
            kept = own or {"threshold": math.inf, "drift": 0.0}  # of zeros: as cold as before
            assert tensor.state == pytest.approx({"drift": 0.0} | kept if "threshold" in kept else kept, rel=1e-9)


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_the_warm_threshold_keeps_the_density_over_a_run_and_mostly_in_one_pass(density, momentum):
    """Of the reference, which the product equals, passes can be counted."""
    n, state, counts, more = 100_000, {}, [], 0
    k, tensor = entries_for(n, density), reference.Tensor(np.zeros(n, np.float32), momentum)
    scales = np.exp(np.random.default_rng(1).normal(size=n)).astype(np.float32)
    for step in range(120):
        tensor.x += np.float32(0.1 if step < 60 else 0.01) * (numbers("normal", n, step) * scales)
        tensor.passes = 0
        counts.append(reference.warm(tensor, k, state)[0].size)
        more += tensor.passes - 1
    assert all(0.9 * k <= count <= 1.1 * k for count in counts)
    assert more < 90, "most steps need no pass but the one that accumulates"


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_while_a_memory_fills_the_warm_threshold_hardly_ever_costs_a_second_pass(density, momentum):
    n, state, passes = 100_000, {}, []
    k, generator = int(density * n), torch.Generator().manual_seed(3)
    tensor, u = reference.Tensor(np.zeros(n, np.float32)), np.zeros(n, np.float32)
    for _ in range(60):
        tensor.x += reference.accumulate(torch.randn(n, generator=generator).numpy(), None, u, 1.0, 0.0, momentum)
        tensor.passes = 0
        reference.warm(tensor, k, state)
        passes.append(tensor.passes)
    assert sum(passes[5:]) <= 1.15 * len(passes[5:])


@pytest.mark.parametrize("name", SELECTORS)
def test_ties_are_cut_by_index_and_lose_nothing(name):
    tensor = OneTensor(np.ones(1000), 10, name)
    offsets, values = tensor.take()
    assert is_partition(np.ones(1000, np.float32), tensor.x, offsets, values)
    assert offsets.tolist() == list(range(10))


@given(st.integers(0, 10**7), st.floats(1e-4, 1))
@many
def test_entries_are_the_floor_of_the_share_and_at_least_one(numel, density):
    k = entries_for(numel, density)
    assert k == (min(numel, max(1, math.floor(density * numel))) if numel else 0)


@pytest.mark.parametrize(("n", "k"), [(512, 1), (512, 5), (4096, 40), (16384, 163)])
def test_the_count_of_a_small_input_varies_by_chance_about_what_was_asked_for(n, k):
    """A residual, step by step: no count is further off than a count varies, and the mean is near."""
    rng, tensor = np.random.default_rng(0), OneTensor(np.zeros(n), k)
    counts = [tensor.take(rng.normal(size=n).astype(np.float32), 0.1)[0].size for _ in range(300)]
    off = deviation(k, 1.5)
    assert k - off > 0
    assert all(k - off <= count <= k + off for count in counts)
    assert 0.85 * k <= sum(counts) / len(counts) <= 1.15 * k


def test_small_tensors_are_below_4096_elements():
    assert DEFAULT_DENSE_BELOW == 4096


def test_the_loops_know_the_rules_numbers():
    for name in ("ROOM", "SMALL_SIZE", "RANKED_STEPS"):
        assert getattr(rule_loops, name) == getattr(rule, name)
