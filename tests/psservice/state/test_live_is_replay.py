"""A shard that serves, and a shard that applies the records of the first, are in the same state, bit for bit.

The state is compared as a snapshot has it. Each history ends in kills at any moment, with a disk in memory, a clock of
its own, and no thread.
"""

import random
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.buffers import pack
from pscore.model.ranges import Ranges
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import Rejected
from pscore.wire.messages import share_to_messages
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.data_leases.dataset import Plan, SampleRequest
from psservice.shard.buffers import exchange_buffers
from psservice.shard.join import hear_of_shards, leave
from psservice.shard.lifecycle import end_leases, finish
from psservice.shard.publication import hear, publish
from psservice.shard.push import check_push, prepare_push
from psservice.shard.rollback import roll_back
from psservice.shard.samples import lease_samples
from psservice.shard.wait_for_all import wait_for_all
from psservice.state.records import KINDS
from psservice.state.stream_readers import read_all, read_push
from psservice.state.v1 import journal_pb2 as rec
from psservice.values import Identity
from tests.psservice.durability.test_recovery import LAYOUT, START, stream, values
from tests.psservice.feed_makers import ASSIGN, FEED, words
from tests.psservice.relay_makers import MadeSource, RelayHistory
from tests.psservice.service_makers import sparse_push
from tests.psservice.shard_lives import Lives
from tests.psservice.shard_makers import join, present, pull, upload
from tests.tiers import examples, long_but

LEASE_SECONDS = 20.0
NAMES = ("anna", "bert", "cleo")
MODES = {
    "asynchronous": {},
    "unequal": {"rounds": '{"quorum": 0, "seconds": 0, "start_workers": 1, "wait_factor": 1.5}'},
    "rounds": {"rounds": '{"quorum": 2, "seconds": 0, "start_workers": 1}'},
    "groups": {"update": "average", "group_size": "2", "tau": "2", "late": "replace"},
    "RMSprop": {"update": "rmsprop", "optimizer": '{"name": "RMSprop", "options": {"lr": 0.1}}'},
    "AdamW": {"update": "torch", "optimizer": '{"name": "AdamW", "options": {"lr": 0.1}}'},
    "feed": {"update": "assign"},
    "Nesterov": {
        "update": "delayed_nesterov",
        "optimizer": '{"name": "DelayedNesterov", "options": {"lr": 0.1, "momentum": 0.9, "every": 3}}',
    },
}


class History(Lives):
    """One shard of a run, and what happens to it."""

    def __init__(self, method_settings):
        self.method_settings = method_settings
        self.life, self.waits = dict.fromkeys(NAMES, 1), 0
        super().__init__(lease_seconds=LEASE_SECONDS, run_id="run", num_shards=2)
        first = self.identity("anna")
        answer = self.join(first)
        if self.is_feed:
            upload(self.shard, words(), first, answer.generation)
        else:
            upload(self.shard, values(), first, answer.generation, buffers=START)

    # What happens

    def identity(self, name):
        return Identity(name, str(self.life[name]))

    @property
    def is_feed(self):
        return self.method_settings == ASSIGN

    def join(self, who):
        layout = FEED if self.is_feed else LAYOUT
        return join(self.shard, layout, who, method_settings=self.method_settings)

    def joined(self, name):
        who = self.identity(name)
        if not self.shard.leases.is_live(who):
            self.join(who)
        return who

    def push(self, name, seed):
        shard, who = self.shard, self.joined(name)
        draw = random.Random(seed)
        step = max(shard.state.pushes.find(who).step + 1, shard.model.first_step)
        version = shard.model.version
        if self.is_feed:
            segment, base = self.publication(draw)
        else:
            segment = sparse_push(shard.span, draw.choice((0.1, 0.9)), seed)
            base = version if "rounds" in self.method_settings else draw.randint(max(0, version - 2), version)
        messages = stream(shard, step, segment, who, base=base, samples=draw.choice((0, 1, 8)))
        held = shard.state.datasets["train"].held_by(who) if shard.state.datasets else {}
        if held and draw.random() < 0.5:
            messages[0].header.finished.add(dataset="train", ranges=share_to_messages(held))
        check_push(shard, who, step)
        header, entries, _ = read_all(read_push(lambda opened: (shard.span, shard.value_dtype)), messages)
        raw = [message.SerializeToString() for message in messages]
        shard.apply_thread.run(prepare_push(shard, header, entries, raw))

    def publication(self, draw):
        """Differences from the version, nothing, or all words, at times of versions that this shard lacks."""
        span, version = self.shard.span, self.shard.model.version
        kind, given = draw.choice(("changes", "nothing", "all")), words(draw.randrange(100))[span.start : span.end]
        if kind == "all":
            return SparseSlice(span, None, given), version + draw.choice((0, 0, 3))
        places = torch.tensor(sorted(draw.sample(range(span.length), draw.randrange(1, 20))))
        update = SparseSlice(span, places, given[places]) if kind == "changes" else None
        return update, version + draw.choice((0, 0, 0, 1))  # refused, or would wait

    def publish(self, name, seed):
        """Publish what is staged, if there is something: as a call, or as news of shard 0."""
        shard, who = self.shard, self.joined(name)
        version = shard.model.staged.version if self.is_feed else seed
        if seed % 2:
            publish(shard, who, present(shard), max(1, version + seed % 4 // 3))  # 0 is beyond the call's bounds
        elif self.is_feed:
            hear(shard, version + seed % 4 // 2, shard.model.staged.name)

    def come_and_go(self, name, seed):
        leave(self.shard, self.identity(name))
        self.life[name] += seed % 2
        self.joined(name)

    def average(self, name, seed):
        who = self.joined(name)
        data = pack([torch.full((3,), float(seed)), torch.ones(2, dtype=torch.float16), torch.tensor(seed % 100)])
        step = self.shard.state.pushes.find(who).buffer_step + 1
        exchange_buffers(self.shard, who, present(self.shard), step, 1 + seed % 5, data)

    def lease(self, name, seed):
        who = self.joined(name)
        held = self.shard.state.datasets["train"].held_by(who) if self.shard.state.datasets else {}
        kept = {epoch: ranges for epoch, ranges in held.items() if seed % 3} or {0: Ranges([(seed % 30, 30)])}
        lease_samples(self.shard, who, SampleRequest("train", Plan(30, 1, True), seed % 3 or None, seed % 9, kept))

    def wait(self, name, seed):
        self.waits += seed % 2
        wait_for_all(self.shard, self.joined(name), 1 + self.waits)

    def hear(self, name, seed):
        origins = [pb.ShardOrigin(generation=7, version=seed % 50, checkpoint="nightly")] if seed % 2 else []
        generation = 8 if seed % 2 else 7
        told = pb.ShardHistory(shard_index=1, generation=generation, version=seed % 100, origins=origins)
        hear_of_shards(self.shard, [told])
        end_leases(self.shard)

    def pass_time(self, name, seed):
        for _ in range(1 + seed % 6):
            self.now += LEASE_SECONDS / 4
            self.shard.leases.clock()
            end_leases(self.shard)

    def pull(self, name, seed):
        pull(self.shard, self.joined(name))

    def pass_a_day(self, name, seed):
        self.now += 1.0
        self.shard.leases.clock = lambda: self.now
        self.now += 25 * 3600.0
        end_leases(self.shard)

    def take_snapshot(self, name, seed):
        self.shard.durability.take()

    def roll_back(self, name, seed):
        roll_back(self.shard, self.shard.model.version - seed % 4, "")

    def name_run(self, name, seed):
        self.shard.change(rec.RunNamed(run_id="run"))  # as a shard that follows shard 0 does

    def end(self, name, seed):
        if seed % 4 == 0:
            finish(self.shard)

    def do(self, what, name, seed):
        with suppress(Rejected):  # nothing was changed, or the same as in each replay
            getattr(self, what)(name, seed)


ACTIONS = (
    "push",
    "come_and_go",
    "average",
    "lease",
    "wait",
    "hear",
    "pass_time",
    "pull",
    "take_snapshot",
    "roll_back",
    "name_run",
    "publish",
)
actions = st.lists(
    st.tuples(
        st.sampled_from(("push", "push", "push", "publish", *ACTIONS, "pass_a_day", "end")),
        st.sampled_from(NAMES),
        st.integers(0, 10_000),
    ),
    max_size=40,
)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL")


@pytest.mark.parametrize("mode", long_but(list(MODES)[::4], MODES))
@given(script=actions)
@settings(deadline=None, max_examples=examples(40))
def test_a_history_that_was_lived_is_the_one_that_is_replayed(mode, script):
    history = History(MODES[mode])
    for number, action in enumerate(script):
        history.do(*action)
        if number % 7 == 6:
            history.kill()
    history.kill()


@pytest.mark.long
def test_every_kind_of_record_is_compared():
    seen = set()
    for method_settings in MODES.values():
        history = History(method_settings)
        draw = random.Random(3)
        for what in (*ACTIONS, "push", *ACTIONS, "push", "pass_a_day", *ACTIONS, "push"):
            for name in NAMES:
                history.do(what, name, 2 * draw.randint(0, 100) + 1)
            history.kill()
        history.do("end", "anna", 0)
        history.kill()
        seen |= history.kinds
    relay = RelayHistory(MadeSource(FEED, words()))  # tests/psservice/relay has histories of these
    for seed in (5, 6):
        relay.source.change(seed)
        relay.follow()
        relay.kill()
    seen |= relay.kinds
    assert seen == KINDS.keys()
