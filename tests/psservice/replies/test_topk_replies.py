"""Top-k replies: the server's image and the worker's fp32 replica are equal bit for bit, whatever is lost."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SELECTORS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.apply_thread import ApplyThread
from psservice.memory_budget import MemoryBudget
from psservice.replies.reply_mode import ReplyRule
from psservice.replies.reply_session import ReplyMode, ReplySession
from psservice.replies.topk import TopKSettings
from tests.psservice.service_makers import (
    BF16,
    F16,
    F32,
    Link,
    Rule,
    bits,
    fp32_bits,
    layout_of,
    new_replica,
    replica_bits,
    server_bits,
    shard_of,
    sparse_push,
    topk,
    writing,
)
from tests.tiers import examples

LAYOUTS = [layout_of((9, F32), (12, F32)), layout_of((5, F32), (7, BF16), (9, F16), (1, F32)), layout_of((1, BF16))]


class TopKWorker(RuleBasedStateMachine):
    """One worker and one shard; replies get lost, are repeated and disowned, and the mode is switched at any time."""

    def __init__(self):
        super().__init__()
        self.writer = ApplyThread()
        self.owed = None  # the bytes that a repeated question must get again

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        num_shards=st.sampled_from([1, 2]),
        seed=st.integers(0, 2**16),
        dense_below=st.sampled_from([0, 6]),
    )
    def start(self, layout, num_shards, seed, dense_below):
        torch.manual_seed(seed)
        model = shard_of(layout, torch.randn(layout.size), num_shards=num_shards, index=num_shards - 1)
        self.link = Link(model, self.writer, new_replica(layout), topk(0.2, dense_below), Rule(topk=True))

    def teardown(self):
        self.writer.close()

    def ask(self, **options):
        link = self.link
        wire = link.ask(**options)
        if link.downlink.image is not None:
            assert link.image
            assert bits(link.downlink.image) == fp32_bits(link.replica, link.model.span)
        changes_image = wire.mode is ReplyMode.TOPK or (link.downlink.image is not None and not wire.image)
        return wire, changes_image

    def deliver(self, wire):
        link = self.link
        link.receive(wire)
        self.owed = None
        if wire.mode is ReplyMode.EXACT:
            assert replica_bits(link.replica, link.model.span) == server_bits(link.model)

    @rule(density=st.sampled_from([0.05, 0.3, 1.0]), seed=st.integers(0, 2**16))
    def push(self, density, seed):
        self.link.model.apply(sparse_push(self.link.model.span, density, seed))

    @rule()
    def pull(self):
        wire, _ = self.ask()
        repeated = self.owed is not None
        if repeated:
            assert wire == self.owed
        if repeated and wire.mode is ReplyMode.EXACT:  # closes the image at the version of the first asking
            self.link.receive(wire)
            self.owed = None
            return
        self.deliver(wire)

    @rule()
    def pull_whose_reply_is_lost(self):
        wire, changes_image = self.ask()
        if self.owed is not None:
            assert wire == self.owed, "a repeated question gets the same bytes"
        self.owed = wire if changes_image else None

    @rule(number=st.integers(1, 2**60))
    def pull_with_a_bad_acknowledgement(self, number):
        link = self.link
        if number in (link.acknowledged, link.downlink.number):
            return
        wire, _ = self.ask(acknowledged=number)
        assert wire.mode is ReplyMode.EXACT
        assert link.downlink.image is None
        if link.image:
            assert link.entries(wire) == link.model.span.length
        self.deliver(wire)

    @rule()
    def the_server_forgets_the_worker(self):
        self.link.downlink = ReplySession(self.link.rule)
        self.owed = None
        wire, _ = self.ask()
        assert wire.mode is ReplyMode.EXACT
        if self.link.image or self.link.base is None:
            assert self.link.entries(wire) == self.link.model.span.length
        self.deliver(wire)

    @rule(wanted=st.booleans())
    def the_run_changes_its_mode(self, wanted):
        self.link.rule.topk = wanted

    @rule(
        density=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        value=st.sampled_from([pb.VALUE_CODEC_INT4, pb.VALUE_CODEC_FP32]),
    )
    def the_worker_names_another_form(self, density, value):
        self.link.topk = topk(0.2, 0).asked(density, value)

    @rule()
    def leave_top_k_mode(self):
        self.link.rule.topk = False
        for _ in range(3):  # whatever is owed still, the exact reply that ends the image, one more
            self.link.receive(self.ask()[0])
        self.owed = None
        assert self.link.downlink.image is None
        assert self.link.downlink.pending is None
        assert replica_bits(self.link.replica, self.link.model.span) == server_bits(self.link.model)

    @invariant()
    def exact_mode_keeps_nothing(self):
        if hasattr(self, "link") and not self.link.image and self.link.downlink.pending is None:
            assert self.link.downlink.image is None


TestTopKWorker = pytest.mark.long(TopKWorker.TestCase)
TestTopKWorker.settings = settings(deadline=None, max_examples=examples(120), stateful_step_count=25)


@pytest.fixture
def link():
    writer = ApplyThread()
    layout = layout_of((60, F32), (40, BF16))
    model = shard_of(layout, torch.randn(layout.size))
    yield Link(model, writer, new_replica(layout), topk(0.1), Rule(topk=True))
    writer.close()


def test_the_first_pull_is_exact_and_proposes_an_image(link):
    wire = link.pull()
    assert (wire.mode, wire.image) == (ReplyMode.EXACT, True)
    assert link.downlink.image is None, "nothing is kept before the worker has said that it has the reply"
    assert link.pull().mode is ReplyMode.TOPK
    assert link.downlink.image is not None


def test_a_proposal_that_is_lost_is_forgotten_and_made_anew(link):
    lost = link.ask()
    link.model.apply(sparse_push(link.model.span, 0.5, 1))
    again = link.ask()
    assert (again.mode, again.image, again.version) == (ReplyMode.EXACT, True, lost.version + 1)
    assert again.number != lost.number
    link.receive(again)
    assert link.pull().mode is ReplyMode.TOPK


def test_a_worker_that_has_lost_its_replica_frees_the_image(link):
    link.pull()
    link.pull()
    link.rule.topk = False
    link.base, link.acknowledged, link.image = None, 0, False
    wire = link.pull()
    assert link.entries(wire) == link.model.span.length
    assert link.downlink.image is None
    assert link.downlink.pending is None


def test_a_top_k_reply_holds_the_largest_differences_of_each_tensor(link):
    link.pull()
    link.model.apply(SparseSlice(link.model.span, None, torch.randn(100)))
    wire = link.ask()
    difference = link.model.theta - link.downlink.image
    assert link.entries(wire) == 6 + 4
    link.receive(wire)
    left = (link.model.theta - torch.cat([link.replica.parameters[0], link.replica._fp32[1]])).abs()
    for low, high, k in ((0, 60, 6), (60, 100, 4)):
        top = difference[low:high].abs().topk(k).indices
        assert bool((left[low:high][top] <= 1e-6).all())


def test_without_pushes_top_k_pulls_reach_the_server(link):
    link.pull()
    for seed in range(5):
        link.model.apply(sparse_push(link.model.span, 1.0, seed))
    for _ in range(12):
        link.pull()
    assert link.entries(link.ask()) <= 10
    torch.testing.assert_close(link.replica.parameters[0], link.model.theta[:60], rtol=1e-6, atol=1e-6)


class Refusal:
    """Refuses one reservation of this size, or of any."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.left = nbytes, 1

    def __call__(self, nbytes: int) -> None:
        if self.left and nbytes == self.nbytes:
            self.left = 0
            raise Rejected(ErrorCode.BUSY, "the budget is full", retry_seconds=1.0)


@pytest.mark.parametrize("reason", ["BUSY", "NON_FINITE"])
def test_a_reply_that_is_refused_after_its_selection_loses_nothing(reason):
    size, few = 20_000, torch.tensor
    layout = layout_of((size, F32))
    density, value = (1.0, pb.VALUE_CODEC_FP32) if reason == "BUSY" else (0.01, pb.VALUE_CODEC_INT4)
    settings = TopKSettings(density, 0, SELECTORS["warm"], value, 1 << 20)
    with writing() as writer:
        model = shard_of(layout, torch.zeros(size))
        link = Link(model, writer, new_replica(layout), settings, Rule(topk=True))
        model.apply(SparseSlice(model.span, few([19_000]), few([3e38])))
        for _ in range(3):  # the proposal, a search of everything, and one of what has changed
            link.pull()
        model.apply(SparseSlice(model.span, few([7]), few([5.0])))
        if reason == "BUSY":
            link.reserve = Refusal(12 * size)
        else:
            model.apply(SparseSlice(model.span, few([19_000]), few([-3e38])))
            model.apply(SparseSlice(model.span, few([19_000]), few([-3e38])))  # the difference leaves the range of fp32
        with pytest.raises(Rejected) as refused:
            link.pull()
        assert refused.value.reason is ErrorCode[reason]
        if reason == "NON_FINITE":
            model.apply(SparseSlice(model.span, few([19_000]), few([3e38])))
        for step in range(40):
            model.apply(SparseSlice(model.span, few([9 + step]), few([1.0])))
            link.pull()
        assert link.replica.parameters[0][7].item() == pytest.approx(-5.0)


def test_a_reply_that_proposes_an_image_is_freed_when_it_is_sent(link):
    reply = link.reply()
    assert reply.image
    assert list(reply.messages)
    sent = weakref.ref(reply.messages)
    del reply
    link.model.apply(sparse_push(link.model.span, 0.5, 1))  # other workers share it until then
    gc.collect()
    assert sent() is None
    assert link.downlink.pending is not None


@pytest.mark.parametrize("has_room", [True, False])
def test_a_reply_that_ends_an_image_is_counted_while_it_is_kept(link, has_room):
    link.topk = replace(link.topk, memory=MemoryBudget(2 * (5_000 if has_room else 700)))
    link.pull()
    link.pull()
    opened = link.topk.memory.images
    assert opened > 0
    link.model.apply(SparseSlice(link.model.span, None, torch.randn(100)))
    link.rule.topk = False
    wire = link.ask()
    assert (wire.mode, wire.image) == (ReplyMode.EXACT, False)
    if has_room:
        assert link.topk.memory.images >= opened + sum(map(len, wire.chunks))
        assert link.ask() == wire, "it is kept to be repeated"
    else:
        assert link.downlink.pending is None
    link.receive(link.ask())
    link.pull()
    gc.collect()
    assert link.topk.memory.images == 0
    assert replica_bits(link.replica, link.model.span) == server_bits(link.model)


def test_a_lost_reply_is_repeated_byte_for_byte_though_the_server_moved_on(link):
    link.pull()
    link.pull()
    lost = link.ask()
    link.model.apply(sparse_push(link.model.span, 0.5, 3))
    assert link.ask() == lost
    link.receive(lost)
    assert link.ask() != lost
    assert bits(link.downlink.image) == fp32_bits(link.replica, link.model.span)


def test_reply_numbers_do_not_start_where_a_former_life_of_the_server_did(link):
    assert link.pull().number != Link(link.model, link.writer, new_replica(link.model.layout)).ask().number


def test_closing_the_image_restores_signed_zeros_too(link):
    link.model.theta.fill_(-0.0)
    link.pull()
    link.pull()
    for value in (1.0, -1.0):  # −0 − 1 + 1 = +0, a difference of nothing but the sign
        link.model.apply(SparseSlice(link.model.span, torch.tensor([3]), torch.tensor([value])))
    link.rule.topk = False
    link.pull()
    link.pull()
    assert replica_bits(link.replica, link.model.span) == server_bits(link.model)


def test_auto_leaves_dense_replies_where_a_fleet_outruns_the_ledger():
    """And not because of a base that was never there, or of dense pushes: then the way down may be dense."""
    layout, writer = layout_of((1000, F32)), ApplyThread()
    try:
        model = shard_of(layout, torch.zeros(1000))  # a ledger of as many entries
        link = Link(model, writer, new_replica(layout), topk(0.2, 0), ReplyRule("auto", 0.1))
        assert not link.pull().image, "no base"
        for seed in range(20):
            model.apply(sparse_push(model.span, 0.1, seed))
        wire = link.pull()
        assert (wire.mode, wire.image) == (ReplyMode.EXACT, True)
        model.apply(sparse_push(model.span, 0.1, 99))
        assert link.pull().mode is ReplyMode.TOPK
        assert bits(link.downlink.image) == fp32_bits(link.replica, model.span) or link.downlink.pending is not None
        dense = Link(
            shard_of(layout, torch.zeros(1000)), writer, new_replica(layout), topk(0.2, 0), ReplyRule("auto", 0.1)
        )
        dense.pull()
        for seed in range(20):
            dense.model.apply(sparse_push(dense.model.span, 1.0, seed))
        assert not dense.pull().image
    finally:
        writer.close()


def test_auto_stays_exact_for_a_worker_that_a_restart_has_left_behind():
    """The log began with the snapshot: that everything is sent says nothing of how much changes."""
    layout, writer = layout_of((1000, F32)), ApplyThread()
    try:
        model = shard_of(layout, torch.zeros(1000), version=7)
        link = Link(model, writer, new_replica(layout), topk(0.2, 0), ReplyRule("auto", 0.1))
        link.base = 6
        wire = link.pull()
        assert (wire.mode, wire.image, wire.density) == (ReplyMode.EXACT, False, 1.0)
        model.apply(sparse_push(model.span, 0.05, 1))
        assert link.pull().density < 0.1
    finally:
        writer.close()


def test_a_worker_names_the_density_and_the_values_of_its_replies(link):
    link.pull()
    link.model.apply(SparseSlice(link.model.span, None, torch.randn(100)))
    link.topk = topk(0.1).asked(0.5, pb.VALUE_CODEC_INT4)
    wire = link.pull()
    assert link.entries(wire) == 30 + 20
    assert {pb.Chunk.FromString(chunk).value_codec for chunk in wire.chunks} == {pb.VALUE_CODEC_INT4}
    link.topk = topk(0.1).asked(0.0, 0)
    assert link.entries(link.pull()) == 10, "the server's settings"


def test_a_reply_of_all_entries_is_written_without_places(link):
    link.pull()
    link.model.apply(SparseSlice(link.model.span, None, torch.randn(100)))
    link.topk = topk(0.1).asked(1.0, pb.VALUE_CODEC_INT8)
    wire = link.pull()
    assert {pb.Chunk.FromString(chunk).index_codec for chunk in wire.chunks} == {pb.INDEX_CODEC_DENSE}
    assert bits(link.downlink.image) != fp32_bits(link.replica, link.model.span), "not acknowledged yet"
    link.ask()
    assert bits(link.downlink.image) == fp32_bits(link.replica, link.model.span)


def test_a_value_codec_that_is_not_known_is_refused():
    with pytest.raises(Rejected) as refusal:
        topk().asked(0.1, 99)
    assert refusal.value.reason is ErrorCode.UNKNOWN_CODEC


def test_an_image_without_room_for_a_larger_reply_is_closed_by_an_exact_one(link):
    settings_ = replace(topk(0.1, 0), memory=MemoryBudget(2 * (4 * 100 + 24 * 20)))
    link.topk = settings_.asked(0.1, pb.VALUE_CODEC_FP32)
    link.pull()
    link.pull()
    assert settings_.memory.images > 0
    link.topk = settings_.asked(1.0, pb.VALUE_CODEC_FP32)
    link.model.apply(SparseSlice(link.model.span, None, torch.randn(100)))
    wire = link.pull()
    assert (wire.mode, wire.image) == (ReplyMode.EXACT, False)
    assert replica_bits(link.replica, link.model.span) == server_bits(link.model)
    link.rule.topk = False
    link.pull()
    assert settings_.memory.images == 0
