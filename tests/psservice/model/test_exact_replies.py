"""Exact replies: after a pull the replica equals the server's parameters, cast to their dtypes, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.reply_session import ReplyMode
from tests.psservice.service_makers import (
    BF16,
    F16,
    F32,
    Link,
    layout_of,
    new_replica,
    replica_bits,
    server_bits,
    shard_of,
    sparse_push,
    writing,
)

LAYOUTS = {
    "fp32": layout_of((40, F32), ((3, 5), F32)),
    "fp16": layout_of((40, F16), ((), F16)),
    "bf16": layout_of((40, BF16), ((2, 2, 2), BF16)),
    "mixed": layout_of((11, F32), (17, F16), ((0,), F32), (9, BF16), ((), F32), (8, BF16), (1, F16)),
}

# A schedule: pushes of some density, and pulls.
schedules = st.lists(st.sampled_from([0.02, 0.1, 0.5, 1.0]) | st.just("pull") | st.just("empty"), max_size=15)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("num_shards", [1, 2])
@given(schedule=schedules, seed=st.integers(0, 2**16), ledger_multiple=st.sampled_from([0.05, 1.0, 100.0]))
@settings(deadline=None, max_examples=15)
def test_an_exact_pull_makes_the_replica_bit_identical(kind, num_shards, schedule, seed, ledger_multiple):
    layout = LAYOUTS[kind]
    values = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    replica = new_replica(layout)
    with writing() as writer:
        shards = [
            shard_of(layout, values, num_shards=num_shards, index=i, ledger_multiple=ledger_multiple)
            for i in range(num_shards)
        ]
        links = [Link(shard, writer, replica) for shard in shards]
        for number, event in enumerate([*schedule, "pull"]):
            for link in links:
                if event == "pull":
                    wire = link.pull()
                    assert wire.version == link.model.version
                    assert replica_bits(replica, link.model.span) == server_bits(link.model)
                else:
                    push = None if event == "empty" else sparse_push(link.model.span, event, seed + number)
                    link.model.apply(push)


def linked(writer, layout=LAYOUTS["fp32"], **options):
    shard = shard_of(layout, torch.randn(layout.size), **options)
    return Link(shard, writer, new_replica(layout))


def test_the_same_question_may_be_asked_any_number_of_times():
    with writing() as writer:
        link = linked(writer)
        link.pull()
        link.model.apply(sparse_push(link.model.span, 0.3, 1))
        first, second = link.ask(), link.ask()
        assert first.chunks == second.chunks
        link.receive(first)
        link.receive(second)
        assert replica_bits(link.replica, link.model.span) == server_bits(link.model)
        assert link.downlink.image is None
        assert link.downlink.pending is None


def test_a_reply_holds_what_changed_and_nothing_else():
    with writing() as writer:
        link = linked(writer)
        link.pull()
        for offsets in ([3, 5], [5, 50], []):
            link.model.apply(SparseSlice(link.model.span, torch.tensor(offsets).long(), torch.ones(len(offsets))))
        wire = link.ask()
        assert link.entries(wire) == 3
        assert wire.density == 3 / link.model.span.length
        link.receive(wire)
        assert link.entries(link.ask()) == 0


@pytest.mark.parametrize("base", ["none", "too old"])
def test_without_a_base_that_the_ledger_reaches_the_reply_is_everything(base):
    with writing() as writer:
        link = linked(writer, ledger_multiple=0.1)
        if base == "too old":
            link.pull()
            for seed in range(20):
                link.model.apply(sparse_push(link.model.span, 0.1, seed))
            assert link.model.changelog.since(link.base) is None
        wire = link.pull()
        assert link.entries(wire) == link.model.span.length
        assert replica_bits(link.replica, link.model.span) == server_bits(link.model)


def test_a_version_ahead_of_the_server_is_refused():
    with writing() as writer:
        link = linked(writer, version=5)
        link.base = 6
        with pytest.raises(Rejected) as refused:
            link.ask()
        assert refused.value.reason is ErrorCode.VERSION_IN_FUTURE


def test_dense_pushes_are_answered_densely_and_exactly():
    with writing() as writer:
        link = linked(writer)
        link.pull()
        link.model.apply(SparseSlice(link.model.span, None, torch.randn(link.model.span.length)))
        wire = link.pull()
        assert wire.mode is ReplyMode.EXACT
        assert link.entries(wire) == link.model.span.length
        assert replica_bits(link.replica, link.model.span) == server_bits(link.model)


def test_a_push_between_the_question_and_the_reading_is_part_of_the_reply():
    class LateWriter:
        """Applies a push before the reply's job."""

        def run(self, job):
            model.apply(SparseSlice(model.span, torch.tensor([7, 50]), torch.ones(2)))
            return job()

    with writing() as writer:
        link = linked(writer)
        link.pull()
        model, link.writer = link.model, LateWriter()
        model.apply(SparseSlice(model.span, torch.tensor([3, 7]), torch.ones(2)))
        wire = link.pull()
        assert wire.version == 2
        assert link.entries(wire) == 3
        assert replica_bits(link.replica, model.span) == server_bits(model)


def test_signed_zeros_arrive_as_they_are():
    with writing() as writer:
        link = linked(writer)
        link.pull()
        link.model.theta.fill_(-0.0)
        link.model.apply(SparseSlice(link.model.span, torch.tensor([1, 2]), torch.tensor([-0.0, 0.0])))
        link.base = None
        link.pull()
        assert replica_bits(link.replica, link.model.span) == server_bits(link.model)
