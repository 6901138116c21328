"""A shard with a memory (optimizer state, an open round, past values) comes back with it, to the last bit."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import Rejected
from psservice.durability.earlier_models import replay_shards
from psservice.shard.join import leave
from psservice.shard.rollback import roll_back
from psservice.storage.files import Files
from tests.psservice.durability.test_recovery import LAYOUT, START, Shard, after_a_crash, send, values
from tests.psservice.service_makers import bits, sparse_push
from tests.psservice.shard_makers import ANNA, BERT, UPLOAD, join, theta, upload
from tests.tiers import examples, long_but
from verify.failpoint.copies import image

ADAM = {"update": "torch", "optimizer": json.dumps({"name": "Adam", "options": {"lr": 0.01}})}
RMSPROP = {
    "update": "torch",
    "optimizer": json.dumps({"name": "RMSprop", "options": {"lr": 0.01, "momentum": 0.9}}),
    "scheduler": json.dumps({"name": "StepLR", "options": {"step_size": 2, "gamma": 0.5}}),
    "scheduler_every": "2",
}
SAMPLED = RMSPROP | {"scheduler_every": "150 samples"}
ADAFACTOR = {"update": "torch", "optimizer": json.dumps({"name": "Adafactor", "options": {"lr": 0.01}})}
ROUNDS = {"rounds": json.dumps({"quorum": 0, "seconds": 0, "start_workers": 1})}

REGIMES = {
    "adam": (ADAM, {}),
    "rmsprop with a schedule": (RMSPROP, {}),
    "rmsprop with a schedule by samples": (SAMPLED, {}),
    "rounds of that": (SAMPLED | ROUNDS, {}),
    "lazy adam": (ADAM | {"lazy": "true"}, {}),
    "adafactor": (ADAFACTOR, {}),
    "rounds": (ROUNDS, {}),
    "rounds of adam": (ADAM | ROUNDS, {}),
    "delay compensation": ({}, {"delay_compensation": 0.5}),
    "compensated adam": (ADAM, {"delay_compensation": 0.5}),
}

scripts = st.lists(
    st.tuples(
        st.sampled_from(["sparse", "sparse", "dense", "empty", "huge", "snapshot", "leave", "join"]),
        st.integers(0, 1),
        st.integers(0, 99),
    ),
    max_size=20,
)


def begin_regime(shard, method_settings):
    for who in (ANNA, BERT):
        outcome = join(shard, LAYOUT, who, "some", method_settings)
        if outcome.state == UPLOAD:
            upload(shard, values(), who, outcome.generation, buffers=START)


def play(shard, script, method_settings, steps):
    """Do a script; pushes may be stale, and come twice in a round."""
    for action, number, seed in script:
        who = (ANNA, BERT)[number]
        try:
            if action == "snapshot":
                shard.durability.take()
            elif action == "leave":
                leave(shard, who)
            elif action == "join":
                join(shard, LAYOUT, who, "some", method_settings)
            else:
                steps[who] += 1
                segment = {
                    "sparse": lambda seed=seed: sparse_push(shard.span, 0.3, seed),
                    "dense": lambda seed=seed: SparseSlice(shard.span, None, values(seed)),
                    "empty": lambda: None,
                    "huge": lambda: SparseSlice(
                        shard.span, torch.tensor([3]), torch.tensor([-3e38])
                    ),  # refused, or soon
                }[action]()
                stale = 0 if shard.model.mode.rounds is not None else seed % 3
                base = max(0, shard.model.version - stale)
                rates = [] if seed % 2 or "update" not in method_settings else [seed / 700]
                send(shard, steps[who], segment, who, base=base, samples=1 + seed, learning_rate=0.1, rates=rates)
        except Rejected:
            pass


@pytest.mark.parametrize("name", long_but(list(REGIMES)[::5], REGIMES))
@given(script=scripts, after=scripts)
@settings(deadline=None, max_examples=examples(12))
def test_the_next_server_goes_on_with_the_same_bits(name, script, after, tmp_path_factory):
    method_settings, options = REGIMES[name]
    directory = tmp_path_factory.mktemp("data") / "live"
    with Shard(directory, **options) as shard:
        begin_regime(shard, method_settings)
        steps = {ANNA: 0, BERT: 0}
        play(shard, script, method_settings, steps)
        with Shard(after_a_crash(directory), **options) as again:
            assert bits(theta(again)) == bits(theta(shard))
            assert again.model.version == shard.model.version
            if shard.model.mode.rounds is not None:
                assert again.model.round.contributors == shard.model.round.contributors
            later = [action for action in after if action[0] != "snapshot"]
            play(again, later, method_settings, dict(steps))
            play(shard, later, method_settings, dict(steps))
            assert bits(theta(again)) == bits(theta(shard))


WAGMA = {"update": "average", "group_size": "2", "tau": "3", "late": "replace"}


@pytest.mark.parametrize("name", [*REGIMES, "groups"])
def test_a_snapshot_is_of_one_moment_although_pushes_go_on_while_it_is_written(name, tmp_path, monkeypatch):
    method_settings, options = (WAGMA, {}) if name == "groups" else REGIMES[name]
    save, steps = Files.save_tensors, {ANNA: 0, BERT: 0}

    def push(who):
        steps[who] += 1
        update = SparseSlice(shard.span, None, values(steps[who]))
        send(shard, steps[who], update, who, base=shard.model.version, samples=1)

    def save_beside_pushes(self, path, tensors):
        for who in (BERT, ANNA, BERT, ANNA):
            push(who)
        save(self, path, tensors)

    with Shard(tmp_path / "live", **options) as shard:
        begin_regime(shard, method_settings)
        push(ANNA)
        before = json.dumps(dict(shard.model.export().plain))
        with monkeypatch.context() as patched:
            patched.setattr(Files, "save_tensors", save_beside_pushes)
            shard.durability.take()
        (*_, written) = shard.durability.snapshots()
        assert json.loads(before) == written.manifest.memory
        push(BERT)
        with Shard(after_a_crash(tmp_path / "live"), **options) as again:
            assert bits(theta(again)) == bits(theta(shard))
            assert again.model.export().plain == shard.model.export().plain


@pytest.mark.parametrize("method_settings", [{}, ADAM, ADAM | ROUNDS], ids=["subtract", "adam", "rounds"])
def test_a_push_with_rates_for_other_groups_is_refused_and_changes_nothing(method_settings, tmp_path):
    with Shard(tmp_path / "live") as shard:
        begin_regime(shard, method_settings)
        before = bits(theta(shard))
        with pytest.raises(Rejected, match="group_rates"):
            send(shard, 1, SparseSlice(shard.span, None, values(1)), rates=[0.1, 0.2])
        assert bits(theta(shard)) == before
        with Shard(after_a_crash(tmp_path / "live")) as again:
            assert (bits(theta(again)), again.model.version) == (before, 0)


@pytest.mark.parametrize("name", ["adam", "rounds of adam", "delay compensation"])
def test_a_rollback_takes_the_memory_back_too(name, tmp_path):
    method_settings, options = REGIMES[name]
    first = [("sparse", 0, 1), ("dense", 1, 2), ("sparse", 0, 3), ("sparse", 1, 4)]
    later = [("sparse", 0, 5), ("dense", 1, 6), ("sparse", 0, 7), ("sparse", 1, 8)]
    steps = {ANNA: 0, BERT: 0}
    with Shard(tmp_path / "live", **options) as shard:
        begin_regime(shard, method_settings)
        play(shard, first, method_settings, steps)
        at = shard.model.version
        play(shard, later, method_settings, steps)
        once = bits(theta(shard))
        roll_back(shard, at, "")
        assert shard.model.version == at
        play(shard, later, method_settings, steps)
        assert bits(theta(shard)) == once


def test_an_acknowledged_contribution_is_still_in_the_round_after_a_crash(tmp_path):
    with Shard(tmp_path / "live") as shard:
        begin_regime(shard, ROUNDS)
        answer, _ = send(shard, 1, SparseSlice(shard.span, None, values(1)), ANNA)
        assert (answer.version, shard.model.version) == (1, 0)
        with Shard(after_a_crash(tmp_path / "live")) as again:
            _, repeated = send(again, 1, SparseSlice(again.span, None, values(1)), ANNA)
            assert repeated
            send(again, 1, SparseSlice(again.span, None, values(2)), BERT)
            assert again.model.version == 1
            torch.testing.assert_close(theta(again), values() - (values(1) + values(2)) / 2)


def test_going_back_drops_the_open_round_so_that_nobody_waits_for_a_repeat(tmp_path):
    with Shard(tmp_path) as shard:
        begin_regime(shard, ROUNDS)
        send(shard, 1, SparseSlice(shard.span, None, values(1)), ANNA, base=0, samples=1, learning_rate=0.1)
        assert shard.model.round.contributors == {ANNA.worker_id}
        checkpoint = shard.durability.take_asked("").manifest.checkpoint
        before = theta(shard).clone()
        roll_back(shard, None, checkpoint)
        assert shard.model.round.contributors == set()
        assert torch.equal(theta(shard), before)


def test_nobody_waits_for_one_whose_contribution_was_dropped_by_going_back(tmp_path):
    """Bert's part reached this shard before it went back and another one after: he waits there, and not here."""
    with Shard(tmp_path / "live") as shard:
        begin_regime(shard, ROUNDS)
        checkpoint = shard.durability.take_asked("").manifest.checkpoint
        send(shard, 1, SparseSlice(shard.span, None, values(1)), BERT)
        roll_back(shard, None, checkpoint)
        with Shard(after_a_crash(tmp_path / "live")) as again:
            for one in (shard, again):
                send(one, 1, SparseSlice(one.span, None, values(2)), ANNA)
                assert one.model.version == 1
                send(one, 2, SparseSlice(one.span, None, values(3)), ANNA, base=1)
                assert one.model.version == 2
                send(one, 2, SparseSlice(one.span, None, values(4)), BERT, base=2)
                assert one.model.round.contributors == {BERT.worker_id}  # he has come again, and both are waited for
                send(one, 3, SparseSlice(one.span, None, values(5)), ANNA, base=2)
                assert one.model.version == 3


def test_the_same_version_after_going_back_is_another_checkpoint(tmp_path):
    with Shard(tmp_path) as shard:
        begin_regime(shard, ROUNDS)
        first = shard.durability.take_asked("").manifest.checkpoint
        roll_back(shard, None, first)
        second = shard.durability.take_asked("").manifest.checkpoint
        assert first != second
        assert first.startswith("e1-v0-")
        assert second.startswith("e1-v0-")
        roll_back(shard, None, first)


@pytest.mark.parametrize("other", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("name", ["delay compensation", "compensated adam"])
def test_what_compensation_has_made_is_the_same_under_another_setting(name, other, tmp_path):
    method_settings, options = REGIMES[name]
    script = [("sparse", number % 2, 3 * number + 2) for number in range(8)]
    steps = {ANNA: 0, BERT: 0}
    with Shard(tmp_path / "live", **options) as shard:
        begin_regime(shard, method_settings)
        play(shard, script, method_settings, steps)
        made, copy = bits(theta(shard)), after_a_crash(tmp_path / "live")
    (history,) = replay_shards(copy)
    assert bits(history.model.current()) == made
    with Shard(copy, delay_compensation=other, ledger_multiple=0.5) as again:
        assert bits(theta(again)) == made
        play(again, script, method_settings, steps)
        made = bits(theta(again))
        third = copy.with_name("third")
        image(copy, third)
    with Shard(third, **options) as last:
        assert bits(theta(last)) == made
