"""Selectors: which entries go, and how near their number comes to what was asked for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.selection import DEFAULT_DENSE_BELOW, SELECTORS, entries_for
from pscore.selection.base import exact, take_all
from pscore.selection.inputs import Joined, Memory
from pscore.selection.kernels import cpu, reference
from pscore.selection.kernels.base import GradientUpdate
from pscore.selection.warm import deviation

many = settings(deadline=None, max_examples=150)

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
WITHIN = {
    "exact": (1.0, 1.0),
    "trimmed": (1.0, 1.0),
    "ldte": (0.9, 1.1),
    "warm": (0.9, 1.1),
    "sampled": (0.7, 1.41),
    "reuse": (0.9, 2.0),
}
"""What k̂/k each selector keeps to; sampled and reuse promise no more."""


def numbers(kind, n, seed=0):
    return torch.from_numpy(DISTRIBUTIONS[kind](np.random.default_rng(seed), n).astype(np.float32))


def slow_top(x, k):
    """The k largest magnitudes, ties to the lowest index, zeros never; ascending."""
    order = sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))
    return sorted(i for i in order[:k] if x[i] != 0)


def is_partition(before, after, taken):
    """Nothing is lost: what was taken, and what stayed, bit for bit."""
    expected = before.clone()
    expected[taken.offsets] = 0
    return torch.equal(taken.values, before[taken.offsets]) and torch.equal(after.abs(), expected.abs())


@given(tied | spread, st.integers(1, 60))
@many
def test_exact_is_the_sorted_top_k(x, k):
    taken = exact(Memory(torch.tensor(x)), min(k, len(x)), {})
    assert taken.offsets.tolist() == slow_top(x, min(k, len(x)))


@pytest.mark.parametrize("name", SELECTORS)
@given(tied | spread, st.integers(1, 60), st.integers(1, 4))
@many
def test_every_selector_is_sorted_deterministic_conserving_and_skips_zeros(name, x, k, steps):
    x, recall, again = torch.tensor(x), {}, {}
    k = min(k, x.numel())
    for _ in range(steps):
        memory, twin = x.clone(), x.clone()
        taken = SELECTORS[name](Memory(memory), k, recall)
        assert taken.offsets.dtype == torch.int64
        assert bool((taken.offsets.diff() > 0).all())
        assert bool((taken.values != 0).all())
        assert is_partition(x, memory, taken)
        other = SELECTORS[name](Memory(twin), k, again)
        assert torch.equal(other.offsets, taken.offsets)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("size", [1, 50])
def test_nothing_is_selected_from_nothing(name, size):
    for k in (1, size):
        for recall in ({}, {"threshold": 1.0}):
            assert SELECTORS[name](Memory(torch.zeros(size)), k, recall).offsets.numel() == 0


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_the_number_of_entries_is_near_what_was_asked_for(name, kind, density):
    n, recall = 200_000, {}
    k, (low, high) = entries_for(n, density), WITHIN[name]
    for step in range(6):
        x = numbers(kind, n, step) * (0.9 if step < 3 else 0.09)
        found = SELECTORS[name](Memory(x), k, recall).offsets.numel()
        if name == "reuse" and step:
            assert 0 <= found <= high * k  # between two searches the count is what it is
        else:
            assert low * k <= found <= high * k


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_the_warm_threshold_keeps_the_density_over_a_run_and_mostly_in_one_pass(density, momentum, monkeypatch):
    n, recall, counts = 100_000, {}, []
    k, r = entries_for(n, density), torch.zeros(n)
    scales = torch.from_numpy(np.exp(np.random.default_rng(1).normal(size=n)).astype(np.float32))
    searches = []
    original = Memory.count_above
    monkeypatch.setattr(Memory, "count_above", lambda self, t: (searches.append(t), original(self, t))[1])
    for step in range(120):
        lr = 0.1 if step < 60 else 0.01
        g = numbers("normal", n, step) * scales
        counts.append(SELECTORS["warm"](Memory(r, GradientUpdate(g, lr), momentum), k, recall).offsets.numel())
    assert all(0.9 * k <= count <= 1.1 * k for count in counts)
    assert len(searches) < 90, "most steps need no pass but the one that accumulates"


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_while_a_memory_fills_the_warm_threshold_hardly_ever_costs_a_second_pass(density, momentum):
    n, recall, passes = 100_000, {}, []
    k = int(density * n)
    generator = torch.Generator().manual_seed(3)
    r, u = torch.zeros(n), torch.zeros(n) if momentum else None
    for _ in range(60):
        g = torch.randn(n, generator=generator)
        source = Counting(r, GradientUpdate(g, 1.0, momentum=u, factor=momentum))
        SELECTORS["warm"](source, k, recall)
        passes.append(source.passes)
    assert sum(passes[5:]) <= 1.15 * len(passes[5:])


class Counting(Memory):
    """A memory that counts the passes over it."""

    passes = 0

    def take(self, threshold, capacity):
        self.passes += 1
        return super().take(threshold, capacity)

    def count_above(self, threshold):
        self.passes += 1
        return super().count_above(threshold)


def test_ties_are_cut_by_index_and_lose_nothing():
    x = torch.ones(1000)
    for name, selector in SELECTORS.items():
        memory = x.clone()
        taken = selector(Memory(memory), 10, {})
        assert is_partition(x, memory, taken)
        if name != "reuse":
            assert taken.offsets.tolist() == list(range(10)), name


@given(st.integers(0, 10**7), st.floats(1e-4, 1))
@many
def test_entries_are_the_floor_of_the_share_and_at_least_one(numel, density):
    k = entries_for(numel, density)
    assert k == (min(numel, max(1, math.floor(density * numel))) if numel else 0)


@pytest.mark.parametrize("name", SELECTORS)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([0.05, 0.3, 1.0]), st.integers(0, 2**16))
@settings(deadline=None, max_examples=60)
def test_a_merged_group_is_selected_from_as_if_it_were_one_tensor(name, sizes, density, seed):
    whole = numbers("laplace", sum(sizes), seed)
    k = entries_for(whole.numel(), density)
    recall, other = {}, {}
    for _ in range(3):
        parts = [part.clone() for part in whole.split(sizes)]
        joined = Joined([Memory(part) for part in parts])
        taken = SELECTORS[name](joined, k, recall)
        expected = SELECTORS[name](Memory(whole.clone()), k, other)
        assert torch.equal(taken.offsets, expected.offsets)
        assert torch.equal(taken.values, expected.values)
        assert is_partition(whole, torch.cat(parts), taken)
        pieces = joined.split(taken)
        assert torch.equal(
            torch.cat([p.offsets + s for p, s in zip(pieces, joined.starts[:-1], strict=True)]), taken.offsets
        )


@pytest.mark.parametrize("kind", ["plain", "decay", "momentum", "both"])
@given(st.integers(1, 3000), st.sampled_from([0.0, 0.5, 2.0]), st.integers(0, 40), st.integers(0, 2**16))
@settings(deadline=None, max_examples=50)
def test_the_compiled_pass_has_the_bits_of_the_reference(kind, n, threshold, room, seed):
    generator = torch.Generator().manual_seed(seed)
    r, g, theta, u = torch.randn(4, n, generator=generator)

    def feed(momentum):
        parameters = theta if kind in ("decay", "both") else None
        return GradientUpdate(g, 0.3, parameters, 0.01 if parameters is not None else 0.0, momentum, 0.9)

    ours, theirs = r.clone(), r.clone()
    mine, yours = (u.clone(), u.clone()) if kind in ("momentum", "both") else (None, None)
    found = cpu.take(ours, feed(mine), threshold, 0.7, room)
    expected = reference.take(theirs, feed(yours), threshold, 0.7, room)
    assert torch.equal(found.taken.offsets, expected.taken.offsets)
    assert torch.equal(found.taken.values, expected.taken.values)
    assert torch.equal(ours, theirs)
    assert mine is None or torch.equal(mine, yours)
    assert found.count_above == expected.count_above
    assert found.sum_above == pytest.approx(expected.sum_above, rel=1e-4, abs=1e-4)
    one, two = cpu.copy_above(r - g, threshold, room), reference.copy_above(r - g, threshold, room)
    assert torch.equal(one.taken.offsets, two.taken.offsets)
    assert torch.equal(one.taken.values, two.taken.values)
    assert one.count_above == two.count_above
    assert cpu.copy_above(r, threshold, 0).count_above == reference.copy_above(r, threshold, 0).count_above
    assert cpu.magnitude(r) == pytest.approx(reference.magnitude(r), rel=1e-5)


def test_the_result_does_not_depend_on_the_number_of_threads():
    x, g = numbers("laplace", 600_001), numbers("normal", 600_001, 1)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            r = x.clone()
            taken = cpu.take(r, GradientUpdate(g, 0.1), 3.0, 0.5, 20_000).taken
            found.append((taken, r, cpu.copy_above(x, 2.0, 0).count_above))
    finally:
        torch.set_num_threads(before)
    for taken, r, count in found[1:]:
        assert torch.equal(taken.offsets, found[0][0].offsets)
        assert torch.equal(r, found[0][1])
        assert count == found[0][2]


@pytest.mark.parametrize(("n", "k"), [(512, 1), (512, 5), (4096, 40), (16384, 163)])
def test_the_count_of_a_small_input_varies_by_chance_about_what_was_asked_for(n, k):
    """A residual, step by step: no count is further off than a count varies, and the mean is near."""
    rng, recall, counts = np.random.default_rng(0), {}, []
    r = torch.zeros(n)
    for _ in range(300):
        g = torch.from_numpy(rng.normal(size=n).astype(np.float32))
        counts.append(SELECTORS["warm"](Memory(r, GradientUpdate(g, 0.1)), k, recall).offsets.numel())
    off = deviation(k, 1.5)
    assert k - off > 0
    assert all(k - off <= count <= k + off for count in counts)
    assert 0.85 * k <= sum(counts) / len(counts) <= 1.15 * k


def test_small_tensors_are_below_4096_elements():
    assert DEFAULT_DENSE_BELOW == 4096
    assert take_all(Memory(torch.tensor([0.0, 2.0]))).offsets.tolist() == [1]


@given(st.integers(1, 3000), st.floats(0, 1), st.sampled_from([1.0, 1e30, 3e38]), st.integers(0, 2**16))
@settings(deadline=None, max_examples=100)
def test_the_compiled_subtraction_has_the_bits_of_the_reference_and_refuses_the_same(n, density, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x, values = torch.randn(2, n, generator=generator)
    offsets = (torch.rand(n, generator=generator) < density).nonzero().view(-1)
    x, values = x.clamp(-1, 1) * scale, (values[offsets] * scale).clamp(-3.4e38, 3.4e38)
    ours, theirs = x.clone(), x.clone()
    fits = cpu.subtract_at(ours, offsets, values)
    assert fits == reference.subtract_at(theirs, offsets, values) == bool((x[offsets] - values).isfinite().all())
    assert torch.equal(ours, theirs)
    assert fits or torch.equal(ours, x)
