"""Samples are counted where a batch is, however it is handed to the model."""

import logging

import pytest
import torch
from torch import nn

from psclient.engine.sample_counter import SampleCounter

X = torch.zeros(5, 2)


@pytest.fixture
def counting():
    """Make counters, and close them."""
    made = []

    def make(model):
        made.append(SampleCounter(model))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Anything(nn.Module):
    def forward(self, *args, **kwargs):
        return X


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, torch.zeros(7)), {}),
        ((torch.zeros(()), X), {}),
        (([X, torch.zeros(7)], 3), {}),
        (((None, X),), {}),
        (({"ids": X, "mask": torch.zeros(7)},), {}),
        (("text",), {"batch": {"inner": [X]}}),
    ],
    ids=["first", "after a scalar", "list", "tuple", "dict", "by name"],
)
def test_the_first_dimension_of_the_first_tensor_counts(counting, args, kwargs):
    model = Anything()
    counter = counting(model)
    model(*args, **kwargs)
    assert counter.take() == 5


def test_no_tensor_and_evaluation_count_nothing(counting):
    model = Anything()
    counter = counting(model)
    model([], {}, "text")
    model.eval()
    model(X)
    assert counter.waiting == 0


class Parts(nn.Module):
    """Its submodules are called, and its own forward is not (a LightningModule's ``training_step``)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 2)

    def training_step(self, x):
        return self.decoder(self.encoder(x))

    def forward(self, x):
        return self.training_step(x)


def test_without_a_call_of_the_model_its_submodules_are_counted_each_by_itself(counting, caplog):
    model = Parts()
    counter = counting(model)
    for batches in (1, 1, 3):  # and three accumulated
        for _ in range(batches):
            model.training_step(X)
        assert counter.waiting == counter.take() == 5 * batches
    assert not caplog.records


def test_from_the_first_call_of_the_model_on_its_submodules_are_not_counted(counting, caplog):
    model = Parts()
    counter = counting(model)
    model(X)
    model.encoder(torch.zeros(100, 2))
    assert counter.take() == 5
    model.encoder(torch.zeros(100, 2))
    assert counter.take() == 1
    assert ["step(samples=...)" in record.message for record in caplog.records] == [True]


def test_a_call_that_an_interrupt_has_left_open_ends_with_the_step(counting):
    model = Parts()
    counter = counting(model)
    assert counter.enter(model, (X,))
    assert counter.take() == 5
    model(X)
    assert counter.take() == 5


def test_samples_that_are_left_out_are_counted_no_more(counting):
    model = Parts()
    counter = counting(model)
    model.training_step(X)
    counter.leave_out(3)
    assert counter.waiting == 2


def test_a_step_without_a_call_and_an_input_of_one_dimension_are_told_once_and_not_where_the_number_is_given(
    counting, caplog
):
    model = Anything()
    counter = counting(model)

    def told():
        found = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        caplog.clear()
        return found

    assert counter.take(warn=False) == 1
    model(torch.zeros(4))
    assert counter.take(warn=False) == 4
    assert not told()
    for warns in (True, False):
        model(torch.zeros(4))
        assert counter.take() == 4
        assert counter.take() == 1
        assert ["step(samples=" in each for each in told()] == [True, True] * warns
