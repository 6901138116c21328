"""Cuts over all shards: which are named, kept, and forgotten."""

import pytest
import torch

from pscore.reader.cut import ShardVersion
from pscore.wire.errors import ErrorCode
from psservice.cuts.cuts import Cuts
from psservice.shard.following import follow, news_of
from tests.psservice.feed_makers import changes, feeding, publish_at, stage, whole, words
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import Clock, push, reason_of, serving, serving_shards
from tests.system.tools import wait_until

LAYOUT = layout_of((9000, F32), (11, F32))
VALUES = torch.arange(LAYOUT.size, dtype=torch.float32)


@pytest.fixture
def no_thread(monkeypatch):
    """Have a test make its cuts itself, although readers ask."""
    monkeypatch.setattr(Cuts, "_begin_work", lambda cuts: None)


def make(shard):
    """Make a cut now, as the thread of cuts does."""
    shard.cuts.make_if_due()
    return shard.cuts.newest


def hear(shards):
    """Let the other shards follow shard 0, and shard 0 hear of their part."""
    for index, shard in enumerate(shards[1:], start=1):
        follow(shard, news_of(shards[0]))
        number, version = shard.cuts.own()
        if version is not None:
            shards[0].cuts.hear(index, number, version)
    return shards[0].cuts.newest


def versions(cut):
    return [shard.version for shard in cut.shards[None]]


def test_a_cut_is_made_when_the_model_has_moved_and_three_are_kept():
    with serving(LAYOUT, VALUES, cut_seconds=1e-9) as shard:
        first = make(shard)
        assert versions(first) == [0]
        assert make(shard) is first
        cuts = [first]
        for step in range(1, 6):
            push(shard, step, {step: 1.0})
            cuts.append(make(shard))
        assert [versions(cut) for cut in cuts] == [[0], [1], [2], [3], [4], [5]]
        for cut in cuts[:-3]:
            assert reason_of(shard.cuts.find, cut.shards[None][0]) is ErrorCode.NO_SUCH_CUT
        for cut in cuts[-3:]:
            kept = cut.shards[None][0]
            assert shard.cuts.find(kept).views[None].digest == kept.digest
            other = ShardVersion(kept.generation, kept.version, bytes(16))
            assert reason_of(shard.cuts.find, other) is ErrorCode.NO_SUCH_CUT


def test_the_interval_between_cuts_is_kept():
    with serving(LAYOUT, VALUES, cut_seconds=3.0) as shard:
        clock = shard.cuts._clock = Clock()
        first = make(shard)
        push(shard, 1, {1: 1.0})
        clock.now = 2.9
        assert make(shard) is first
        clock.now = 3.1
        assert versions(make(shard)) == [1]


def test_nothing_is_kept_for_readers_before_one_asks_and_after_the_last_has_gone():
    with serving(LAYOUT, VALUES, cut_seconds=0.01) as shard:
        push(shard, 1, {1: 1.0})
        assert shard.cuts.nbytes == 0
        clock = shard.cuts._clock = Clock()
        shard.cuts.ask()
        thread = shard.cuts._thread
        push(shard, 2, {1: 1.0})
        clock.now = 1e6
        thread.join()
        assert shard.cuts.newest is None
        assert shard.cuts.nbytes == 0
        assert shard.cuts.wanted.number == 0


def test_a_cut_of_several_shards_needs_all_of_them():
    with serving_shards(2, LAYOUT, VALUES, run_id="r", cut_seconds=1e-9) as shards:
        zero, other = shards
        clock = zero.cuts._clock = Clock()
        for shard in shards:
            push(shard, 1, {1: 1.0, 9001: 1.0})
        assert make(zero) is None
        cut = hear(shards)
        assert versions(cut) == [1, 1]
        for shard, version in zip(shards, cut.shards[None], strict=True):
            assert shard.cuts.find(version).views[None].digest == version.digest

        push(other, 2, {9001: 1.0})  # shard 0 has not moved
        clock.now = 6.0
        make(zero)
        assert versions(hear(shards)) == [1, 2]

        before = zero.cuts.newest
        push(zero, 2, {1: 1.0})
        clock.now = 7.0
        assert make(zero) is before  # nobody answers
        number = zero.cuts.wanted.number
        clock.now = 16.0
        assert make(zero) is before
        assert zero.cuts.wanted.number == number
        clock.now = 18.0
        make(zero)
        assert zero.cuts.wanted.number != number  # another one is tried
        assert versions(hear(shards)) == [2, 2]


def test_a_late_answer_of_a_shard_counts_for_no_other_cut():
    with serving_shards(2, LAYOUT, VALUES, run_id="r", cut_seconds=1e-9) as shards:
        zero, other = shards
        make(zero)
        first = hear(shards)
        number, version = other.cuts.own()
        assert number == first.number
        push(zero, 1, {1: 1.0})
        assert make(zero) is first
        zero.cuts.hear(1, number, version)
        assert zero.cuts.newest is first
        assert versions(hear(shards)) == [1, 0]


def test_another_model_ends_the_cuts_of_the_one_before():
    with serving(LAYOUT, VALUES, cut_seconds=1e-9) as shard:
        cut = make(shard).shards[None][0]
        shard.serve(shard.state)
        assert shard.cuts.newest is None
        assert reason_of(shard.cuts.find, cut) is ErrorCode.NO_SUCH_CUT
        assert make(shard).shards[None][0].version == cut.version


def test_the_last_reader_of_several_shards_frees_all_of_them():
    with serving_shards(2, LAYOUT, VALUES, run_id="r", cut_seconds=1e-9) as shards:
        zero, other = shards
        clock = zero.cuts._clock = Clock()
        with_readers = zero.cuts
        with_readers._asked_at = 0.0
        assert with_readers.keep_up()
        hear(shards)
        assert other.cuts.own()[0] == zero.cuts.newest.number
        clock.now = 1e6
        assert not with_readers.keep_up()
        hear(shards)
        assert other.cuts.own() == (0, None)
        for shard in shards:
            push(shard, 1, {1: 1.0, 9001: 1.0})
            assert shard.cuts.nbytes == 0


def test_the_version_of_a_reader_that_is_behind_is_tracked_until_it_moves_on():
    with serving(LAYOUT, VALUES, cut_seconds=1e-9) as shard:
        cuts = shard.cuts
        cuts.ask(torch.bfloat16)
        first = wait_for_cut(shard, 0)
        version = first.shards[torch.bfloat16][0]
        cuts.sent(cuts.find(version, torch.bfloat16), None)
        for step in range(1, 6):
            push(shard, step, {step: 1.0})
            wait_for_cut(shard, step)
        view = newest_view(shard)
        assert view.tracks.versions == (0,)
        offsets, _ = view.tracks.since(0, 5, view.stamps)
        assert [*offsets] == [1, 2, 3, 4, 5]
        kept = cuts.find(cuts.newest.shards[torch.bfloat16][0], torch.bfloat16)
        cuts.sent(kept, 0)
        push(shard, 6, {6: 1.0})
        wait_for_cut(shard, 6)
        assert newest_view(shard).tracks.versions == ()


def newest_view(shard):
    return shard.cuts.find(shard.cuts.newest.shards[torch.bfloat16][0], torch.bfloat16).views[torch.bfloat16]


def wait_for_cut(shard, version):
    """The newest cut once it is of a version, for readers of bfloat16; the thread of cuts makes it."""
    wait_until(lambda: shard.cuts.newest is not None and shard.cuts.newest.version == version)
    return shard.cuts.newest


def stage_everywhere(shards, step, base):
    for shard in shards:
        stage(shard, step, changes(shard.span, {step: step}), base)


def test_a_cut_of_a_feed_whose_shards_have_different_versions_is_never_named():
    with feeding(2, cut_seconds=1e-9) as shards:
        zero, other = shards
        clock = zero.cuts._clock = Clock()
        make(zero)
        first = hear(shards)
        assert versions(first) == [0, 0]
        stage_everywhere(shards, 1, 0)
        publish_at(zero, 1)
        make(zero)
        wanted, mine = zero.cuts.wanted, other.cuts.own()[1]
        zero.cuts.hear(1, wanted.number, mine)  # before the other shard has heard of the version
        assert zero.cuts.newest is first
        follow(other, news_of(zero))
        for _ in range(2):  # it is tried again at once
            clock.now += 1e-6
            make(zero)
            newest = hear(shards)
        assert versions(newest) == [1, 1]
        for shard, version in zip(shards, newest.shards[None], strict=True):
            assert shard.cuts.find(version).views[None].digest == version.digest


def test_a_cut_of_two_publications_of_one_number_is_never_named():
    """As after a restore of which one shard did not hear."""
    with feeding(2, cut_seconds=1e-9) as shards:
        zero, other = shards
        clock = zero.cuts._clock = Clock()
        make(zero)
        first = hear(shards)
        stage(zero, 1, changes(zero.span, {1: 1}), 0)
        publish_at(zero, 1)
        stage(other, 2, whole(other.span, words(5)), 0)
        other.apply_thread.run(other.model.publish)
        assert (zero.model.version, other.model.version) == (1, 1)
        for _ in range(3):
            clock.now += 1.0
            make(zero)
            assert hear(shards) is first
        for shard in shards:
            stage(shard, 3, whole(shard.span, words(6)), 1)
        publish_at(zero, 2)
        follow(other, news_of(zero))
        for _ in range(2):
            clock.now += 1.0
            make(zero)
            newest = hear(shards)
        assert versions(newest) == [2, 2]


def test_a_feed_of_which_a_shard_lacks_a_version_is_read_at_the_one_before_until_the_next():
    with feeding(2, cut_seconds=1e-9) as shards:
        zero, other = shards
        clock = zero.cuts._clock = Clock()
        make(zero)
        first = hear(shards)
        stage(zero, 1, changes(zero.span, {1: 1}), 0)
        publish_at(zero, 1)
        for _ in range(4):
            clock.now += 1.0
            make(zero)
            assert hear(shards) is first
        assert (zero.model.version, other.model.version) == (1, 0)
        for shard in shards:
            stage(shard, 2, whole(shard.span, words(5)), 1)
        publish_at(zero, 2)
        follow(other, news_of(zero))
        for _ in range(2):
            clock.now += 1.0
            make(zero)
            newest = hear(shards)
        assert versions(newest) == [2, 2]


def test_a_type_that_nobody_asks_for_any_more_is_dropped(no_thread):
    with serving(LAYOUT, VALUES, cut_seconds=1e-9) as shard:
        clock = shard.cuts._clock = Clock()
        for dtype in (None, torch.bfloat16, torch.float16):
            shard.cuts.ask(dtype)
        assert {*make(shard).shards} == {None, torch.bfloat16, torch.float16}
        clock.now = 500.0
        shard.cuts.ask(torch.bfloat16)
        clock.now = 700.0
        shard.cuts.ask(None)
        push(shard, 1, {1: 1.0})
        before = shard.cuts.nbytes
        assert {*make(shard).shards} == {None, torch.bfloat16}
        assert shard.cuts.nbytes < before


def test_readers_of_a_type_for_which_there_is_no_room_are_refused_alone(no_thread):
    with serving(LAYOUT, VALUES, cut_seconds=1e-9) as shard:
        shard.cuts.ask(None)
        make(shard)
        shard.has_room_for_cuts = lambda nbytes: nbytes < 2 * LAYOUT.size
        assert reason_of(shard.cuts.ask, torch.bfloat16) is ErrorCode.BUSY
        assert shard.cuts.ask(None) is shard.cuts.newest
        push(shard, 1, {1: 1.0})
        assert versions(make(shard)) == [1]


def test_without_room_cuts_stand_still_while_a_slow_reader_has_the_values():
    with serving(LAYOUT, VALUES, cut_seconds=1e-9) as shard:
        cut = make(shard)
        slow = shard.cuts.find(cut.shards[None][0]).values
        shard.has_room_for_cuts = lambda nbytes: not nbytes
        push(shard, 1, {1: 1.0})
        assert make(shard) is None
        assert "slow readers" in shard.cuts.trouble
        assert torch.equal(slow.read(LAYOUT.span(0)), VALUES[:9000])
        del slow
        assert versions(make(shard)) == [1]


def test_a_reader_that_has_not_been_heard_of_for_long_has_no_track(no_thread):
    with serving(LAYOUT, VALUES, cut_seconds=1e-9) as shard:
        clock = shard.cuts._clock = Clock()
        shard.cuts.ask(torch.bfloat16)
        make(shard)
        shard.cuts.sent(shard.cuts._kept[-1], None)
        for step in range(1, 6):
            clock.now += 1
            push(shard, step, {step: 1.0})
            make(shard)
        view = shard.cuts._shadow.views[torch.bfloat16]
        assert view.tracks.versions == (0,)
        clock.now = 601.0
        shard.cuts.ask(torch.bfloat16)
        push(shard, 6, {1: 1.0})
        make(shard)
        assert view.tracks.versions == ()
