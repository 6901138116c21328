"""Exact replies: after a pull the replica equals the server's parameters, cast to their dtypes, bit for bit."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from psservice.model.changelog import gather
from psservice.replies.exact_reply import ExactReplies
from psservice.replies.reply_session import ReplyMode
from tests.pscore.loop_makers import FORMS, run_as
from tests.psservice.service_makers import (
    BF16,
    F16,
    F32,
    Link,
    Rule,
    bits,
    layout_of,
    new_replica,
    replica_bits,
    server_bits,
    shard_of,
    sparse_push,
    writing,
)
from tests.tiers import examples

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
@settings(deadline=None, max_examples=examples(15))
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
    with writing() as writer:
        link = linked(writer)
        link.pull()
        model, late = link.model, [SparseSlice(link.model.span, torch.tensor([7, 50]), torch.ones(2))]
        model.apply(SparseSlice(model.span, torch.tensor([3, 7]), torch.ones(2)))

        def late_gather(changes, theta):
            found = gather(changes, theta)
            while late:
                model.apply(late.pop())
            return found

        with mock.patch("psservice.replies.exact_reply.gather", late_gather):
            wire = link.pull()
        assert wire.version == 2
        assert link.entries(wire) == 3
        assert replica_bits(link.replica, model.span) == server_bits(model)


def test_the_apply_thread_is_not_asked_if_nothing_has_changed_while_the_values_were_read():
    class Asked:
        """Refuses every job."""

        def run(self, job):
            raise AssertionError

    with writing() as writer:
        link = linked(writer)
        link.pull()
        link.writer = Asked()
        link.model.apply(SparseSlice(link.model.span, torch.tensor([3, 7]), torch.ones(2)))
        assert link.pull().version == 1
        link.model.changes += 1  # a push that is being applied
        with pytest.raises(AssertionError):
            link.pull()


late_pushes = st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0, "dense"]), max_size=3)


@pytest.mark.long
@given(
    asked=st.lists(st.sampled_from([0.02, 0.3]), max_size=3),
    while_reading=late_pushes,
    before_the_version=late_pushes,
    base=st.sampled_from(["known", "none", "cut"]),
    image=st.booleans(),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=examples(150))
def test_pushes_while_the_values_are_read_are_part_of_the_reply(
    asked, while_reading, before_the_version, base, image, form, seed
):
    layout = LAYOUTS["mixed" if seed % 2 else "fp32"]
    model = shard_of(layout, torch.randn(layout.size, generator=torch.Generator().manual_seed(seed)))
    number, history, jobs = itertools.count(seed), {}, []

    def note():
        history[model.version] = server_bits(model), bits(model.rounded(model.theta.clone()))

    def apply(densities):
        while densities:
            density = densities.pop()
            if density == "dense":
                model.apply(SparseSlice(model.span, None, torch.randn(model.span.length)))
            else:
                model.apply(sparse_push(model.span, density, next(number)))
            note()

    class Writer:
        def run(self, job):
            apply(before_the_version)
            jobs.append(job)
            try:
                return job()
            finally:
                jobs.remove(job)

    def slow_gather(changes, theta):
        found = gather(changes, theta)
        if jobs:
            return found
        apply(while_reading)
        if found is None or not found[0].numel():
            return found
        return found[0], torch.cat([found[1][:1], theta[found[0][1:]]])  # all but one are read later

    link = Link(model, Writer(), new_replica(layout), rule=Rule(topk=False))
    note()
    late, before_the_version = before_the_version, []
    link.pull()
    apply(asked)
    before_the_version, asked_at, end = late, model.version, 0
    link.rule.topk = image
    if base == "none":
        link.base = None
    elif base == "cut":  # the replica has nothing behind
        end = 5
        for position, parameter in enumerate(link.replica.parameters):
            parameter.view(-1)[max(0, end - layout.offsets[position]) :] = 7.0
    with (
        mock.patch("psservice.replies.exact_reply.gather", slow_gather),
        run_as(form),
    ):
        wire = link.ask(base_end=end)
    link.receive(wire)
    assert wire.version >= asked_at
    assert wire.image == image
    assert replica_bits(link.replica, model.span) == history[wire.version][0]
    if image:
        assert bits(link.downlink.pending.image) == history[wire.version][1]


@pytest.mark.long
def test_replies_are_whole_versions_while_pushes_are_applied():
    """With compiled loops, and two workers that share replies."""
    layout = layout_of((60_000, F32), (1_000, BF16))
    model, history = shard_of(layout, torch.randn(layout.size)), {}
    with writing() as writer:

        def apply(seed):
            def job():
                version = model.apply(sparse_push(model.span, 0.2, seed))
                history[version] = server_bits(model)

            writer.run(job)

        links = [Link(model, writer, new_replica(layout)) for _ in range(2)]
        history[0] = server_bits(model)
        ended = threading.Event()

        def pull(link):
            seen = 0
            while not ended.is_set():
                wire = link.pull()
                writer.run(lambda: None)  # the job that has made this version has noted it
                assert replica_bits(link.replica, model.span) == history[wire.version]
                seen += 1
            return seen

        with ThreadPoolExecutor(2) as pool:
            pulls = [pool.submit(pull, link) for link in links]
            for seed in range(150):
                apply(seed)
            ended.set()
            assert all(each.result() for each in pulls)


def test_signed_zeros_arrive_as_they_are():
    with writing() as writer:
        link = linked(writer)
        link.pull()
        link.model.theta.fill_(-0.0)
        link.model.apply(SparseSlice(link.model.span, torch.tensor([1, 2]), torch.tensor([-0.0, 0.0])))
        link.base = None
        link.pull()
        assert replica_bits(link.replica, link.model.span) == server_bits(link.model)


def test_two_dense_replies_occupy_what_pushes_overwrite_and_nothing_once_they_are_sent():
    """Each is the model at its version, however slowly it is read, and no room for all of it is asked for."""
    size = 10_000
    layout = layout_of((size, F32))
    model = shard_of(layout, torch.randn(size, generator=torch.Generator().manual_seed(5)))
    form = WireForm(allowed=frozenset(), link_bytes_per_second=1.0)  # messages of one chunk

    def refuse(nbytes):
        raise Rejected(ErrorCode.BUSY, f"{nbytes} bytes")

    with writing() as writer:
        exact = ExactReplies(model, writer, 4096, refuse)
        expected, begun, readers = [], [], []
        for _ in range(2):
            expected.append(b"".join(exact.since(None, model.span, form).messages))
            readers.append(iter(exact.since(None, model.span, form).messages))
            begun.append(next(readers[-1]))
            writer.run(lambda: model.apply(SparseSlice(model.span, None, torch.ones(size))))
        assert model.copies.nbytes == 2 * 4 * size
        assert [head + b"".join(rest) for head, rest in zip(begun, readers, strict=True)] == expected
        assert expected[0] != expected[1]
        assert model.copies.nbytes == 0
