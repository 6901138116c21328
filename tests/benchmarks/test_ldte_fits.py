"""The distance to a fitted distribution is the area between two quantile functions, whatever the numbers are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ldte.fits import Laplace, Normal, wasserstein
from tests.tiers import examples

FITS = {"normal": Normal(0.0, 1.0), "laplace": Laplace(0.0, 1.0)}
NUMBERS = st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40).filter(lambda x: max(x) - min(x) > 1e-3)


def ordered(values):
    return torch.tensor(sorted(values), dtype=torch.float32)


def by_quadrature(x, fit, points=400_000):
    """The same area as a mean over the quantiles of a fine grid."""
    u = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    own = x.double()[(u * x.numel()).long().clamp(max=x.numel() - 1)]
    return float((own - (fit.middle + fit.scale * fit.quantile(u))).abs().mean())


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_the_antiderivative_and_the_quantile_belong_to_the_distribution_function(fit):
    z = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    step = 1e-5
    slope = (fit.area(z + step) - fit.area(z - step)) / (2 * step)
    torch.testing.assert_close(slope, fit.below(z), atol=1e-6, rtol=0)
    torch.testing.assert_close(fit.quantile(fit.below(z)), z, atol=1e-6, rtol=0)
    assert float(fit.area(torch.tensor(-40.0, dtype=torch.float64))) < 1e-15


@settings(max_examples=examples(25), deadline=None)
@given(NUMBERS, st.sampled_from([Normal, Laplace]))
def test_it_is_the_area_between_the_quantile_functions(values, kind):
    x = ordered(values)
    fit = kind.of(x)
    if fit.scale > 1e-3:  # Laplace: more than half of them may be the median
        assert wasserstein(x, fit) == pytest.approx(by_quadrature(x, fit), rel=2e-3, abs=2e-3 * fit.scale)


@settings(max_examples=examples(25), deadline=None)
@given(NUMBERS, st.sampled_from([Normal, Laplace]), st.floats(0.01, 100), st.floats(-10, 10))
def test_it_scales_and_does_not_move(values, kind, factor, shift):
    x = ordered(values).double()
    fit, moved = kind(0.3, 1.7), kind(0.3 * factor + shift, 1.7 * factor)
    assert wasserstein(x * factor + shift, moved) == pytest.approx(factor * wasserstein(x, fit), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("near", "far"), [(Normal, Laplace), (Laplace, Normal)])
def test_numbers_of_a_distribution_are_nearest_to_their_own(near, far):
    """The limit for the other fit is the distance between the two distributions."""
    draws = np.random.default_rng(0)
    sample = draws.normal if near is Normal else draws.laplace
    x = ordered(sample(0.5, 2.0, 200_000).tolist())
    own, other = near.of(x), far.of(x)
    assert own.middle == pytest.approx(0.5, abs=0.02)
    assert own.scale == pytest.approx(2.0, rel=0.01)
    assert wasserstein(x, own) < 0.02 * own.scale
    assert wasserstein(x, other) > 5 * wasserstein(x, own)


def test_two_points_by_hand():
    """Of ±1, against Laplace(0, 1), right of 0: first F̂ = ½ below F = 1 − e⁻ˣ/2, beyond 1 F̂ = 1 above it."""
    until_one = 0.5 - 0.5 * (1 - np.exp(-1))
    beyond = 0.5 * np.exp(-1)
    assert wasserstein(ordered([-1.0, 1.0]), FITS["laplace"]) == pytest.approx(2 * (until_one + beyond), rel=1e-9)


def test_pieces_make_no_difference(monkeypatch):
    x = torch.randn(1000).sort().values
    whole = wasserstein(x, Normal.of(x))
    monkeypatch.setattr("benchmarks.ldte.fits._PIECE", 37)
    assert wasserstein(x, Normal.of(x)) == pytest.approx(whole, rel=1e-12)
