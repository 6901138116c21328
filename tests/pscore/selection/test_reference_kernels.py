"""The plain torch operations that say what every kernel computes."""

import logging

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.selection.cuda import device_kernels
from pscore.selection.cuda import launches as cuda
from pscore.selection.kernels import reference
from pscore.selection.kernels.base import GradientUpdate

many = settings(deadline=None, max_examples=200)
numbers = st.lists(st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, 2.0**-100, -(2.0**127)]), max_size=40)


@given(numbers, st.sampled_from([0.0, 0.5, 1.5]), st.integers(0, 40))
@many
def test_the_first_entries_above_a_threshold_are_copied(x, threshold, capacity):
    found = [i for i, value in enumerate(x) if abs(value) > threshold]
    taken, above, _ = reference.copy_above(torch.tensor(x), threshold, capacity)
    assert above == len(found)
    assert taken.offsets.tolist() == found[:capacity]
    assert taken.values.tolist() == [x[i] for i in found[:capacity]]


def test_a_step_with_momentum_and_decay():
    memory, momentum = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.5, 4.0, 0.0])
    gradient, parameters = torch.tensor([2.0, 0.0, 4.0], dtype=torch.bfloat16), torch.tensor([8.0, 0.0, 0.0])
    feed = GradientUpdate(gradient, 0.5, parameters, 0.25, momentum, 0.5)
    taken, above, excess = reference.take(memory, feed, 2.0, 0.5, 1)
    # d = [3, 0, 2], u = [3.25, 2, 2], r = [4.25, 2, 4]: two above 2, room for one.
    assert (above, excess) == (2, 4.25)
    assert taken.offsets.tolist() == [0]
    assert taken.values.tolist() == [4.25]
    assert memory.tolist() == [2.125, 2.0, 4.0]
    assert momentum.tolist() == [3.25, 2.0, 2.0]


def test_tail_and_magnitude():
    x = torch.tensor([3.0, -1.0, 0.0, -4.0])
    assert reference.copy_above(x, 1.0, 0)[1:] == (2, 5.0)
    assert reference.copy_above(x, 4.0, 0)[1:] == (0, 0.0)
    assert reference.magnitude(x) == (8.0, 4.0)
    assert reference.magnitude(torch.empty(0)) == (0.0, 0.0)


def test_standing_in_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: False)
    device_kernels.cache_clear()
    with caplog.at_level(logging.WARNING, logger="pscore"):
        assert device_kernels(torch.device("cuda")) is None
        assert device_kernels(torch.device("cuda")) is None
    device_kernels.cache_clear()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["Triton is not installed"]
