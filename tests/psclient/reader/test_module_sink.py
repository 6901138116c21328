"""A module that follows: written in place, undone after an error, refused if it is another model."""

import copy

import pytest
import torch
from torch import nn

from psclient.errors import ConfigurationError, RefusedError
from psclient.model.replica import Replica
from psclient.reader import module_sink
from psclient.reader.module_sink import ModuleSink
from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from tests.psclient.reader.sink_makers import (
    BF16,
    F16,
    F32,
    LAYOUT,
    SPAN,
    buffers_of,
    changed,
    read_all,
    staged_difference,
    staged_whole,
    values_of,
)


class Part(nn.Module):
    def __init__(self, rows, columns, dtype, *, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Part(6, 5, F32, bias=True)
        self.nothing = nn.Parameter(torch.zeros(0))
        self.b = Part(4, 6, BF16, bias=False)
        self.b.tied = self.b.weight
        self.c = nn.Parameter(torch.zeros((), dtype=F16))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))


def flat(module):
    named = dict(module.named_parameters())
    return torch.cat([named[spec.name].detach().float().reshape(-1) for spec in LAYOUT.parameters])


def opened(module=None, **options):
    module = Model() if module is None else module
    sink = ModuleSink(module, **options)
    assert sink.open(LAYOUT) is None
    return sink, module


def put(sink, staged):
    sink.stage(staged)
    sink.commit()
    return staged.cut


def test_cuts_are_written_in_place():
    sink, module = opened()
    pointers, values = [each.data_ptr() for each in module.parameters()], values_of(1)
    assert sink.open(LAYOUT) is None
    cut = put(sink, staged_whole(3, values, buffers_of(5)))
    assert torch.equal(flat(module), values)
    assert sink.open(LAYOUT) == cut
    after = changed(values, 2)
    cut = put(sink, staged_difference(sink, 4, values, after))
    assert torch.equal(flat(module), after)
    assert sink.open(LAYOUT) == cut
    assert torch.equal(read_all(sink), after)
    assert (module.mean.tolist(), int(module.count)) == ([5.0] * 3, 5)
    assert [each.data_ptr() for each in module.parameters()] == pointers
    assert all(each.requires_grad for each in module.parameters())


def test_nothing_is_seen_of_what_is_only_staged():
    sink, module = opened()
    values = values_of(1)
    put(sink, staged_whole(3, values))
    sink.stage(staged_difference(sink, 4, values, changed(values, 2)))
    sink.abort()
    assert torch.equal(flat(module), values)


@pytest.mark.parametrize("fails_at", ["parameters", "buffers"])
def test_a_commit_that_fails_is_undone(monkeypatch, fails_at):
    sink, module = opened()
    values = values_of(1)
    held = put(sink, staged_whole(3, values, buffers_of(5)))
    after = changed(values, 2)
    sink.stage(staged_difference(sink, 4, values, after, buffers_of(6)))
    real, calls = Replica.write, []

    def write(self, segments):
        real(self, [segment.clip(Span(0, SPAN.end // 2)) or segment for segment in segments])
        calls.append(segments)
        if len(calls) == 1 and fails_at == "parameters":
            raise MemoryError
        real(self, segments)

    def copy_buffers(buffers, values):
        calls.append(values)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
            if len(calls) == 2 and fails_at == "buffers":
                raise MemoryError

    monkeypatch.setattr(Replica, "write", write)
    monkeypatch.setattr(module_sink, "_write", copy_buffers)
    with pytest.raises(MemoryError):
        sink.commit()
    assert torch.equal(flat(module), values)
    assert (module.mean.tolist(), int(module.count)) == ([5.0] * 3, 5)
    assert sink.open(LAYOUT) == held


def test_a_first_commit_that_fails_leaves_no_cut(monkeypatch):
    sink, _ = opened()
    sink.stage(staged_whole(3, values_of(1)))

    def write(self, segments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "write", lambda self, segments: write(self, segments) if segments else None)
        with pytest.raises(MemoryError):
            sink.commit()
    assert sink.open(LAYOUT) is None


@pytest.mark.parametrize(("dtype", "wider"), [(F16, "bfloat16"), (BF16, "float32")])
def test_buffers_that_would_become_infinite_are_refused_before_anything_is_written(dtype, wider):
    sink, module = opened()
    values = values_of(1)
    held = put(sink, staged_whole(3, values, buffers_of(5)))
    module.mean = module.mean.to(dtype)
    sink.stage(staged_difference(sink, 4, values, changed(values, 2), [torch.full((3,), 3.4e38), torch.tensor(6)]))
    with pytest.raises(RefusedError, match=f"mean has values beyond .*: follow in {wider}"):
        sink.commit()
    assert torch.equal(flat(module), values)
    assert (module.mean.tolist(), int(module.count)) == ([5.0] * 3, 5)
    assert sink.open(LAYOUT) == held


def without(name):
    module = Model()
    parent, _, own = name.rpartition(".")
    delattr(module.get_submodule(parent), own)
    return module


def with_one_more():
    module = Model()
    module.more = nn.Parameter(torch.zeros(2))
    return module


def untied():
    module = Model()
    module.b.tied = nn.Parameter(torch.zeros(4, 6, dtype=BF16))
    return module


def of_other_dtype():
    module = Model()
    module.a.float().half()
    return module


def on_meta():
    return Model().to("meta")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: without("a.bias"), "has no a.bias"),
        (lambda: without("mean"), "has no mean"),
        (with_one_more, "no parameter more"),
        (untied, "tie the two"),
        (of_other_dtype, r"float16, and the run a\.weight \[6, 5\] float32"),
        (on_meta, "to_empty"),
    ],
)
def test_another_model_is_refused_by_name(make, words):
    with pytest.raises(ConfigurationError, match=words):
        ModuleSink(make()).open(LAYOUT)


def test_names_may_differ_and_wrappers_do_not_count():
    inner = Model()
    wrapped = nn.Module()
    wrapped.model = inner
    sink, _ = opened(wrapped, rename=lambda name: f"model.{name}")
    put(sink, staged_whole(1, values_of(1)))
    assert torch.equal(flat(inner), values_of(1))
    compiled = torch.compile(copy.deepcopy(inner))
    sink, _ = opened(compiled)
    put(sink, staged_whole(1, values_of(2)))
    assert torch.equal(flat(compiled._orig_mod), values_of(2))


def test_tensors_that_are_not_contiguous_are_read_and_written():
    layout = ModelLayout((TensorSpec("weight", (6, 4), F32),))
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(24.0).reshape(4, 6).t())
    sink = ModuleSink(module)
    sink.open(layout)
    places = torch.tensor([0, 1, 7, 23])
    entries = SparseSlice(Span(0, 24), places, torch.zeros(4))
    assert torch.equal(sink.read(entries).values, module.weight.detach().reshape(-1)[places])
