"""What of a test every run has, and what only ``make test LONG=1`` and a run of named modules."""

from collections.abc import Iterable

import pytest

SHORT_SHARE = 0.25
"""The share of Hypothesis' examples that a run without long tests draws."""

is_long = True
"""Whether long tests run: said by ``conftest.py`` before a module of tests is loaded."""


def examples(count: int) -> int:
    """Return how many examples Hypothesis draws for a test that has ``count`` of them in a long run."""
    return count if is_long else max(1, round(SHORT_SHARE * count))


def long_but(kept: Iterable, cases: Iterable) -> list:
    """Return the cases of a test, marked ``long`` but for those kept, as they stand in ``cases``."""
    kept, cases = list(kept), list(cases)
    if unknown := [case for case in kept if case not in cases]:
        raise ValueError(f"no cases: {unknown}")
    return [case if case in kept else _long(case) for case in cases]


def _long(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
