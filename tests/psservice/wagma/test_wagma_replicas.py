"""A model for each worker: averages as the formulas say, means kept, the late not lost, and nothing sent in vain."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psservice.model.changelog import union
from psservice.rules.base import RuleState
from tests.psservice.group_makers import LAYOUT, SIZE, all_push, dense, freeze_due, grouped, models, settings_of, sparse
from tests.psservice.service_makers import bits, cloned
from tests.psservice.shard_makers import Clock
from tests.tiers import examples


def names(count):
    return [f"w{rank:02d}" for rank in range(count)]


def unsynced(shard):
    return {worker for worker, replica in shard.replicas.items() if replica.unsynced}


def random(seed):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("size", "digits"), [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_at_rate_zero_the_consensus_is_reached_in_as_many_rounds_as_digits(size, digits):
    workers = names(size**digits)
    shard = grouped(settings_of(size, tau=100), *workers)
    pushes = {worker: dense(random(seed)) for seed, worker in enumerate(workers)}
    mean = -sum(push.values for push in pushes.values()) / len(workers)
    distances = []
    for step in range(1, digits + 1):
        all_push(shard, workers, step, pushes if step == 1 else {})
        distances.append(max(float((theta - mean).abs().max()) for theta in models(shard, workers).values()))
    assert distances[-1] < 1e-5 < distances[0]
    torch.testing.assert_close(shard.current(), mean)


@given(st.integers(1, 9), st.sampled_from([0, 2, 3]), st.integers(0, 3), st.integers(0, 99))
@settings(deadline=None, max_examples=examples(30))
def test_the_mean_moves_by_the_mean_of_the_updates_when_all_are_on_time(count, size, tau, seed):
    workers = names(count)
    shard = grouped(settings_of(size, tau), *workers, values=random(seed))
    expected = random(seed)
    for step in range(1, 12):
        pushes = {worker: dense(random(100 * step + rank + seed)) for rank, worker in enumerate(workers)}
        expected -= sum(push.values for push in pushes.values()) / count
        all_push(shard, workers, step, pushes)
        torch.testing.assert_close(shard.current(), expected, rtol=1e-4, atol=1e-4)
        if step % (tau + 1) == 0:
            assert all(
                bits(theta) == bits(shard.replicas["w00"].model.theta) for theta in models(shard, workers).values()
            )
    assert shard.version == 11 * count


def one_late(late, *, updates=(4, 5, 6)):
    """Of three workers in one group, c comes when the round of step 2 is frozen; return what everybody had."""
    clock = Clock()
    shard = grouped(settings_of(4, late=late), "a", "b", "c", values=random(0), clock=clock)
    all_push(shard, "abc", 1, {worker: dense(random(seed)) for seed, worker in enumerate("abc", 1)})
    before = models(shard, "abc")
    for worker, seed in zip("ab", updates[:2], strict=True):
        shard.take(worker, dense(random(seed)), step=2)
    own = {worker: before[worker] - random(seed) for worker, seed in zip("abc", updates, strict=True)}
    [frozen] = freeze_due(shard)
    assert (frozen.fresh, frozen.stale) == (("a", "b"), ("c",))
    shard.take("c", dense(random(updates[2])), step=2)
    return shard, before, own


def test_the_first_to_come_are_averaged_with_the_old_model_of_the_late():
    shard, before, own = one_late("replace")
    expected = (own["a"] + own["b"] + before["c"]) / 3
    for worker in "ab":
        torch.testing.assert_close(shard.replicas[worker].model.theta, expected)


def test_the_rule_replace_puts_the_new_model_in_the_place_of_the_old_one():
    shard, _, own = one_late("replace")
    torch.testing.assert_close(shard.replicas["c"].model.theta, (own["a"] + own["b"] + own["c"]) / 3)


def test_the_rule_paper_adds_the_new_model_to_the_sum():
    shard, before, own = one_late("paper")
    expected = (own["a"] + own["b"] + before["c"] + own["c"]) / 4
    torch.testing.assert_close(shard.replicas["c"].model.theta, expected)


def test_who_is_late_for_several_rounds_is_averaged_in_each_with_the_models_of_then():
    shard, _, _ = one_late("replace")
    clock = shard.rounds._clock
    middle = models(shard, "abc")
    sums = {}
    for step in (3, 4):
        for worker in "ab":
            shard.take(worker, dense(random(10 * step + ord(worker))), step=step)
        sums[step] = sum(shard.replicas[worker].model.theta for worker in "ab")
        clock.now += 100
        freeze_due(shard)
    own_now = middle["c"]
    for step in (3, 4):
        own_now = (sums[step] + own_now - random(step)) / 3
        shard.take("c", dense(random(step)), step=step)
        torch.testing.assert_close(shard.replicas["c"].model.theta, own_now)
    assert shard.replicas["c"].late_for == {}


def test_a_model_that_is_too_old_is_left_out_and_joined_when_its_worker_comes():
    shard = grouped(settings_of(2, tau=2), "a", "b", values=random(0))
    start = random(0)
    for step in (1, 2, 4):  # step 3 would wait for b
        shard.take("a", dense(random(step)), step=step)
        freeze_due(shard)
    alone = shard.replicas["a"].model.theta.clone()
    shard.take("b", dense(random(9)), step=4)
    torch.testing.assert_close(shard.replicas["b"].model.theta, (alone + start - random(9)) / 2)


def test_a_newcomer_begins_with_the_mean_and_nobody_waits_for_its_past():
    shard = grouped(settings_of(2, tau=3), "a", "b")
    for step in range(1, 7):
        all_push(shard, "ab", step, {"a": dense(random(step)), "b": dense(random(-step))})
    mean = shard.current()
    shard.decide("enter", "c", "1")
    assert shard.first_step == 7
    torch.testing.assert_close(shard.replicas["c"].model.theta, mean)
    assert len(all_push(shard, "abc", 7, {})) >= 1
    assert [frozen.fresh for frozen in all_push(shard, "abc", 8, {})] == [("a", "b", "c")]


def test_when_the_last_worker_has_gone_its_model_is_the_model():
    shard = grouped(settings_of(), "a", "b")
    shard.take("a", dense(random(1)), step=1)
    shard.take("b", dense(random(2)), step=1)
    freeze_due(shard)
    shard.take("b", dense(random(3)), step=2)
    last = shard.replicas["b"].model.theta.clone()
    shard.decide("leave", "a")
    assert bits(shard.current()) == bits(last)
    shard.decide("leave", "b")
    assert bits(shard.current()) == bits(last)
    shard.decide("enter", "c", "1")
    assert bits(shard.replicas["c"].model.theta) == bits(last)


def test_with_sparse_changes_the_news_are_the_union_since_models_were_alike():
    shard = grouped(settings_of(2, tau=3), "a", "b")
    all_push(shard, "ab", 1, {"a": sparse({1: 1.0, 3: 1.0}), "b": sparse({3: 2.0, 7: 4.0})})
    for worker in "ab":
        own = shard.replicas[worker].model
        assert union(own.changelog.since(0), own.span.length).tolist() == [1, 3, 7]
        assert own.theta.tolist() == [0, -0.5, 0, -1.5, 0, 0, 0, -2.0, 0, 0]


def test_the_end_gives_everybody_the_mean():
    shard = grouped(settings_of(tau=3), "a", "b", "c")
    all_push(shard, "abc", 1, {worker: dense(random(seed)) for seed, worker in enumerate("abc")})
    shard.take("a", dense(random(7)), step=4)  # waits for all
    mean = shard.current()
    shard.finish()
    assert shard.rounds.waits("a") is None
    assert {bits(theta) for theta in models(shard, "abc").values()} == {bits(mean)} == {bits(shard.current())}
    assert all(
        replica.unsynced for replica in shard.replicas.values()
    )  # what their replicas are called says nothing about this


def test_what_makes_no_sense_is_no_decision():
    shard = grouped(settings_of(), "a")
    for wrong in (("leave", "b"), ("freeze", "a"), ("freeze", "b", "", 3)):
        with pytest.raises(ValueError, match=r"takes no part|no round"):
            shard.decide(*wrong)
    with pytest.raises(ValueError, match="not known"):
        shard.decide("other", "a")


def test_states_that_do_not_fit_are_not_taken_over():
    shard = grouped(settings_of(), "a")
    state = cloned(shard.export())
    broken = RuleState(state.plain, {name: tensor[:3] for name, tensor in state.tensors.items()})
    with pytest.raises(ValueError, match="does not fit"):
        grouped(settings_of()).restore(broken)
    with pytest.raises(KeyError):
        grouped(settings_of()).restore(RuleState(state.plain, {}))


events = st.lists(
    st.tuples(st.sampled_from(["push", "push", "push", "sparse", "enter", "leave", "time"]), st.sampled_from("abcd")),
    max_size=60,
)


@given(events, st.sampled_from(["replace", "paper"]), st.integers(0, 60))
@settings(deadline=None, max_examples=examples(60))
def test_a_copy_made_at_any_moment_goes_on_to_the_same_bits(history, late, cut):
    clock, chosen = Clock(), settings_of(2, 3, late)
    shard = grouped(chosen, "a", "b", clock=clock)
    shards, steps = [shard], {"a": 1, "b": 1}

    def decide(*decision, **fields):
        for each in shards:
            each.decide(*decision, **fields)

    for number, (action, worker) in enumerate(history):
        if number == cut:
            state = cloned(shard.export())
            copy = grouped(chosen, values=shard.current(), clock=Clock())
            copy.version = shard.version
            copy.restore(RuleState(json.loads(json.dumps(state.plain)), state.tensors))
            shards.append(copy)
        if action == "time":
            clock.now += 10.0
        elif action == "enter" and worker not in steps:
            decide("enter", worker, "1")
            steps[worker] = shard.first_step
        elif action == "leave" and worker in steps:
            decide("leave", worker)
            del steps[worker]
        elif action in ("push", "sparse") and worker in steps and shard.rounds.waits(worker) is None:
            push = dense(random(number)) if action == "push" else sparse({number % SIZE: 1.0})
            for each in shards:
                each.take(worker, push, step=steps[worker])
            steps[worker] += 1
        while (due := shard.rounds.due()) is not None:
            decide("freeze", due.fresh[0], iteration=due.iteration)
    for each in shards[1:]:
        assert bits(each.current()) == bits(shard.current())
        mine, theirs = each.export(), shard.export()
        assert mine.plain == theirs.plain
        assert unsynced(each) == unsynced(shard)
        assert {name: bits(t) for name, t in mine.tensors.items()} == {n: bits(t) for n, t in theirs.tensors.items()}
    held = sum(len(replica.late_for) for replica in shard.replicas.values())
    assert held <= 4 * (3 + 1)  # no worker is late for more rounds than there are between two global ones
    assert LAYOUT.size == shard.current().numel()


@pytest.mark.parametrize("how", ["freeze", "late"])
def test_who_reads_beside_the_writer_sees_values_before_their_version(how):
    """A top-k answer reads version, changes and values while the apply thread works: a version has all its values."""
    shard = grouped(settings_of(4), "a", "b", "c", values=random(0), clock=Clock())
    all_push(shard, "abc", 1, {worker: dense(random(seed)) for seed, worker in enumerate("abc", 1)})
    for worker in "ab":
        shard.take(worker, dense(random(ord(worker))), step=2)
    watched = "a" if how == "freeze" else "c"
    own = shard.replicas[watched].model
    seen = []
    append = own.changelog.append

    def beside(version, support):
        seen.append((own.theta.clone(), own.version, version))
        append(version, support)

    own.changelog.append = beside
    if how == "freeze":
        freeze_due(shard)
    else:
        freeze_due(shard)
        shard.take("c", dense(random(9)), step=2)
    values, version, appended = seen[-1]
    assert bits(values) == bits(own.theta), "the ledger knew of values that were not there yet"
    assert version <= appended
    assert own.version == appended
