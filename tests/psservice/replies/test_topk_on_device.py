"""A top-k reply's selection by the kernels of a device: in Triton's interpreter, or on a GPU where one is."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.selection import SELECTORS
from pscore.selection.cuda.launches import DeviceKernels
from psservice.model.changelog import ChangeLog
from psservice.replies import topk
from psservice.replies.topk import DifferenceSelection, TopKSettings, add_at
from tests.pscore.kernel_makers import DEVICE, randn
from tests.tiers import long_but

SIZES = [40, 3000, 7, 5, 2000, 900]


def made(span, kernels):
    layout = ModelLayout(tuple(TensorSpec(f"t{i}", (size,), torch.float32) for i, size in enumerate(SIZES)))
    model = SimpleNamespace(theta=None, layout=layout, span=span, version=0, changelog=ChangeLog(span.length, 10**9))
    return model, DifferenceSelection(TopKSettings(0.1, 100, SELECTORS["warm"]), _on_device=lambda _: kernels)


@pytest.fixture
def counted(monkeypatch):
    """Kernels that count the series of launches, and searches apart."""
    kernels = DeviceKernels(DEVICE, block=4096, part=4096)
    kernels.launches = []
    launch = kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *a, **kw: kernels.launches.append(bool(kw)) or launch(*a, **kw))
    return kernels


@pytest.mark.parametrize("span", long_but([Span(1500, 5500)], [Span(0, 5952), Span(1500, 5500)]))
def test_all_tensors_of_a_span_are_selected_from_at_once(span, counted):
    model, selection = made(span, counted)
    image = randn(span.length, 1).to(DEVICE)
    for seed in range(3):
        model.theta = (image.cpu() + randn(span.length, 10 + seed)).to(DEVICE)
        difference = (model.theta - image).cpu()
        taken = selection.select(model, image).taken
        assert taken.offsets.device.type == taken.values.device.type == "cpu"
        assert torch.equal(taken.values, difference[taken.offsets])
        assert bool((taken.offsets.diff() > 0).all())
        table = selection._table_of(model)
        for start, end, k in zip(table.starts.tolist(), table.ends.tolist(), table.ks.tolist(), strict=True):
            inside = (taken.offsets >= start) & (taken.offsets < end)
            slack = 0 if k == end - start else max(0.1 * k, 2 * k**0.5)
            assert abs(int(inside.sum()) - k) <= slack
            left = difference[start:end].clone()
            left[taken.offsets[inside] - start] = 0
            assert difference[taken.offsets[inside]].abs().min() >= left.abs().max()
    assert counted.launches[:2] == [False, True], "a cold start searches once, for all tensors"
    assert len(counted.launches) <= 6


def test_nothing_differs(counted):
    model, selection = made(Span(0, 5952), counted)
    model.theta = randn(5952).to(DEVICE)
    assert selection.select(model, model.theta.clone()).taken.offsets.numel() == 0
    empty, of_nothing = made(Span(0, 0), counted)
    empty.theta = torch.empty(0, device=DEVICE)
    assert of_nothing.select(empty, empty.theta).taken.offsets.numel() == 0


def test_what_has_arrived_is_added_to_an_image_by_one_launch(monkeypatch):
    kernels = DeviceKernels(DEVICE)
    monkeypatch.setattr(topk, "device_kernels", lambda _: kernels)
    image, offsets, values = randn(9000).to("meta"), torch.arange(0, 9000, 3), randn(3000, 2)
    calls = []
    monkeypatch.setattr(kernels, "scatter", lambda *a, **kw: calls.append((a, kw)))
    add_at(image, offsets, values)
    ((targets, counts, where, sent), kwargs), *rest = calls
    assert rest == []
    assert kwargs == {"adds": True}
    assert counts.tolist() == [3000]
    assert targets["address"] == targets["master"]
    np.testing.assert_array_equal(where, offsets.numpy())
    np.testing.assert_array_equal(sent, values.numpy())
