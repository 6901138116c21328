"""Samples are counted where a batch is, however it is handed to the model."""

import pytest
import torch
from torch import nn

from psclient.model import SampleCounter

X = torch.zeros(5, 2)


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
def test_the_first_dimension_of_the_first_tensor_counts(args, kwargs):
    model = Anything()
    counter = SampleCounter(model)
    model(*args, **kwargs)
    assert counter.take() == 5


def test_no_tensor_and_evaluation_count_nothing():
    model = Anything()
    counter = SampleCounter(model)
    model([], {}, "text")
    model.eval()
    model(X)
    assert counter.waiting == 0
