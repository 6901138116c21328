"""Saved memories: restored in fp32, and dropped where they were sent since."""

from functools import partial

import pytest
import torch
from torch import nn

from psclient.engine.state import PushMark, restore_memories, stale_residuals
from psclient.errors import ConfigurationError

mark = partial(PushMark, "dgs", "run-1", 20, "anna")
MARK = mark("life-1", acknowledged_step=10, step=12)


def test_a_mark_survives_a_state_dict():
    assert PushMark.from_plain(MARK.plain()) == MARK
    assert all(isinstance(value, str | int) for value in MARK.plain().values())


def test_a_key_that_this_release_does_not_know_is_no_reason_to_refuse_a_state():
    assert PushMark.from_plain(MARK.plain() | {"colour": "red"}) == MARK


def test_a_state_of_a_newer_format_is_refused_with_its_number():
    with pytest.raises(ConfigurationError, match=r"newer psclient .* format 2, and this one reads format 1"):
        PushMark.from_plain(MARK.plain() | {"format": 2})


def test_a_mark_of_an_earlier_version_is_refused():
    with pytest.raises(ConfigurationError, match="weights alone"):
        PushMark.from_plain({"worker": "anna", "incarnation": "1", "acknowledged_step": 1, "step": 1})


@pytest.mark.parametrize(
    ("record", "stale"),
    [
        (("life-1", 10), False),
        (None, False),
        (("life-1", 11), True),
        (("life-1", 9), True),
        (("life-2", 10), True),
        (("life-2", 1), True),
    ],
    ids=["that push", "a server without a record", "a later push", "an earlier one", "another life", "its first step"],
)
def test_residuals_are_stale_once_the_server_knows_another_push(record, stale):
    assert stale_residuals(MARK, mark("life-3", acknowledged_step=0, step=0), record) is stale


@pytest.mark.parametrize(
    ("now", "stale"),
    [(("life-3", 1), True), (("life-1", 10), False), (("life-1", 11), True)],
    ids=["this life has pushed", "saved a moment ago", "saved before this life's last push"],
)
def test_residuals_are_stale_once_this_life_has_pushed_since(now, stale):
    incarnation, acknowledged = now
    stands = mark(incarnation, acknowledged, step=acknowledged)
    assert stale_residuals(MARK, stands, ("life-1", 10)) is stale


def test_a_life_that_has_not_pushed_takes_its_own_state_back():
    """As wrappers do that take the state out of a new optimizer and put it in again."""
    now = mark("life-2", acknowledged_step=0, step=0)
    assert not stale_residuals(now, now, ("life-1", 10))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_memories_come_back_in_fp32_bit_for_bit(dtype):
    torch.manual_seed(1)
    memories = {"residual": torch.randn(6) * 1e-6, "momentum": torch.randn(6)}

    def optimizer():
        return torch.optim.SGD([nn.Parameter(torch.zeros(6, dtype=dtype)), nn.Parameter(torch.zeros(2))], lr=0.1)

    saving, loading = optimizer(), optimizer()
    saving.state[saving.param_groups[0]["params"][0]] = dict(memories)
    saved = saving.state_dict()
    loading.load_state_dict(saved)
    restore_memories(loading, saved)
    restored = loading.state[loading.param_groups[0]["params"][0]]
    for name, memory in memories.items():
        assert torch.equal(restored[name], memory)
        assert restored[name].data_ptr() != memory.data_ptr(), "a checkpoint is not changed by training on"
