"""The auto rule: into top-k above the limit, back only after a long calm."""

import pytest

from psservice.replies.reply_mode import CALM_PULLS, ReplyRule

LIMIT = 0.1
CALM, BETWEEN, ABOVE = 0.04, 0.07, 0.2


def calm_for(rule, pulls, density=CALM):
    """Whether the rule stays in top-k mode at each of these pulls."""
    return [rule.wants_topk(density, in_topk=True) for _ in range(pulls)]


def test_exact_up_to_the_limit_and_top_k_above_it():
    rule = ReplyRule("auto", LIMIT)
    assert not rule.wants_topk(LIMIT, in_topk=False)
    assert rule.wants_topk(LIMIT + 1e-9, in_topk=False)


def test_back_only_after_64_calm_pulls_in_a_row():
    assert CALM_PULLS == 64
    assert calm_for(ReplyRule("auto", LIMIT), 64) == [True] * 63 + [False]


@pytest.mark.parametrize("density", [LIMIT / 2, BETWEEN, ABOVE, 1.0])
def test_a_pull_that_is_not_calm_starts_the_count_anew(density):
    rule = ReplyRule("auto", LIMIT)
    calm_for(rule, 63)
    assert rule.wants_topk(density, in_topk=True)
    assert calm_for(rule, 64) == [True] * 63 + [False]


def test_between_half_the_limit_and_the_limit_each_mode_keeps_itself():
    rule = ReplyRule("auto", LIMIT)
    assert not any(rule.wants_topk(BETWEEN, in_topk=False) for _ in range(200))
    assert all(calm_for(rule, 200, BETWEEN))


@pytest.mark.parametrize("in_topk", [False, True])
def test_a_reply_that_must_be_dense_anyway_changes_nothing(in_topk):
    rule = ReplyRule("auto", LIMIT)
    assert all(rule.wants_topk(None, in_topk=in_topk) is in_topk for _ in range(200))


def test_a_dense_reply_does_not_count_among_the_calm_ones():
    rule = ReplyRule("auto", LIMIT)
    calm_for(rule, 63)
    rule.wants_topk(None, in_topk=True)
    assert calm_for(rule, 1) == [False]


def test_each_stay_in_top_k_mode_counts_for_itself():
    rule = ReplyRule("auto", LIMIT)
    calm_for(rule, 63)
    assert rule.wants_topk(ABOVE, in_topk=False), "the image was lost, and the worker comes back to top-k"
    assert calm_for(rule, 64) == [True] * 63 + [False]


def test_the_setting_names_the_rule():
    assert not ReplyRule("exact", LIMIT).wants_topk(1.0, in_topk=True)
    assert ReplyRule("topk", LIMIT).wants_topk(None, in_topk=False)


def test_a_limit_of_the_worker_s_replaces_the_rule_s():
    rule = ReplyRule("auto", LIMIT)
    assert rule.wants_topk(CALM, in_topk=False, limit=0.01)
    assert not rule.wants_topk(ABOVE, in_topk=False, limit=0.5)


@pytest.mark.parametrize("in_topk", [False, True])
def test_a_worker_that_counts_bytes_leaves_dense_replies(in_topk):
    assert ReplyRule("auto", LIMIT).wants_topk(None, in_topk, limit=0.5)
    assert not ReplyRule("auto", LIMIT).wants_topk(None, in_topk=False, limit=1.0), "a dense reply takes no more"
    assert not ReplyRule("exact", LIMIT).wants_topk(None, in_topk, limit=0.5)


@pytest.mark.parametrize("in_topk", [True, False])
def test_who_pushes_all_is_answered_exactly_by_auto_alone(in_topk):
    assert not ReplyRule("auto", LIMIT).wants_topk(ABOVE, in_topk, pushes_all=True)
    assert ReplyRule("topk", LIMIT).wants_topk(ABOVE, in_topk, pushes_all=True)
