"""Replies of all shards belong together: a reply whose generation a shard has left is asked for again."""

from types import SimpleNamespace

from psclient.engine.engine import Engine
from psclient.rpc.run import Run
from psclient.rpc.shard_stream import PulledReply
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb


class Shard:
    """Answers each pull with the next of its answers: a reply of its generation, or a refusal."""

    spill = None

    def __init__(self, index, *refusals):
        self.index, self.generation, self.refusals, self.pulls = index, 1, list(refusals), 0

    def pull(self, identity, policy):
        self.pulls += 1
        if self.refusals:
            return Rejected(self.refusals.pop(), "told so")
        return PulledReply(pb.PullHeader(), [], self.generation, 0, 0, 0.0, 0.0)


def fetched(shards, join):
    run = SimpleNamespace(
        identity=pb.WorkerIdentity(),
        policy=lambda: None,
        join=join,
        each=lambda waiting, call: [call(shard) for shard in waiting],
        joining_again=lambda calls: Run.joining_again(run, calls),
    )
    return Engine.fetch(SimpleNamespace(run=run, _shards=shards))


def test_a_join_that_changes_the_generation_has_every_shard_asked_again():
    shards = (Shard(0, ErrorCode.STALE_GENERATION), Shard(1))

    def join():
        for shard in shards:
            shard.generation = 2

    assert {index: reply.generation for index, reply in fetched(shards, join).items()} == {0: 2, 1: 2}
    assert [shard.pulls for shard in shards] == [2, 2]


def test_a_lease_that_is_lost_at_one_shard_leaves_the_others_replies():
    shards = (Shard(0), Shard(1, ErrorCode.LEASE_EXPIRED))
    assert len(fetched(shards, lambda: None)) == 2
    assert [shard.pulls for shard in shards] == [1, 2]
