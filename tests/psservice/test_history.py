"""The past of a run: bounded, in order, and with the sums of what happened however often points became one."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psservice.observability.history import History, Point, columns, merged

POINT = Point(
    unix_seconds=0.0,
    seconds=2.0,
    pushes_per_second=1.0,
    samples_per_second=32.0,
    push_bytes_per_second=1e6,
    pull_bytes_per_second=2e6,
    staleness_median=1.5,
    staleness_largest=3,
    loss=None,
    workers=2,
)


def point(number, **fields):
    return replace(POINT, unix_seconds=2.0 * number, **fields)


@given(count=st.integers(0, 500), most=st.sampled_from([2, 4, 10, 64]))
def test_the_whole_time_is_there_in_few_points(count, most):
    history = History(5, most)
    for number in range(1, count + 1):
        history.add(point(number, pushes_per_second=float(number), staleness_largest=number))
    recent, whole = history.recent(), history.whole()
    assert [each.unix_seconds for each in recent] == [2.0 * number for number in range(max(1, count - 4), count + 1)]
    assert len(whole) <= most
    assert math.isclose(sum(each.seconds for each in whole), 2.0 * count)
    pushes = sum(each.pushes_per_second * each.seconds for each in whole)
    assert math.isclose(pushes, 2.0 * count * (count + 1) / 2)
    if count:
        assert whole[-1].unix_seconds == 2.0 * count, "the newest is there too"
        assert max(each.staleness_largest for each in whole) == count
    ends = [each.unix_seconds for each in whole]
    assert ends == sorted(set(ends))


@pytest.mark.parametrize(("losses", "mean"), [((None, None), None), ((None, 4.0), 4.0), ((2.0, 4.0), 3.0)])
def test_a_loss_is_the_mean_of_those_that_were_told(losses, mean):
    assert merged([point(1, loss=losses[0]), point(2, loss=losses[1])]).loss == mean


def test_columns_are_json_that_browsers_read():
    found = columns([point(1, loss=1 / 3), point(2)])
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text)["loss"] == [0.333333, None]
    assert found["unix_seconds"] == [2.0, 4.0]
    assert {len(each) for each in found.values()} == {2}
