"""Whole runs in virtual time: real shards and their RPC layer, disks that fail, connections that break.

Three workers train on one to three shards: asynchronously, with SSP, in rounds, in rounds with a quorum, in
rounds of those who are fast enough, or with WAGMA. Or a publisher publishes the versions of a feed. In some a relay
follows, which dies and is cut off as the others are; it has what its source had, and nothing else, and whenever it dies
while its source is away, new readers get a cut of it.
In some each shard has a standby, hosts burn with their disks, and the standbys serve.
Processes die at any write, lose power, find no room, cannot sync; connections break at any message; operators take
snapshots and go back. Every push that was answered is in the parameters exactly once, bit for bit; every reply has what
its version had; every cut of a feed is one publication; and nobody waits for ever. ``make simulate`` has more,
and ``make smoke`` some of them.
"""

import time

import numpy as np
import pytest

from pscore.model.sparse_slice import SparseSlice
from psservice.cuts import cuts
from psservice.cuts.stamps import Stamps
from psservice.cuts.tracks import Tracks
from psservice.durability.replication import Replication
from psservice.feed.feed_shard import FeedShard
from psservice.feed.relayed_shard import RelayedShard
from psservice.feed.relaying import Relaying
from psservice.model.copies import CopyOnWrite
from psservice.relay.relay import Relay
from psservice.shard import following
from psservice.shard.shard import Shard
from psservice.state.pushes import Pushes
from psservice.state.v1 import journal_pb2 as rec
from tests.psservice.durability.memory_disk import Handle, MemoryDisk
from tests.simulator import simulation
from tests.simulator.simulation import METHODS, Simulation, simulate
from tests.simulator.witness import BrokenPromiseError

FIRST_SEED, HISTORIES = 54, 20  # among which every kind is
LAST = 6  # of them, which tests that are not long are
FOUND_WITHIN = 300  # histories: some promises are seldom put to the test, and the first breach ends it
SECONDS = 600  # of a busy machine


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(FIRST_SEED, HISTORIES - LAST, id="the first", marks=pytest.mark.long),
        pytest.param(FIRST_SEED + HISTORIES - LAST, LAST, id="the last"),
    ],
)
def test_every_promise_is_kept_in_every_history(first, count, capsys):
    began = time.monotonic()
    lost_disks = simulate(first, count)
    rate = 60 * count / (time.monotonic() - began)
    assert lost_disks > 0
    with capsys.disabled():
        print(f" {count} histories, {rate:.0f} a minute, {lost_disks} lost disks ", end="")


def test_every_kind_is_among_the_histories():
    kinds = [Simulation(seed) for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES)]
    assert {kind.method for kind in kinds} == METHODS.keys()
    assert {kind.num_shards for kind in kinds} == {1, 2, 3}
    assert {kind.server_options["fsync"] for kind in kinds} == {"always", "interval", "never"}
    assert {kind.server_options["down_mode"] for kind in kinds} == {"exact", "auto", "topk"}
    assert any("ssp_bound" in kind.server_options for kind in kinds)
    assert any(kind.is_feed and kind.has_relay for kind in kinds)
    assert any(not kind.is_feed and kind.has_relay for kind in kinds)
    assert any(kind.has_standby for kind in kinds)


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("where", "call", "broken", "first"),
    [
        (Handle, "sync", lambda *_: None, 2),
        (MemoryDisk, "sync", lambda *_: None, 1),
        (Pushes, "push", lambda *_: None, 0),
        (CopyOnWrite, "overwrites", lambda *_: None, 2),
        (Stamps, "note", lambda *_: None, 2),
        (Stamps, "distances", lambda self, version, offsets: np.zeros(offsets.size, np.uint16), 1),
        (Tracks, "move", lambda *_: None, 19),
    ],
    ids=[
        "a journal that is not synced",
        "a directory that is not synced",
        "pushes that are not known again",
        "cuts that move on",
        "changes that are not noted",
        "words that have gone farther than is said",
        "steps that are not counted",
    ],
)
def test_a_shard_that_breaks_a_promise_is_found_out(where, call, broken, first, monkeypatch):
    """The first seed is one that finds it now; after a change of the code, one of those behind it may."""
    monkeypatch.setattr(where, call, broken)
    with pytest.raises(BrokenPromiseError):
        simulate(first, FOUND_WITHIN)


@pytest.mark.timeout(SECONDS)
def test_answers_that_do_not_wait_for_the_standby_are_found_out(monkeypatch):
    monkeypatch.setattr(Replication, "wait", lambda *_: None)
    monkeypatch.setattr(simulation, "STANDBY_SHARE", 1.0)
    with pytest.raises(BrokenPromiseError):
        simulate(3, FOUND_WITHIN)


@pytest.mark.timeout(SECONDS)
def test_a_standby_that_follows_a_shard_which_has_lost_something_is_found_out(monkeypatch):
    monkeypatch.setattr(Replication, "part", lambda *_: None)
    monkeypatch.setattr(simulation, "STANDBY_SHARE", 1.0)
    with pytest.raises(BrokenPromiseError):
        simulate(18, FOUND_WITHIN)


def _publish_what_is_staged_again(feed, publish=FeedShard.publish):
    kept = feed.staged.version, feed.staged.name, feed.staged.words
    version = publish(feed)
    feed.staged.version, feed.staged.name, feed.staged.words = kept
    return version


def _publish_the_words_before(feed, publish=FeedShard.publish):
    words, feed.staged.words = feed.staged.words, getattr(feed, "words_before", None)
    feed.words_before = words
    return publish(feed)


def _commit_without_a_record_of_publications(shard, record, *rest, commit=Shard.commit):
    return shard.state.apply(record) if isinstance(record, rec.Published) else commit(shard, record, *rest)


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("where", "call", "broken", "first"),
    [
        (FeedShard, "publish", _publish_what_is_staged_again, 0),
        (FeedShard, "publish", _publish_the_words_before, 0),
        (cuts, "_may_be_a_cut", lambda *_: True, 5),
        (Shard, "commit", _commit_without_a_record_of_publications, 0),
    ],
    ids=[
        "a publication that stays staged",
        "words of another version",
        "cuts of unequal versions",
        "publications that are not written down",
    ],
)
def test_a_shard_of_a_feed_that_breaks_a_promise_is_found_out(where, call, broken, first, monkeypatch):
    monkeypatch.setattr(where, call, broken)
    with pytest.raises(BrokenPromiseError):
        simulate(first, FOUND_WITHIN, "feed")


def _stage_some_of_it(shard, base, version, name, update, buffers, stage=RelayedShard.stage):
    half = update if update is None or update.offsets is None else _half_of(update)
    stage(shard, base, version, name, half, buffers)


def _any_cut_of_a_relay(model, parts, may_be=cuts._may_be_a_cut):
    return model.mode.is_relayed or may_be(model, parts)


def _half_of(update):
    """Return every other entry of an update."""
    return SparseSlice(update.span, update.offsets[::2].clone(), update.values[::2].clone())


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("patches", "first"),
    [
        ([(RelayedShard, "stage", _stage_some_of_it)], 1),
        ([(cuts, "_may_be_a_cut", _any_cut_of_a_relay), (Relay, "is_together", lambda relay: True)], 7),
        ([(Relaying, "others_have", lambda relaying, name: True)], 9),
        pytest.param([(following.publication, "hear_relayed", lambda shard, name: None)], 0, marks=pytest.mark.long),
    ],
    ids=[
        "half of a version",
        "cuts of the relay's own",
        "a cut that is published before all shards have staged it",
        "shards that do not publish what shard 0 has published",
    ],
)
def test_a_relay_that_breaks_a_promise_is_found_out(patches, first, monkeypatch):
    for patch in patches:
        monkeypatch.setattr(*patch)
    monkeypatch.setattr(simulation, "RELAY_SHARE", 1.0)
    monkeypatch.setattr(simulation, "LONGEST_SECONDS", 1500.0)  # a breach may be a wait; without one they take 1,300
    with pytest.raises(BrokenPromiseError):
        simulate(first, FOUND_WITHIN, "feed")
