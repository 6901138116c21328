"""Thousands of nearly right calls to the whole service: no internal error, and no change by what was refused."""

import pytest

from tests.hostile.service import FEED, campaign
from tests.tiers import long_but


@pytest.mark.parametrize("durable", long_but([False], [False, True]))
def test_changed_calls_are_refused_in_the_protocols_words_or_obeyed(durable, tmp_path):
    outcomes = campaign(1500, seed=int(durable), **({"data_dir": tmp_path} if durable else {}))
    assert outcomes["INVALID_ARGUMENT"] > 300
    assert outcomes["obeyed"] > 30
    assert outcomes["FAILED_PRECONDITION"]


@pytest.mark.parametrize("durable", long_but([False], [False, True]))
def test_changed_calls_to_a_feed_are_refused_in_the_protocols_words_or_obeyed(durable, tmp_path):
    outcomes = campaign(1500, int(durable), FEED, **({"data_dir": tmp_path} if durable else {}))
    assert outcomes["INVALID_ARGUMENT"] > 300
    assert outcomes["obeyed"] > 30
    assert outcomes["ABORTED"]
