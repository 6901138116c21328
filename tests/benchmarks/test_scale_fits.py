"""Fits find the numbers that made the points."""

import random

import numpy as np
import pytest

from benchmarks.scale.fits import Curve, Line, growing_share, line, serial_share, worst
from benchmarks.scale.overlap import novelty


def test_a_line_is_found_again():
    known = Line(3e-4, 2e-8)
    points = [(units, known(units)) for units in (100, 5_000, 1_000_000)]
    found = line(points)
    assert found.fixed == pytest.approx(known.fixed)
    assert found.each == pytest.approx(known.each)
    assert worst(found, points) < 1e-6


def test_a_small_difference_of_large_numbers_does_not_decide_alone():
    """A point whose seconds are what was left of much more, by chance nothing, counts as little as its noise says."""
    points = [(10, 1.0, 1.5), (20, 1.0, 1.6), (1000, 0.0, 100.0), (1000, 3.0, 100.0)]
    assert line(points)(15) == pytest.approx(1.0, rel=0.05)


def test_noise_of_a_tenth_moves_a_line_by_less():
    known, draw = Line(3e-4, 2e-8), random.Random(0)
    points = [(10**power, known(10**power) * draw.uniform(0.9, 1.1)) for power in range(2, 8) for _ in range(20)]
    found = line(points)
    assert found.fixed == pytest.approx(known.fixed, rel=0.1)
    assert found.each == pytest.approx(known.each, rel=0.1)


@pytest.mark.parametrize(("points", "part"), [([(10, 1.0), (1000, 0.5)], "each"), ([(10, 0.1), (20, 1.0)], "fixed")])
def test_no_part_of_a_line_is_negative(points, part):
    assert getattr(line(points), part) == 0


def test_a_curve_is_straight_in_the_logarithm_and_level_beyond_its_ends():
    curve = Curve((0.001, 0.1), (12.0, 4.0))
    assert curve(0.01) == pytest.approx(8)
    assert curve(1e-9) == pytest.approx(12)
    assert curve(1.0) == pytest.approx(4)


@pytest.mark.parametrize(("two", "share"), [(200.0, 0.0), (100.0, 1.0), (400 / 3, 0.5), (90.0, 1.0)])
def test_the_serial_share_is_amdahls(two, share):
    assert serial_share(100.0, two) == pytest.approx(share)


def test_one_core_shows_nothing_of_what_runs_beside():
    assert serial_share(100.0, 200.0, cores=1) == 1.0


def test_what_is_fixed_is_serial_and_the_rest_of_the_share_is_of_what_grows():
    work = Line(1e-3, 1e-6)
    assert growing_share(work, 3000, 0.25) == pytest.approx(0)
    assert growing_share(work, 3000, 0.625) == pytest.approx(0.5)
    assert growing_share(Line(1e-3, 0.0), 3000, 1.0) == 0


def test_pushes_at_random_places_are_all_news_and_repeated_ones_none():
    rng = np.random.default_rng(0)
    random_ones = [rng.choice(100_000, 1000, replace=False) for _ in range(64)]
    assert novelty(random_ones, 100_000) == pytest.approx(1.0, abs=0.01)
    assert novelty([random_ones[0]] * 64, 100_000) == pytest.approx(0.0, abs=0.01)
    shared = [np.concatenate([random_ones[0][:500], part[:500]]) for part in random_ones]
    assert 0.5 < novelty(shared, 100_000) < 0.95
