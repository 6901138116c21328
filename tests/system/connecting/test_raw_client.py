"""A client in the raw stubs alone joins, pushes, pulls and learns."""

import numpy as np
import pytest

from psclient.rpc.local_server import LocalServer
from tests.system.raw import N, joined

LR = 0.2


def test_two_raw_workers_train_a_least_squares_problem():
    target = np.random.default_rng(0).normal(size=N).astype(np.float32)
    with LocalServer(down_mode="exact") as server:
        workers = [joined(server.addresses[0]) for _ in range(2)]
        for step in range(300):
            worker = workers[step % 2]
            gradient = worker.theta - target
            index = np.sort(np.argsort(-np.abs(gradient))[:40])
            answer = worker.push(index, LR * gradient[index])
            assert answer.version == step + 1
            worker.pull()
        for worker in workers:
            worker.pull()
            assert np.abs(worker.theta - target).max() < 0.05
        assert np.array_equal(workers[0].theta, workers[1].theta)


def test_a_repeated_push_gets_its_first_answer():
    with LocalServer(down_mode="exact") as server:
        worker = joined(server.addresses[0])
        first = worker.push([1, 5], [1.0, 2.0])
        worker.step -= 1
        second = worker.push([1, 5], [1.0, 2.0])
        assert (second.version, second.repeated_push) == (first.version, True)
        worker.pull()
        assert worker.theta[1] == pytest.approx(-1.0)
