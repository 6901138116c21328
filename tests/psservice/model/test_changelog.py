"""The ledger: the union of what changed since a version, or nothing at all where it has forgotten."""

import subprocess
import sys
from collections import deque
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from psservice.model import changelog
from psservice.model.changelog import ChangeLog, _is_scanned, gather, union
from psservice.rules.changed import changed_by
from tests.tiers import examples

SIZE = 40
many = settings(deadline=None, max_examples=examples(150))

supports = st.none() | st.sets(st.integers(0, SIZE - 1), max_size=SIZE)


def tensor_of(support, dtype=torch.int32):
    return None if support is None else torch.tensor(sorted(support), dtype=dtype)


def as_set(support):
    return set(range(SIZE)) if support is None else set(support.tolist())


@given(st.lists(supports, max_size=20), st.integers(0, 5))
@many
def test_the_union_since_every_version_is_what_changed_since(history, first):
    ledger = ChangeLog(SIZE, entry_limit=10**6, version=first)
    for version, support in enumerate(history, first + 1):
        ledger.append(version, tensor_of(support))
    for done in range(len(history) + 1):
        found = ledger.since(first + done)
        assert len(found) == len(history) - done
        together = union(found, SIZE)
        expected = set().union(*(set(range(SIZE)) if s is None else s for s in history[done:]))
        if together is None:  # every element: allowed where nearly all changed in one version
            assert any(s is None or len(s) >= 0.8 * SIZE for s in history[done:])
        else:
            assert together.tolist() == sorted(expected)


class Walked(deque):
    """Of which no element in the middle is looked up: that walks there from an end each time."""

    def __getitem__(self, position):
        raise AssertionError(f"element {position} is looked up")


def test_reading_many_versions_walks_through_them_once(monkeypatch):
    monkeypatch.setattr(changelog, "deque", Walked)
    ledger = ChangeLog(SIZE, entry_limit=10**6)
    for version in range(1, 1001):
        ledger.append(version, tensor_of({version % SIZE}))
    assert [found.tolist() for found in ledger.since(500)] == [[version % SIZE] for version in range(501, 1001)]
    assert [found.tolist() for found in ledger.after(998)] == [[999 % SIZE], [1000 % SIZE]]


@given(st.lists(supports, max_size=20), st.integers(0, 60))
@many
def test_what_is_forgotten_is_never_guessed(history, limit):
    ledger = ChangeLog(SIZE, entry_limit=limit)
    for version, support in enumerate(history, 1):
        ledger.append(version, tensor_of(support))
    reached = [ledger.since(version) is not None for version in range(len(history) + 1)]
    assert reached == sorted(reached), "older versions are forgotten first"
    assert reached[-1], "a replica at the newest version lacks nothing"
    for version, known in enumerate(reached):
        if known:
            found = [as_set(support) for support in ledger.since(version)]
            assert len(found) == len(history) - version
            assert all(real is None or real <= mine for real, mine in zip(history[version:], found, strict=True))
            assert sum(len(s) for s in history[version:] if s is not None and len(s) < 0.8 * SIZE) <= limit


@given(st.lists(st.sets(st.integers(0, SIZE - 1), max_size=10), max_size=20), st.integers(0, 60))
@many
def test_nothing_is_forgotten_within_the_limit(history, limit):
    ledger = ChangeLog(SIZE, entry_limit=limit)
    for version, support in enumerate(history, 1):
        ledger.append(version, tensor_of(support))
    for version in range(len(history) + 1):
        if sum(map(len, history[version:])) <= limit:
            assert ledger.since(version) is not None


@given(
    st.lists(st.none() | st.sets(st.integers(0, 299), max_size=40), max_size=6),
    st.integers(300, 400),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)
@many
def test_union_and_values_are_the_same_however_they_are_found(supports, size, scanned, dtype):
    changes, theta = [tensor_of(support, dtype) for support in supports], torch.randn(size)
    with mock.patch("psservice.model.changelog._is_scanned", return_value=scanned):
        together, found = union(changes, size), gather(changes, theta)
    if None in supports:
        assert together is None
        assert found is None
        return
    expected = sorted(set().union(*supports))
    assert together.tolist() == found[0].tolist() == expected
    assert found[0].dtype == torch.int64
    assert torch.equal(found[1], theta[expected])


def test_large_unions_are_scanned_and_small_ones_sorted():
    size = 10_000_000
    assert _is_scanned([torch.arange(size // 100)] * 2, size)
    assert not _is_scanned([torch.arange(1000)] * 2, size)


@pytest.mark.long
@pytest.mark.executes_python
def test_a_small_model_never_waits_for_the_compiler():
    code = """
import sys, torch
from psservice.model.changelog import union
print(union([torch.arange(100), torch.arange(50, 150)], 200).numel(), "numba" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.stdout.split() == ["150", "False"], done.stderr


@given(st.lists(supports, max_size=20), st.integers(0, 60))
@many
def test_what_was_recorded_after_a_position_is_returned_or_known_to_be_dropped(history, limit):
    ledger = ChangeLog(SIZE, entry_limit=limit)
    for version, support in enumerate(history, 1):
        ledger.append(version // 2, tensor_of(support))  # several changes may be of one version
    assert ledger.appended == len(history)
    for position in range(len(history) + 1):
        found = ledger.after(position)
        assert found is None or len(found) == len(history) - position
        assert found is not None or position < len(history) - len(ledger.all())


def test_a_version_before_the_first_is_not_covered():
    ledger = ChangeLog(SIZE, entry_limit=100, version=7)
    assert ledger.since(6) is None
    assert ledger.since(7) == []
    assert union([], SIZE).numel() == 0


def test_empty_pushes_cost_no_entries():
    ledger = ChangeLog(SIZE, entry_limit=1)
    for version in range(1, 1001):
        ledger.append(version, tensor_of(set()))
    assert len(ledger.since(0)) == 1000
    assert union(ledger.since(0), SIZE).numel() == 0


def test_changes_that_a_restart_brought_to_the_host_are_read_for_a_model_on_a_device():
    """No loop may read the model there; a meta tensor stands for it, whose memory nothing can read."""
    changes = [torch.arange(start, 100_000, 3, dtype=torch.int32) for start in range(2)]
    assert _is_scanned(changes, 100_000)
    place, values = gather(changes, torch.empty(100_000, device="meta"))
    assert place.device.type == values.device.type == "meta"
    assert values.numel() == place.numel() == sum(each.numel() for each in changes)


@pytest.mark.parametrize(("size", "dtype"), [(2**31 - 1, torch.int32), (2**31, torch.int64), (2**33, torch.int64)])
def test_offsets_of_a_large_shard_are_as_wide_as_they_must_be(size, dtype):
    places = torch.tensor([0, size // 2, size - 1])
    changed = changed_by(SparseSlice(Span(0, size), places, torch.ones(3, dtype=torch.uint8)))
    assert changed.dtype == dtype
    assert changed.tolist() == places.tolist()
    ledger = ChangeLog(size, entry_limit=10)
    ledger.append(1, changed)
    ledger.append(2, changed_by(SparseSlice(Span(0, size), places[1:] - 1, torch.ones(2, dtype=torch.uint8))))
    assert union(ledger.since(0), size).tolist() == sorted({*places.tolist(), size // 2 - 1, size - 2})
