"""The judge of power cuts finds what is lost, doubled, missing in the middle, and different."""

import math

import numpy as np
import pytest

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client.wire import Download, Push, digest
from verify.model.timeline import Promise, Resent, Timeline

SIZE = 8
INITIAL = np.linspace(-1, 1, SIZE, dtype=np.float32)
CUT_AT = 100.0
NOTHING, PERIOD, ANYTHING = Promise(CUT_AT, 0.0), Promise(CUT_AT, 1.0), Promise(CUT_AT, math.inf)


def push(step):
    return Push(
        run="run",
        worker="anna",
        incarnation="life",
        shard=0,
        step=step,
        generation=1,
        base=0,
        start=0,
        length=SIZE,
        offsets=np.array([step % SIZE, SIZE - 1], np.uint32) if step % SIZE < SIZE - 1 else None,
        values=np.full(2 if step % SIZE < SIZE - 1 else SIZE, step / 3, np.float32),
    )


def model(*steps):
    theta = INITIAL.copy()
    for each in map(push, steps):
        if each.offsets is None:
            theta -= each.values
        else:
            theta[each.offsets] -= each.values
    return theta


def there(*steps, version=None, generation=1):
    return Download(len(steps) if version is None else version, generation, 0, model(*steps), pb.PackedLayout())


@pytest.fixture
def timeline():
    """Three pushes, answered 2, 0.5 and 0.1 seconds before the cut."""
    made = Timeline(INITIAL)
    made.generation = 1
    for step, age in ((1, 2.0), (2, 0.5), (3, 0.1)):
        made.sent()
        made.answered(push(step), step, CUT_AT - age)
    return made


def test_what_is_there_is_in_order(timeline):
    timeline.seen(2, digest(model(1, 2)), CUT_AT - 0.4)
    timeline.found(there(1, 2, 3), [Resent(push(3), 3, True, CUT_AT + 1)], NOTHING)
    verdict = timeline.verdict
    assert verdict.kept
    assert (verdict.acknowledged, verdict.compared, verdict.repeated, verdict.gone) == (3, 2, 1, 0)


@pytest.mark.parametrize("promise", [NOTHING, PERIOD, ANYTHING])
def test_nothing_is_gone_from_a_history_that_goes_on(timeline, promise):
    timeline.found(there(1, 2), [], promise)
    assert timeline.verdict.lost == 1


@pytest.mark.parametrize(
    ("promise", "left", "lost"), [(NOTHING, 2, 1), (PERIOD, 1, 0), (PERIOD, 0, 1), (ANYTHING, 0, 0)]
)
def test_a_new_history_lacks_what_the_mode_allows(timeline, promise, left, lost):
    timeline.found(there(*range(1, left + 1), generation=2), [], promise)
    assert timeline.verdict.lost == lost
    assert timeline.verdict.gone == 3 - left
    assert timeline.verdict.histories == 1
    assert timeline.verdict.kept is not bool(lost)


def test_a_version_that_was_given_away_counts_as_an_answer(timeline):
    timeline.seen(4, digest(model(1, 2, 3, 4)), CUT_AT - 0.05)
    timeline.found(there(1, 2, 3, generation=2), [], NOTHING)
    assert timeline.verdict.lost == 1


def test_a_push_that_is_missing_in_the_middle_shows_in_the_values(timeline):
    timeline.found(there(1, 3, generation=2), [], ANYTHING)
    assert timeline.verdict.different == 1


def test_a_push_that_is_there_twice_shows_in_the_values(timeline):
    timeline.found(there(1, 2, 3, 3, version=3), [], NOTHING)
    assert timeline.verdict.different == 1


def test_a_wrong_model_that_a_worker_was_given_is_found(timeline):
    timeline.seen(2, digest(model(1, 3)), CUT_AT - 0.4)
    timeline.found(there(1, 2, 3), [], NOTHING)
    assert timeline.verdict.different == 1


def test_a_push_that_was_never_answered_is_known_by_its_repeat(timeline):
    timeline.found(there(1, 2, 3, 4), [Resent(push(4), 4, True, CUT_AT + 1)], NOTHING)
    assert timeline.verdict.kept
    assert timeline.verdict.acknowledged == 4


def test_a_version_that_is_nobodys_is_found(timeline):
    timeline.found(there(1, 2, 3, 4), [], NOTHING)
    assert timeline.verdict.duplicated == 1


def test_a_push_that_is_applied_again_is_found(timeline):
    timeline.found(there(1, 2, 3), [Resent(push(3), 4, False, CUT_AT + 1)], NOTHING)
    assert timeline.verdict.duplicated > 0


def test_an_answer_that_says_another_version_is_found(timeline):
    timeline.found(there(1, 2, 3), [Resent(push(3), 2, True, CUT_AT + 1)], NOTHING)
    assert timeline.verdict.duplicated > 0


def test_a_repeat_that_is_refused_though_the_push_is_there_is_found(timeline):
    timeline.found(there(1, 2, 3, generation=2), [Resent(push(3), 0, False, CUT_AT + 1)], NOTHING)
    assert timeline.verdict.lost == 1


def test_versions_that_are_gone_mean_other_pushes_from_then_on(timeline):
    timeline.found(there(1, generation=2), [Resent(push(3), 0, False, CUT_AT + 1)], PERIOD)
    timeline.answered(push(4), 2, CUT_AT + 2)
    timeline.found(there(1, 4, generation=2), [], Promise(CUT_AT + 3, 0.0))
    assert timeline.verdict.kept
    assert timeline.version == 2
    assert np.array_equal(timeline.values_at(2), model(1, 4))


def test_what_one_cut_has_left_no_later_one_takes(timeline):
    timeline.found(there(1, 2, 3), [], PERIOD)
    timeline.found(there(1, 2, generation=2), [], Promise(CUT_AT + 0.2, 1.0))
    assert timeline.verdict.lost == 1
