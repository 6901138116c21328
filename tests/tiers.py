"""Which cases of a test every run has, and which only ``make test LONG=1``."""

from collections.abc import Iterable

import pytest


def long_but(kept, cases: Iterable) -> list:
    """Return the cases of a test, marked ``long`` but for those kept: a list of cases, as they stand in ``cases``."""
    cases = list(cases)
    if unknown := [case for case in kept if case not in cases]:
        raise ValueError(f"no cases: {unknown}")
    return [case if case in kept else _long(case) for case in cases]


def _long(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
