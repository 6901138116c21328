"""Children talk, fail in words, and are gone at the end."""

import time

import psutil
import pytest

from benchmarks.harness.children import Child, ChildFailedError


def echo(connection, greeting):
    connection.send(greeting + connection.recv())


def fail(connection):
    raise ValueError("no such tensor")


def sleep(connection):
    time.sleep(60)


def test_a_child_talks():
    with Child("echo", echo, "hello ") as child:
        child.tell("world")
        assert child.hear(30) == "hello world"
        pid = child.pid
    assert not psutil.pid_exists(pid)


def test_a_failure_is_told_in_the_words_of_the_child():
    child = Child("worker 3", fail)
    with pytest.raises(ChildFailedError, match="worker 3: ValueError: no such tensor"), child:
        child.hear(30)


def test_a_child_that_does_not_answer_is_killed():
    started = time.monotonic()
    child = Child("sleeper", sleep)
    with pytest.raises(ChildFailedError, match="did not answer in 0 s"), child:
        child.hear(0.2)
    assert not psutil.pid_exists(child.pid)
    assert time.monotonic() - started < 30
