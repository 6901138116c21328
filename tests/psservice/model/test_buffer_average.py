"""The average of buffers: the formula of docs/reference/protocol.md, in every dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.buffers import pack, unpack
from pscore.model.layout import TensorSpec
from psservice.model.buffers import BufferAverage
from tests.tiers import examples

MEAN = TensorSpec("mean", (5,), torch.float32)
COUNT = TensorSpec("count", (), torch.int64)
TABLE = TensorSpec("table", (3,), torch.int64)
SPECS = (MEAN, TABLE, COUNT)
START = [torch.full((5,), 9.0), torch.tensor([1, 2, 3]), torch.tensor(0)]


def contribution(mean, count):
    return pack([mean, torch.tensor(count)])


def read(average):
    return unpack(average.packed(), average.exchanged)


def test_before_any_contribution_it_is_the_upload():
    average = BufferAverage(SPECS, START)
    assert [spec.name for spec in average.exchanged] == ["mean", "count"]
    assert pack(average.state().values()) == pack(START)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8))
@settings(deadline=None, max_examples=examples(30))
def test_with_one_worker_it_is_that_workers_buffers(samples):
    average = BufferAverage(SPECS, START)
    for step, count in enumerate(samples):
        mean = torch.randn(5) * 10 ** (step % 5)
        average.contribute(contribution(mean, step), count, live_workers=1)
        assert torch.equal(read(average)[0], mean)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 6)), min_size=1, max_size=20), st.integers(0, 2**16))
@settings(deadline=None, max_examples=examples(50))
def test_with_many_it_is_the_moving_average_over_about_as_many_contributions(history, seed):
    generator = torch.Generator().manual_seed(seed)
    average, weight, mean = BufferAverage(SPECS, START), 0.0, torch.zeros(5, dtype=torch.float64)
    for samples, workers in history:
        values = torch.randn(5, generator=generator)
        average.contribute(contribution(values, 0), samples, live_workers=workers)
        weight = (1 - 1 / workers) * weight + samples
        mean = mean + samples / weight * (values.double() - mean)
    torch.testing.assert_close(read(average)[0].double(), mean, rtol=1e-5, atol=1e-5)


def test_equal_buffers_stay_what_they_are():
    average = BufferAverage(SPECS, START)
    mean = torch.randn(5)
    for _ in range(20):
        average.contribute(contribution(mean, 0), 32, live_workers=4)
    torch.testing.assert_close(read(average)[0], mean, rtol=1e-6, atol=0)


def test_a_counter_is_the_largest_reported():
    average = BufferAverage(SPECS, START)
    for count in (3, 10, 7):
        average.contribute(contribution(torch.zeros(5), count), 1, live_workers=3)
    assert read(average)[1].item() == 10


def test_tables_are_constant():
    average = BufferAverage(SPECS, START)
    average.contribute(contribution(torch.zeros(5), 1), 1, live_workers=1)
    assert average.state()["table"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_half_precision_is_averaged_in_fp32_and_double_in_double(dtype):
    spec = TensorSpec("mean", (4,), dtype)
    average = BufferAverage((spec,), [torch.zeros(4, dtype=dtype)])
    reference, weight = torch.zeros(4, dtype=torch.float64), 0.0
    for _ in range(50):
        values = torch.rand(4).to(dtype)
        average.contribute(pack([values]), 1, live_workers=50)
        weight = (1 - 1 / 50) * weight + 1
        reference += (values.double() - reference) / weight
    found = read(average)[0]
    assert found.dtype == dtype
    tolerance = max(torch.finfo(dtype).eps, 1e-6 if dtype != torch.float64 else 0)
    torch.testing.assert_close(found.double(), reference, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_no_number_counts_nowhere_and_the_rest_of_its_tensor_does(dtype):
    nan = float("nan")
    average = BufferAverage((TensorSpec("mean", (3,), dtype),), [torch.tensor([2.0, nan, nan], dtype=dtype)])
    average.contribute(pack([torch.tensor([nan, 4.0, nan], dtype=dtype)]), 1, live_workers=1)
    torch.testing.assert_close(read(average)[0], torch.tensor([2.0, 4.0, nan], dtype=dtype), equal_nan=True)


def test_a_wrong_length_changes_nothing():
    average = BufferAverage(SPECS, START)
    before = average.packed()
    with pytest.raises(ValueError, match="bytes"):
        average.contribute(b"short", 1, live_workers=1)
    assert average.packed() == before
