"""The installed TRL asks for what :class:`WeightTransfer` has."""

import inspect

import pytest

from psclient.integrations.trl import WeightTransfer


def test_trl_has_the_protocol_that_this_was_written_for():
    trainer = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", reason="trl is not installed")
    for name, theirs in vars(trainer.WeightTransferProtocol).items():
        if not name.startswith("_"):
            ours = inspect.signature(getattr(WeightTransfer, name))
            assert [*ours.parameters] == [*inspect.signature(theirs).parameters]
