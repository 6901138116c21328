"""An engine that takes patches: by name and place, staged before one is applied, and whole again after a failure."""

import pytest
import torch

from psclient.reader.patch_sink import PatchSink, patches_of
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from tests.psclient.reader.sink_makers import (
    LAYOUT,
    SPAN,
    buffers_of,
    cut_of,
    staged_difference,
    staged_whole,
    values_of,
)


class Engine:
    """Applies patches to tensors of its own; ``fails`` in the middle of a commit."""

    def __init__(self):
        self.tensors = {
            spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in LAYOUT.parameters + LAYOUT.buffers
        }
        self.staged, self.cuts, self.fails = [], [], False

    def stage(self, cut, patches):
        self.staged = list(patches)

    def commit(self, cut):
        for number, patch in enumerate(self.staged):
            if self.fails and number:
                raise RuntimeError("the engine is asleep")
            if patch.indices is None:
                self.tensors[patch.name].copy_(patch.values)
            else:
                self.tensors[patch.name].view(-1)[patch.indices] = patch.values
        self.cuts.append(cut.version)

    def abort(self):
        self.staged = []

    def flat(self):
        return torch.cat([self.tensors[spec.name].float().reshape(-1) for spec in LAYOUT.parameters])


def put(sink, staged):
    sink.stage(staged)
    sink.commit()


def difference(sink, version, before, values, buffers=None):
    staged = staged_difference(
        type("Unread", (), {"read": lambda self, entries: entries})(), version, before, values, buffers
    )
    put(sink, staged)


def test_patches_name_tensors_and_places():
    engine = Engine()
    sink = PatchSink(engine)
    assert sink.open(LAYOUT) is None
    put(sink, staged_whole(1, values_of(1), buffers_of(3)))
    assert all(patch.indices is None for patch in engine.staged)
    assert torch.equal(engine.flat(), values_of(1))
    assert int(engine.tensors["count"]) == 3
    after = values_of(1).clone()
    after[[3, 40]] += 1
    difference(sink, 2, values_of(1), after)
    assert [(patch.name, patch.indices.tolist(), patch.dtype) for patch in engine.staged] == [
        ("a.weight", [3], torch.float32),
        ("b.weight", [4], torch.bfloat16),
    ]
    assert torch.equal(engine.flat(), after)
    assert sink.open(LAYOUT) == cut_of(2, after)


def test_an_engine_that_fails_half_way_holds_nothing_until_all_was_sent_again():
    engine = Engine()
    sink = PatchSink(engine)
    sink.open(LAYOUT)
    put(sink, staged_whole(1, values_of(1)))
    engine.fails = True
    with pytest.raises(RuntimeError):
        put(sink, staged_whole(2, values_of(2)))
    assert sink.open(LAYOUT) is None
    engine.fails = False
    put(sink, staged_whole(2, values_of(2)))
    assert sink.open(LAYOUT) == cut_of(2, values_of(2))


def test_parts_of_a_tensor_become_one_patch():
    values = values_of(4)
    changes = [
        SparseSlice(Span(0, 4), None, values[:4]),
        SparseSlice(Span(4, SPAN.end), torch.tensor([0, 2]), values[[4, 6]]),
        SparseSlice(Span(30, 36), None, values[30:36]),
    ]
    weight, bias = patches_of(LAYOUT, changes)
    assert weight.indices.tolist() == [0, 1, 2, 3, 4, 6]
    assert torch.equal(weight.values, values[[0, 1, 2, 3, 4, 6]])
    assert bias.indices is None
    assert torch.equal(bias.values, values[30:36])
