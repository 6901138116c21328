"""Copies of a model's tensors at one version, while later versions are made."""

import json
import math
import random
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.sparse_slice import SparseSlice
from psservice.durability.capture import shard_kind
from psservice.model import copies
from psservice.model.copies import CopyOnWrite
from psservice.model.training_mode import TrainingMode
from psservice.rules.base import PushContext
from psservice.settings import ShardSettings
from tests.psservice.service_makers import F32, bits, cloned, layout_of
from tests.tiers import examples

LAYOUT = layout_of(((20, 30), F32), (41, F32))
SIZE = LAYOUT.size
METHODS = {
    "subtract": {},
    "rmsprop": {
        "update": "rmsprop",
        "optimizer": json.dumps({"name": "RMSprop", "options": {"lr": 0.1, "alpha": 0.5}}),
    },
    "nesterov": {
        "update": "delayed_nesterov",
        "optimizer": json.dumps({"name": "DelayedNesterov", "options": {"lr": 0.7, "momentum": 0.9, "every": 3}}),
    },
    "adam": {"update": "torch", "optimizer": json.dumps({"name": "Adam", "options": {"lr": 0.1}})},
    "adam, lazy": {"update": "torch", "lazy": "1", "optimizer": json.dumps({"name": "Adam", "options": {"lr": 0.1}})},
    "rounds": {"rounds": json.dumps({"quorum": 2, "seconds": 0, "start_workers": 1})},
    "compensated": {},
}


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """Watch tensors that are otherwise copied at once."""
    monkeypatch.setattr(copies, "_SMALL", 1)


def model_of(method):
    compensation = 0.04 if method == "compensated" else 0.0
    mode = TrainingMode.of(METHODS[method])
    return shard_kind(mode)(
        LAYOUT,
        LAYOUT.shard_spans(1)[0],
        torch.randn(SIZE, generator=torch.Generator().manual_seed(1)),
        generation=1,
        version=0,
        settings=ShardSettings(1.0, compensation),
        mode=mode,
    )


def push(model, density, draw):
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    offsets = None
    if density < 1:
        offsets = (torch.rand(SIZE, generator=generator) < density).nonzero().view(-1)
    values = torch.randn(SIZE if offsets is None else offsets.numel(), generator=generator)
    update = SparseSlice(model.span, offsets, values) if values.numel() else None
    model.take(draw.choice("ab"), update, PushContext(0, 0.1, 1))
    if model.mode.rounds is not None and model.round.is_due(["a", "b"], ["a", "b"], is_first=False):
        model.close_round()


def whole(copy):
    return bits(copy.read(0, math.prod(copy.shape)))


def opened(model):
    """Open a copy of everything; return it, and what it must be."""
    state, tensors = cloned(model.export()), model.export().tensors
    kept = {"theta": bits(model.theta)} | {name: bits(tensor) for name, tensor in state.tensors.items()}
    return {"theta": model.open_values(), **model.copies.open_all(tensors)}, kept


@pytest.mark.parametrize("method", METHODS)
@given(
    st.lists(st.sampled_from([0.002, 0.05, 0.5, 1.0]) | st.sampled_from(["open", "close"]), max_size=14),
    st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=examples(25))
def test_a_copy_is_the_state_at_its_version_whatever_is_pushed_meanwhile(method, events, seed):
    model, draw = model_of(method), random.Random(seed)
    for _ in range(19):  # an optimizer makes its state at the first step, and RMSprop scales its own at the 21st
        push(model, 0.1, draw)
    found = [opened(model)]
    for event in events:
        if event == "open":
            found.append(opened(model))
        elif event == "close":
            for copy in found.pop(draw.randrange(len(found)))[0].values() if found else ():
                copy.close()
        else:
            push(model, event, draw)
    for tensors, kept in found:
        assert {name: whole(copy) for name, copy in tensors.items()} == kept
        for copy in tensors.values():
            copy.close()
            copy.close()
    assert model.copies.nbytes == 0


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 300))), st.integers(0, 2**16))
@settings(deadline=None, max_examples=examples(50))
def test_a_copy_that_is_read_in_parts_is_the_tensor_as_it_was(steps, seed):
    generator, owner = torch.Generator().manual_seed(seed), CopyOnWrite()
    tensor = torch.randn(1000, generator=generator)
    before, parts, start = tensor.clone(), [], 0
    with closing(owner.open(tensor)) as copy:
        for density, size in [*steps, (0.0, 1000)]:
            offsets = (torch.rand(1000, generator=generator) < density).nonzero().view(-1)
            owner.overwrites(tensor, None if density == 1 else offsets)
            tensor[offsets] += 1
            if start < 1000:
                end = min(1000, start + size)
                parts.append(copy.read(start, end))
                copy.release(end)
                start = end
        assert torch.equal(torch.cat(parts), before[:start])


def test_nothing_is_kept_but_what_is_overwritten_and_still_read():
    tensor, owner = torch.zeros(1000), CopyOnWrite()
    copy = owner.open(tensor)
    assert owner.nbytes == 0
    for _ in range(3):  # each element once
        owner.overwrites(tensor, torch.arange(10, 20))
    marks = -(-1000 // 64) * 8
    assert owner.nbytes == marks + 10 * (4 + 4)
    other = owner.open(tensor)
    copy.release(900)
    other.release(900)
    owner.overwrites(tensor, None)
    assert owner.nbytes == 10 * (4 + 4) + 100 * 4
    copy.close()
    assert owner.nbytes == 100 * 4, "an older copy's values are not a newer one's"
    other.close()
    assert owner.nbytes == 0


def test_copies_that_nothing_changed_between_share_what_is_kept():
    tensor, owner = torch.zeros(1000), CopyOnWrite()
    opened = [owner.open(tensor) for _ in range(5)]
    owner.overwrites(tensor, None)
    assert owner.nbytes == 4000
    tensor += 1
    assert all(not copy.read(0, 1000).any() for copy in opened)


@given(st.lists(st.tuples(st.sampled_from(("sparse", "dense", "open", "close")), st.integers(0, 2**16)), max_size=40))
@settings(deadline=None)
def test_copies_that_come_and_go_are_the_tensor_as_it_was_and_keep_no_more_than_one_each(events):
    size = 5000  # more than are copied at once
    tensor, owner, opened = torch.randn(size), CopyOnWrite(), []
    for event, seed in events:
        if event == "open":
            opened.append((owner.open(tensor), tensor.clone()))
        elif event == "close" and opened:
            opened.pop(seed % len(opened))[0].close()
        elif event in ("sparse", "dense"):
            generator = torch.Generator().manual_seed(seed)
            offsets = (torch.rand(size, generator=generator) < 0.3).nonzero().view(-1)
            owner.overwrites(tensor, offsets if event == "sparse" else None)
            tensor[offsets if event == "sparse" else slice(None)] += 1
        for copy, before in opened:
            assert torch.equal(copy.read(0, size), before)
            assert torch.equal(copy.gather(torch.arange(0, size, 7)), before[::7])
        assert owner.nbytes <= (len(opened) + 1) * (12 * size + size // 8 + 8)
    for copy, _ in opened:
        copy.close()
    assert owner.nbytes == 0
