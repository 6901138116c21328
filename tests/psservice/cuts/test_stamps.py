"""Since when each element has been as it is: no change since any version is missed, however many there were."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.wire.codecs.residue import UNKNOWN
from psservice.cuts.stamps import Stamps
from tests.tiers import examples

SIZE = 40


class Model:
    """The same in plain Python: where each element was at each version."""

    def __init__(self, seed, versions, step):
        rng = np.random.default_rng(seed)
        self.stamps = Stamps(SIZE, 7, has_windows=True)
        self.places, version = [(7, np.zeros(SIZE, np.int64))], 7
        for _ in range(versions):
            changed = np.flatnonzero(rng.random(SIZE) < rng.choice([0.0, 0.02, 0.3]))
            steps = rng.integers(1, step + 1, changed.size) * rng.choice([-1, 1], changed.size)
            half = changed.size // 2
            for part in (slice(0, half), slice(half, None)):
                if changed[part].size:
                    self.stamps.note(changed[part], steps[part].astype(np.int32))
            version += int(rng.integers(1, 4))
            self.stamps.end(version)
            now = self.places[-1][1].copy()
            now[changed] += steps
            self.places.append((version, now))


@pytest.mark.long
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 30, 254, 255, 256, 700]), st.sampled_from([1, 3, 20]))
@settings(deadline=None, max_examples=examples(15))
def test_what_has_changed_since_any_version_is_found_and_how_far_it_went(seed, versions, step):
    model = Model(seed, versions, step)
    all_changed = np.full(SIZE, True)
    for place, (version, then) in enumerate(model.places):
        found = model.stamps.since(version)
        later = [places for _, places in model.places[place:]]
        has_moved = np.any([places != then for places in later], axis=0)
        assert all_changed[found].all()
        assert {*np.flatnonzero(has_moved)} <= {*found}
        distances = model.stamps.distances(version, found)
        furthest = np.max([np.abs(places - then) for places in later], axis=0)[found]
        assert ((distances == UNKNOWN) | (distances >= furthest)).all()
    assert model.stamps.since(model.places[-1][0]).size == 0


def test_recent_versions_are_told_apart_after_any_number():
    model = Model(1, 2000, 1)
    for place in range(-60, -1):
        version, _ = model.places[place]
        exact = np.any([np.diff(np.stack([p for _, p in model.places[place:]]), axis=0) != 0], axis=(0, 1))
        assert {*model.stamps.since(version)} == {*np.flatnonzero(exact)}


def test_a_version_before_all_is_not_known_and_one_between_is_the_one_before():
    stamps = Stamps(SIZE, 5, has_windows=False)
    stamps.note(np.array([3]), None)
    stamps.end(10)
    stamps.note(np.array([4]), None)
    stamps.end(20)
    assert stamps.since(4) is None
    assert [*stamps.since(5)] == [3, 4]
    assert [*stamps.since(10)] == [*stamps.since(15)] == [4]
    assert stamps.since(20).size == stamps.since(25).size == 0
    assert (stamps.distances(10, np.array([4])) == UNKNOWN).all()


def test_of_versions_with_one_number_the_first_counts():
    stamps = Stamps(SIZE, 5, has_windows=False)
    for offset in (1, 2):
        stamps.note(np.array([offset]), None)
        stamps.end(6)
    assert [*stamps.since(6)] == [2]


def test_windows_begin_anew_once_many_elements_have_left_theirs():
    stamps = Stamps(SIZE, 0, has_windows=True)
    for version in range(1, 300):
        stamps.note(np.arange(SIZE), np.full(SIZE, 3, np.int32))
        stamps.end(version)
    assert (stamps.distances(0, np.arange(SIZE)) == UNKNOWN).all()
    for version in range(300, 500):
        stamps.note(np.arange(1), np.array([1 if version % 2 else -1], np.int32))
        stamps.end(version)
    assert (stamps.distances(299, np.arange(SIZE)) == UNKNOWN).all()
    assert [*stamps.distances(498, np.arange(3))] == [1, 0, 0]


@pytest.mark.parametrize("steps", [[5, -5], [-14, 14], [1] * 14])
def test_a_window_covers_all_places_since_the_version(steps):
    stamps, place, been = Stamps(1, 0, has_windows=True), 0, [0]
    for version, step in enumerate(steps, start=1):
        stamps.note(np.array([0]), np.array([step], np.int32))
        stamps.end(version)
        place += step
        been.append(place)
    assert stamps.distances(0, np.array([0])) == max(been) - min(been)


def test_versions_that_change_nothing_are_not_kept():
    stamps = Stamps(10, 0, has_windows=False)
    for version in range(1, 1000):
        if version % 100 == 0:
            stamps.note(np.array([version // 100]), None)
        stamps.end(version)
    assert len(stamps._state[1]) == 10
    assert [*stamps.since(850)] == [9]
    assert stamps.since(999).size == 0
    assert stamps.count_since(250) == 7
