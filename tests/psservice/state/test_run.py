"""The run: what its workers agree on, and its end."""

import pytest

from pscore.wire.errors import ErrorCode, Rejected
from psservice.state.run import Run, RunState, added


def refusal_of(call):
    with pytest.raises(Rejected) as refused:
        call()
    return refused.value


def test_a_run_without_a_name_draws_one():
    assert Run("").run_id
    assert Run("").run_id != Run("").run_id
    assert Run("mine").run_id == "mine"


def test_only_a_join_may_leave_the_run_open():
    run = Run("mine")
    run.require_id("mine")
    run.require_id("", may_be_empty=True)
    for named, may_be_empty in (("other", True), ("other", False), ("", False)):
        refusal = refusal_of(lambda named=named, free=may_be_empty: run.require_id(named, may_be_empty=free))
        assert refusal.reason is ErrorCode.RUN_MISMATCH
        assert "'mine'" in refusal.detail


def agreed():
    run = Run("r")
    run.agree("dgs", {"momentum": "0.7"})
    return run


def test_the_first_worker_decides_and_the_same_again_is_fine():
    run = agreed()
    run.require_method("dgs", {"momentum": "0.7"})
    assert run.method == "dgs"


@pytest.mark.parametrize(
    ("method", "settings", "named"),
    [
        ("asgd", {"momentum": "0.7"}, "method"),
        ("dgs", {"momentum": "0.9"}, "momentum"),
        ("dgs", {}, "momentum"),
        ("dgs", {"momentum": "0.7", "clip_norm": "1"}, "clip_norm"),
    ],
)
def test_whoever_differs_is_refused_by_name(method, settings, named):
    run = agreed()
    refusal = refusal_of(lambda: run.require_method(method, settings))
    assert refusal.reason is ErrorCode.SETTINGS_MISMATCH
    assert refusal.metadata == {"setting": named}
    run.require_method("dgs", {"momentum": "0.7"})


def test_one_who_is_alone_may_begin_otherwise():
    run = agreed()
    run.agree("asgd", {})
    assert run.method == "asgd"
    assert refusal_of(lambda: run.require_method("dgs", {"momentum": "0.7"})).metadata == {"setting": "method"}


def test_pushes_are_taken_until_the_end():
    run = Run("r")
    assert run.state is RunState.EMPTY
    assert run.state_with_model is RunState.TRAINING
    run.require_open()
    run.state = RunState.FINISHED
    assert refusal_of(run.require_open).reason is ErrorCode.RUN_FINISHED
    assert run.state_with_model is RunState.FINISHED, "a new upload does not reopen a run"


def counted(run, version, samples):
    run.samples = added(run.samples, samples)
    return run.is_over(version)


def test_it_ends_at_a_version():
    run = Run("r", end_versions=3)
    assert [counted(run, version, 10) for version in (1, 2, 3)] == [False, False, True]


def test_it_ends_after_samples():
    run = Run("r", end_samples=25)
    assert [counted(run, version, 10) for version in (1, 2, 3)] == [False, False, True]
    assert run.samples == 30


def test_without_an_end_it_goes_on():
    run = Run("r")
    assert not any(counted(run, version, 10**9) for version in range(1, 100))


def test_only_the_coordinator_names_a_run_and_the_others_follow_it():
    run = Run("", coordinator=False)
    assert run.run_id == ""
    for named in ("anything", "something else"):  # until a model that is taken says which run this is
        run.require_id(named)
        run.require_upload(named)
        assert run.run_id == ""
    run.run_id = run.adopted("mine")
    assert run.run_id == "mine"
    assert refusal_of(lambda: run.require_id("other")).reason is ErrorCode.RUN_MISMATCH


@pytest.mark.parametrize("coordinator", [True, False])
def test_a_run_that_was_named_follows_no_other(coordinator):
    run = Run("mine", coordinator=coordinator)
    run.require_upload("mine")
    assert refusal_of(lambda: run.require_upload("other")).reason is ErrorCode.RUN_MISMATCH
    run.run_id = run.adopted("other")
    assert run.run_id == "mine"


def test_a_shard_that_follows_compares_with_what_it_has_taken_and_follows_another_upload():
    run = Run("", coordinator=False)
    run.run_id = run.adopted("first")
    assert refusal_of(lambda: run.require_id("other")).reason is ErrorCode.RUN_MISMATCH
    run.require_upload("after-a-new-upload")
    run.run_id = run.adopted("after-a-new-upload")
    assert run.run_id == "after-a-new-upload"
