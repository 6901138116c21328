"""The watchdog by a clock that the test moves: what waits for its client is cut in time, what works never is."""

import pytest

from psservice.metrics import Metrics
from psservice.watchdog import Watchdog

IDLE, AGE = 1000.0, 5000.0


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Context:
    def __init__(self):
        self.cancelled = 0

    def cancel(self):
        self.cancelled += 1


class World:
    def __init__(self):
        self.clock, self.metrics, self.context = Clock(), Metrics(), Context()
        self.dog = Watchdog(IDLE, AGE, self.metrics, self.clock)

    def after(self, seconds):
        self.clock.now += seconds
        self.dog.look()
        return self.context.cancelled

    def cut(self, why, rpc="PushSparse"):
        return self.metrics.registry.get_sample_value("psservice_calls_cut_total", {"rpc": rpc, "why": why})


@pytest.fixture
def world():
    world = World()
    yield world
    world.dog.close()


def test_a_message_that_does_not_come_ends_the_call_once(world):
    with world.dog.watch(world.context, "PushSparse") as call, world.dog.waiting(call, "request"):
        assert world.after(IDLE) == 0
        assert world.after(1) == 1
        assert world.after(IDLE) == 1
    assert world.cut("idle_request") == 1


def test_every_message_begins_the_time_anew(world):
    with world.dog.watch(world.context, "PushSparse") as call:
        for message in world.dog.requests(call, iter(range(1, 5))):
            assert message
            with world.dog.waiting(call, "request"):
                assert world.after(IDLE) == 0


def test_a_call_that_lives_on_single_messages_is_too_long_at_last(world):
    with world.dog.watch(world.context, "PushSparse") as call:
        for _ in range(5):
            with world.dog.waiting(call, "request"):
                assert world.after(IDLE) == 0
        with world.dog.waiting(call, "request"):
            assert world.after(1) == 1
    assert world.cut("too_long") == 1


def test_a_handler_at_work_is_left_alone_however_long(world):
    with world.dog.watch(world.context, "PushSparse") as call:
        assert list(world.dog.requests(call, iter([1, 2]))) == [1, 2]
        assert world.after(100 * AGE) == 0


def test_an_answer_that_is_not_read_ends_the_call(world):
    with world.dog.watch(world.context, "PullDiff") as call:
        responses = world.dog.responses(call, iter("ab"))
        assert next(responses) == "a"  # and now it is being sent
        assert world.after(IDLE + 1) == 1
    assert world.cut("idle_reader", "PullDiff") == 1


def test_what_has_ended_is_forgotten(world):
    with world.dog.watch(world.context, "PushSparse") as call, world.dog.waiting(call, "request"):
        pass
    with pytest.raises(StopIteration), world.dog.watch(world.context, "PushSparse") as call:
        next(world.dog.requests(call, iter(())))
    assert world.after(100 * AGE) == 0
