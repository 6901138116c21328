"""A shard goes back in two steps: it writes the older model down and holds, and then serves it, or goes on."""

import pytest

from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.shard.lifecycle import end_leases
from psservice.shard.rollback import LONGEST_HOLD_SECONDS, abandon, commit, prepare
from psservice.storage.files import Files
from tests.psservice.durability.test_recovery import LAYOUT, Shard, after_a_crash, assert_same, begin, send
from tests.psservice.service_makers import bits, sparse_push
from tests.psservice.shard_makers import BERT, join, present, reason_of, theta


@pytest.fixture
def shard(tmp_path):
    with Shard(tmp_path / "live") as shard:
        begin(shard)
        for step in (1, 2, 3):
            send(shard, step, sparse_push(shard.span, 0.5, step))
        yield shard


def later(shard):
    """The next push, as a worker sends it."""
    return send(shard, 4, sparse_push(shard.span, 0.5, 4), base=min(3, shard.model.version))


def test_a_shard_holds_between_the_two_steps_and_then_serves_the_older_model(shard, tmp_path):
    before = present(shard)
    ready = prepare(shard, 1, "")
    assert (shard.model.version, present(shard)) == (3, before)
    assert reason_of(later, shard) is ErrorCode.BUSY
    assert reason_of(prepare, shard, 2, "") is ErrorCode.BUSY
    assert reason_of(commit, shard, "another") is ErrorCode.NO_SUCH_CHECKPOINT
    commit(shard, ready.ticket)
    assert (shard.model.version, present(shard)) == (1, ready.generation)
    assert reason_of(commit, shard, ready.ticket) is ErrorCode.NO_SUCH_CHECKPOINT
    assert later(shard)[0].version == 2
    with Shard(after_a_crash(tmp_path / "live")) as again:
        assert_same(again, shard)


@pytest.mark.parametrize("how", ["abandoned", "its time is over"])
def test_a_shard_goes_on_as_before_if_what_was_prepared_is(how, shard, tmp_path, monkeypatch):
    values, before = bits(theta(shard)), present(shard)
    ready = prepare(shard, 1, "")
    join(shard, LAYOUT, BERT)  # leases are granted meanwhile
    if how == "abandoned":
        abandon(shard, ready.ticket)
    else:
        real = shard.environment.monotonic
        end_leases(shard)
        assert shard.rollback is ready
        object.__setattr__(shard.environment, "monotonic", lambda: real() + LONGEST_HOLD_SECONDS)
        try:
            end_leases(shard)
        finally:
            object.__setattr__(shard.environment, "monotonic", real)
    assert reason_of(commit, shard, ready.ticket) is ErrorCode.NO_SUCH_CHECKPOINT
    assert (bits(theta(shard)), present(shard)) == (values, before)
    assert later(shard)[0].version == 4
    with Shard(after_a_crash(tmp_path / "live")) as again:
        assert_same(again, shard)
        assert again.leases.is_live(BERT)


def test_what_a_worker_tells_of_another_shard_while_the_shard_holds_is_forgotten_with_the_rest(shard, tmp_path):
    ready = prepare(shard, 1, "")
    shard.state.histories.hear(pb.ShardHistory(shard_index=1, generation=7, version=3))
    end_leases(shard)
    commit(shard, ready.ticket)
    with Shard(after_a_crash(tmp_path / "live")) as again:
        assert again.state.histories.known() == shard.state.histories.known() == []


def test_a_shard_that_dies_between_the_steps_has_the_present_model(shard, tmp_path):
    values, generation = bits(theta(shard)), present(shard)
    prepare(shard, 1, "")
    with Shard(after_a_crash(tmp_path / "live")) as again:
        assert (bits(theta(again)), present(again)) == (values, generation)
        assert later(again)[0].version == 4


def test_what_cannot_be_written_down_changes_nothing(shard, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Files, "save_tensors", full)
        assert reason_of(prepare, shard, 1, "") is ErrorCode.NOT_DURABLE
    assert shard.rollback is None
    assert later(shard)[0].version == 4
