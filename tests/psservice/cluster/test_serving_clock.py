"""The clock of leases: time in which the process stands still does not count."""

import pytest

from psservice.cluster.serving_clock import ServingClock


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("gaps", "counted"), [([0.5, 1.0, 0.25], 1.75), ([0.5, 100.0, 0.5], 2.0), ([], 0.0), ([1000.0], 1.0)]
)
def test_gaps_count_up_to_the_longest(gaps, counted):
    clock = Clock()
    serving = ServingClock(1.0, clock)
    for gap in gaps:
        clock.now += gap
        serving()
    assert serving() == counted
