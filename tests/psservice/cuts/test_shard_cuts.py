"""A shard's part of a cut answers with the values at the cut, from any version, whatever is pushed meanwhile."""

import itertools
import json
import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.digest import ModelDigest
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.codecs.names import READABLE_INDEX_CODECS
from pscore.wire.errors import ErrorCode
from pscore.wire.frames import WireForm
from psservice.cuts.shadow import Shadow
from psservice.cuts.shard_cut import Held, ReaderForm, ShardCut
from psservice.durability.capture import shard_kind
from psservice.model import copies
from psservice.model.training_mode import TrainingMode
from psservice.replies import exact_reply
from psservice.rules.base import PushContext
from psservice.settings import ShardSettings
from tests.psservice.service_makers import BF16, F16, F32, bits, layout_of, segments_of
from tests.psservice.shard_makers import reason_of
from tests.tiers import examples

FORM = ReaderForm(WireForm())
CODECS = WireForm(allowed=frozenset(READABLE_INDEX_CODECS))
LAYOUT = layout_of(((20, 30), F32), (41, BF16), (300, F32), (7, F16))
METHODS = {
    "subtract": {},
    "rmsprop": {
        "update": "rmsprop",
        "optimizer": json.dumps({"name": "RMSprop", "options": {"lr": 0.1, "alpha": 0.5}}),
    },
    "adam": {"update": "torch", "optimizer": json.dumps({"name": "Adam", "options": {"lr": 0.1}})},
    "rounds": {"rounds": json.dumps({"quorum": 2, "seconds": 0, "start_workers": 1})},
    "groups": {"update": "average", "group_size": "2", "tau": "3", "late": "replace"},
}


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """Watch tensors that are otherwise copied at once."""
    monkeypatch.setattr(copies, "_SMALL", 1)


def model_of(method, num_shards=1, index=0, ledger_multiple=10.0):
    mode = TrainingMode.of(METHODS[method])
    span = LAYOUT.shard_spans(num_shards)[index]
    model = shard_kind(mode)(
        LAYOUT,
        span,
        torch.randn(span.length, generator=torch.Generator().manual_seed(1)),
        generation=1,
        version=0,
        settings=ShardSettings(ledger_multiple),
        mode=mode,
    )
    if method == "groups":
        for worker in "ab":
            model.decide("enter", worker, "1")
    return model


def push(model, density, draw, steps):
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    size, offsets = model.span.length, None
    if density < 1:
        offsets = (torch.rand(size, generator=generator) < density).nonzero().view(-1)
    values = torch.randn(size if offsets is None else offsets.numel(), generator=generator) * 0.1
    update = SparseSlice(model.span, offsets, values) if values.numel() else None
    worker = draw.choice("ab")
    steps[worker] = steps.get(worker, 0) + 1
    model.take(worker, update, PushContext(0, 0.1, 1), steps[worker])
    if model.mode.rounds is not None and model.round.is_due(["a", "b"], ["a", "b"], is_first=False):
        model.close_round()


TYPES = (None, torch.bfloat16, torch.float16)


def rounded(model, dtype=None):
    """The values as readers of a type have them, in fp32."""
    values = model.rounded(model.current())
    for each, run in model.layout.viewed_in(dtype).dtype_runs(model.span):
        there = values[run.start - model.span.start : run.end - model.span.start]
        there.copy_(there.to(each))
    return values


class Here:
    """Runs the apply thread's jobs at once."""

    def run(self, job):
        return job()


def cut_of(shadow, number):
    shadow.advance()
    return ShardCut(number, shadow, "", {}, 0.0), rounded(shadow.model)


def cut_for_all(shadow, number):
    """A cut for readers of every type, and the values that each has then."""
    shadow.advance(TYPES)
    return ShardCut(number, shadow, "", {}, 0.0, TYPES), {dtype: rounded(shadow.model, dtype) for dtype in TYPES}


def digest_of(model, values, dtype=None):
    digest = ModelDigest(model.layout.viewed_in(dtype))
    digest.add(SparseSlice(model.span, None, values))
    return digest.value


def written(model, values, reply, dtype=None):
    """Return what a reader has after a reply, whose residues it completes from what it had."""
    had, values = values, values.clone()

    def own(span, offsets):
        there = had[span.start - model.span.start : span.end - model.span.start]
        ((type_here, _),) = model.layout.viewed_in(dtype).dtype_runs(span)
        return (there if offsets is None else there[torch.from_numpy(offsets)]).to(type_here)

    for segment in segments_of(reply, model.span, own):
        first = segment.span.start - model.span.start
        where = slice(first, first + segment.span.length) if segment.offsets is None else segment.offsets + first
        values[where] = segment.values.float()
    return values


@pytest.mark.parametrize("method", METHODS)
@given(
    st.lists(st.sampled_from([0.0, 0.01, 0.1, 1.0]) | st.sampled_from(["cut", "copy"]), max_size=16),
    st.integers(1, 2),
    st.sampled_from([0.05, 10.0]),
    st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=examples(10))  # of each method
def test_from_any_version_a_reader_gets_the_values_at_the_cut(method, events, num_shards, ledger_multiple, seed):
    draw, steps, others = random.Random(seed), {}, []
    model = model_of(method, num_shards, num_shards - 1, ledger_multiple)
    shadow = Shadow(model, Here())
    cuts = [cut_for_all(shadow, 1)]
    for event in events:
        if event == "cut":
            cuts.append(cut_for_all(shadow, len(cuts) + 1))
            if draw.random() < 0.5 and model.versions_name_values:
                tracked = draw.choice(cuts)[0]
                shadow.track(tracked.version, tracked.values)
        elif event == "copy":
            others.append(model.open_values())
        else:
            push(model, event, draw, steps)
    kept = {cut.version: cut.values for cut, _ in cuts[-draw.randint(1, 3) :]}
    for (cut, now), dtype in itertools.product(cuts, TYPES):
        values, form = now[dtype], ReaderForm(WireForm(), dtype, draw.random() < 0.5)
        find = kept.get if draw.random() < 0.5 else no_values
        assert cut.views[dtype].digest == digest_of(model, values, dtype)
        for earlier, then in cuts:
            had = then[dtype]
            if earlier.version > cut.version:
                held = [Held(model.span, earlier.version)]
                assert reason_of(cut.reply, held, form, 64, lambda nbytes: None) is ErrorCode.VERSION_IN_FUTURE
                continue
            border = draw.randint(model.span.start + 1, model.span.end - 1)
            parts = Span(model.span.start, border), Span(border, model.span.end)
            have = torch.cat([had[: border - model.span.start], torch.full((parts[1].length,), 7.0)])
            for held, base in (
                ([Held(model.span, earlier.version)], had),
                ([Held(model.span, None)], torch.full_like(had, 7.0)),
                ([Held(parts[0], earlier.version), Held(parts[1], None)], have),
                (
                    [Held(parts[0], cut.version), Held(parts[1], earlier.version)],
                    torch.cat([values[: parts[0].length], had[parts[0].length :]]),
                ),
            ):
                reply = cut.reply(held, form, 64, lambda nbytes: None, find)
                assert bits(written(model, base, reply, dtype)) == bits(values)
    for copy in others:
        copy.close()


def no_values(version):
    return None


def test_a_reader_that_is_far_behind_gets_few_bytes_if_its_version_is_tracked():
    """Weights that go to and fro, as in training at a small rate."""
    layout = layout_of((1 << 14, F32))
    generator = torch.Generator().manual_seed(0)
    model = shard_kind(TrainingMode.of({}))(
        layout,
        Span(0, layout.size),
        torch.randn(layout.size, generator=generator) * 0.02,
        generation=1,
        version=0,
        settings=ShardSettings(10.0),
        mode=TrainingMode.of({}),
    )
    shadow = Shadow(model, Here())
    form = {residues: ReaderForm(CODECS, torch.bfloat16, residues) for residues in (False, True)}

    def cut(number):
        shadow.advance([torch.bfloat16])
        return ShardCut(number, shadow, "", {}, 0.0, [torch.bfloat16])

    def nbytes(reply):
        return sum(map(len, reply.messages))

    first, dense = cut(0), 2 * layout.size
    had = rounded(model, torch.bfloat16)
    for step in range(1, 65):
        values = torch.randn(layout.size, generator=generator).clamp_(-3, 3) * 1e-6
        model.take("a", SparseSlice(model.span, None, values), PushContext(0, 0.1, 1), step)
        last = cut(step)
        if step == 3:
            untracked = last.reply([Held(model.span, 0)], form[False], 1 << 20, lambda nbytes: None)
            assert nbytes(untracked) < 0.12 * dense
            shadow.track(0, first.values)
    for residues, most in ((True, 0.09), (False, 0.24)):
        reply = last.reply([Held(model.span, 0)], form[residues], 1 << 20, lambda nbytes: None)
        assert nbytes(reply) < most * dense
        assert bits(written(model, had, reply, torch.bfloat16)) == bits(rounded(model, torch.bfloat16))


def test_readers_of_one_base_share_a_reply_and_dropped_cuts_keep_nothing():
    model, steps = model_of("subtract"), {}
    shadow = Shadow(model, Here())
    first, _ = cut_of(shadow, 1)
    push(model, 0.05, random.Random(0), steps)
    second, values = cut_of(shadow, 2)
    held, reserved = [Held(model.span, 0)], []
    replies = [second.reply(held, FORM, 64, reserved.append) for _ in range(3)]
    assert replies[0] is replies[1] is replies[2]
    assert len(reserved) == 1
    dense = second.reply([Held(model.span, None)], FORM, 64, reserved.append)
    push(model, 0.5, random.Random(1), steps)
    assert model.copies.nbytes == 0  # pushes keep nothing for readers
    shadow.advance()
    del first, second, replies
    assert shadow.nbytes > model.theta.nbytes  # for the reply of everything, which is read as it is sent
    assert bits(written(model, torch.zeros_like(values), dense)) == bits(values)
    del dense
    assert shadow.nbytes == model.theta.nbytes + 2 * LAYOUT.size  # and stamps


def test_pushes_that_come_while_a_shadow_is_brought_forward_are_in_it():
    model, steps = model_of("subtract"), {}
    shadow = Shadow(model, Here())
    draw = random.Random(0)
    for densities in ((0.05,), (0.05, 0.3), (1.0,), (0.01,)):
        push(model, 0.05, draw, steps)

        def meanwhile(densities=densities):
            for density in densities:
                push(model, density, draw, steps)

        real = exact_reply.gather

        def gather(changes, theta, real=real):
            found = real(changes, theta)
            meanwhile()  # after the values were read: the apply thread must be asked what has changed
            return found

        with mock.patch.object(exact_reply, "gather", iter_of(gather, real)):
            cut, values = cut_of(shadow, 1)
        assert cut.version == model.version
        reply = cut.reply([Held(model.span, None)], FORM, 64, lambda nbytes: None)
        assert bits(written(model, torch.zeros_like(values), reply)) == bits(values)
        assert cut.views[None].digest == digest_of(model, values)


def iter_of(first, *others):
    """Call these functions one after another; the last one from then on."""
    functions = [first, *others]

    def call(*arguments):
        return (functions.pop(0) if len(functions) > 1 else functions[0])(*arguments)

    return call


BAD_PARTS = {
    "none": [],
    "too short": [(0, 900, 0)],
    "beyond the end": [(0, 949, 0)],
    "a gap": [(0, 100, 0), (200, 948, 0)],
    "backwards": [(0, 500, 0), (500, 400, 0), (400, 948, 0)],
    "empty": [(0, 0, 0), (0, 948, 0)],
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_parts_that_do_not_cover_the_shard_are_refused(name):
    cut, _ = cut_of(Shadow(model_of("subtract"), Here()), 1)
    held = [Held(Span(start, end), version) for start, end, version in BAD_PARTS[name]]
    assert LAYOUT.size == 948
    assert reason_of(cut.reply, held, FORM, 64, lambda nbytes: None) is ErrorCode.BAD_REQUEST


def test_what_a_dense_reply_keeps_to_be_read_is_counted():
    model = model_of("subtract")
    shadow = Shadow(model, Here())
    cut_of(shadow, 0)
    push(model, 0.5, random.Random(0), {})
    cut, _ = cut_of(shadow, 1)
    middle, end = model.span.length // 2, model.span.end
    counted = []
    reply = cut.reply([Held(Span(0, middle), 0), Held(Span(middle, end), None)], FORM, 1 << 16, counted.append)
    assert reply.is_dense
    assert reply.nbytes == reply.messages.nbytes
    assert reply.nbytes > 0
    assert sum(counted) > reply.nbytes
