"""Runs with the same seed begin alike and see the same data, and nobody sees what is held out."""

import itertools

import pytest
import torch

from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.spec import Form, Spec
from benchmarks.campaign.tasks import TASKS
from psservice.settings import ServerSettings


def batches(task, seed, worker, workers, count=3):
    return list(itertools.islice(task.draws(seed, worker, workers), count))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_seed_gives_every_method_the_same(task):
    def weights(seed):
        return torch.nn.utils.parameters_to_vector(task.initial_model(seed).parameters())

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))
    for (x, y), (again, labels) in zip(batches(task, 3, 1, 4), batches(task, 3, 1, 4), strict=True):
        assert torch.equal(x, again)
        assert torch.equal(y, labels)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_workers_and_seeds_see_other_batches(task):
    first = [batches(task, seed, worker, 4)[0][0] for seed, worker in ((0, 0), (0, 1), (1, 0))]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(first, 2))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_what_settings_are_chosen_by_is_not_what_is_tested_with(task):
    test, validation = (task.held_out(validation)[0].flatten(1) for validation in (False, True))
    shared = sum((validation == row).all(1).any().item() for row in test[:100])
    assert shared <= 1  # two files of the library may begin alike


def test_shares_of_the_digits_are_disjoint():
    task = TASKS["digits"]
    size = 1097 // 4 // task.batch_size
    seen = [torch.cat([x for x, _ in batches(task, 0, worker, 4, size)]).flatten(1) for worker in range(4)]
    images = {tuple(image.tolist()) for image in torch.cat(seen)}
    assert len(images) == 4 * size * task.batch_size
    held_out = {
        tuple(image.tolist()) for validation in (False, True) for image in task.held_out(validation)[0].flatten(1)
    }
    assert not images & held_out


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_an_entry_of_the_registry_can_be_run(method):
    assert METHODS[method.key] is method
    assert len(set(method.momenta)) == len(method.momenta) > 0
    assert all(0 <= momentum < 1 for momentum in method.momenta)
    for workers in (1, 2, 4, 8):
        ServerSettings(**method.server(workers))


def test_runs_that_differ_have_keys_that_differ():
    specs = [
        Spec(task, method, workers, seed, 640, 0.3, 0.6, Form(0.01), validation)
        for task in TASKS
        for method in METHODS
        for workers in (1, 2)
        for seed in (0, 1)
        for validation in (False, True)
    ]
    assert len({spec.key for spec in specs}) == len(specs)


def test_samples_are_the_budget_however_many_share_them():
    steps = [Spec("digits", "dgs", workers, 0, 640, 0.3, 0.6, Form(0.01)).steps for workers in (1, 2, 4, 8)]
    assert [step * 16 * workers for step, workers in zip(steps, (1, 2, 4, 8), strict=True)] == [640] * 4
