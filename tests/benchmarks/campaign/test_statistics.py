"""Paired differences against numbers computed by hand."""

import math

import pytest

from benchmarks.campaign.statistics import compare, spread


def test_spread():
    assert spread([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7)))
    assert spread([5.0]) == (5.0, 0.0)


def test_a_paired_standard_error_is_that_of_the_differences():
    # Differences 1, 2, 6: mean 3, s² = (4 + 1 + 9) / 2 = 7, error √(7/3). The scores' own spread is far larger.
    found = compare({0: 11.0, 1: 52.0, 2: 96.0}, {0: 10.0, 1: 50.0, 2: 90.0}, higher_is_better=True)
    assert found.mean == pytest.approx(3.0)
    assert found.error == pytest.approx(math.sqrt(7 / 3))
    assert (found.seeds, found.verdict) == ((0, 1, 2), "better")


def test_a_loss_is_better_where_it_is_lower():
    assert compare({0: 2.0, 1: 2.1}, {0: 1.0, 1: 1.2}, higher_is_better=False).verdict == "worse"
    assert compare({0: 2.0, 1: 2.1}, {0: 1.0, 1: 1.2}, higher_is_better=True).verdict == "better"


def test_within_one_error_neither_is_better():
    found = compare({0: 1.0, 1: 1.0}, {0: 0.0, 1: 1.9}, higher_is_better=True)
    assert found.mean == pytest.approx(0.05)
    assert found.verdict == "equal"


def test_only_seeds_that_both_have_are_paired():
    found = compare({0: 1.0, 1: 2.0, 2: 50.0}, {1: 1.0, 0: 0.5, 3: -50.0}, higher_is_better=True)
    assert found.seeds == (0, 1)
    assert found.mean == pytest.approx(0.75)
    assert compare({0: 1.0}, {1: 1.0}, higher_is_better=True) is None


def test_one_seed_decides_nothing():
    found = compare({0: 1.0}, {0: 0.0}, higher_is_better=True)
    assert (found.mean, found.error, found.verdict) == (1.0, None, "equal")


def test_who_diverges_more_often_is_worse():
    assert compare({0: None, 1: 1.0}, {0: 0.1, 1: 0.1}, higher_is_better=True).verdict == "worse"
    assert compare({0: 0.1, 1: 1.0}, {0: None, 1: 0.1}, higher_is_better=True).verdict == "better"
    assert compare({0: None, 1: 1.0}, {0: 0.1, 1: None}, higher_is_better=True).verdict == "equal"
