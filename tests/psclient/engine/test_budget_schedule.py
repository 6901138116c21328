"""A budget is followed: by the time of a step, by the rate of the line, or as a plain share."""

from types import SimpleNamespace

import pytest
import torch

import psclient
from psclient.engine import budget as budget_module
from psclient.engine.budget import BudgetSchedule
from psclient.rpc.stream import Bandwidth
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire.budget import element_bits, fit
from pscore.wire.codecs.values import VALUE_FORMATS
from pscore.wire.v1 import parameter_server_pb2 as pb

DENSE_BYTES = 4 * 1_000_000
INT4 = VALUE_FORMATS[pb.VALUE_CODEC_INT4]


class FakeShard:
    """The part of a shard's client that a budget reads and sets; lines have been measured where a rate is given."""

    def __init__(self, up=None, down=None):
        self.uplink, self.downlink = Bandwidth(), Bandwidth()
        for line, rate in ((self.uplink, up), (self.downlink, down)):
            if rate is not None:
                line.update(1 << 20, (1 << 20) / rate)
        self.forms = []

    def transfer(self, density, dense_bytes, rate):
        """Send a push of int4 values on a line of this rate, each way; return its seconds."""
        nbytes = dense_bytes * element_bits(density, INT4) / 32
        for line in (self.uplink, self.downlink):
            behind = nbytes - max(16 << 10, 0.02 * (line.bytes_per_second or 0))
            line.update(int(behind), behind / rate)
        return nbytes / rate

    def use_forms(self, push, reply):
        self.forms.append((push.value, reply))


@pytest.fixture
def clock(monkeypatch):
    times = SimpleNamespace(now=0.0)
    monkeypatch.setattr(budget_module.time, "monotonic", lambda: times.now)
    return times


def layout_of(*sizes):
    return ModelLayout(tuple(TensorSpec(f"t{n}", (size,), torch.float32) for n, size in enumerate(sizes)))


def schedule(given, shards, sizes=(1_000_000,), **options):
    return BudgetSchedule(given, layout_of(*sizes), 4096, **({"sends_all": False} | options)).of(shards)


def test_a_share_is_the_same_at_every_step_and_is_told_once():
    shards = [FakeShard(), FakeShard()]
    density = schedule(psclient.Budget(share=0.03), shards)
    assert {density(step) for step in range(1, 6)} == {fit(0.03).density}
    for shard in shards:
        assert shard.forms == [(pb.VALUE_CODEC_INT4, fit(0.03))]


def test_replies_have_a_share_of_their_own():
    shard = FakeShard()
    assert schedule(psclient.Budget(share=0.012, reply_share=0.05), [shard])(1) == fit(0.012).density
    assert shard.forms == [(pb.VALUE_CODEC_INT4, fit(0.05))]


def test_bytes_a_second_become_those_of_a_step_s_time(clock):
    density = schedule(psclient.Budget(bytes_per_second=1e6), [FakeShard()])
    assert density(1) == fit(0.03).density, "before anything is measured"
    for step in range(2, 40):
        clock.now += 0.2
        found = density(step)
    assert found == fit(0.2 * 1e6 / DENSE_BYTES).density
    for step in range(40, 80):
        clock.now += 0.02
        found = density(step)
    assert found == fit(0.02 * 1e6 / DENSE_BYTES).density


def test_one_slow_step_changes_nothing(clock):
    shard = FakeShard()
    density = schedule(psclient.Budget(bytes_per_second=1e6), [shard])
    for step in range(1, 20):
        clock.now += 5.0 if step == 12 else 0.2
        density(step)
    assert len(shard.forms) == 2


def test_seconds_a_step_follow_the_rate_of_each_way():
    shards = [FakeShard(4e6, 1e6), FakeShard(2e6, 3e6)]
    density = schedule(psclient.Budget(seconds_per_step=0.02), shards)
    assert density(1) == pytest.approx(fit(0.02 * 2 * 2e6 / DENSE_BYTES).density), "two shards, the slower counts"
    assert shards[0].forms[-1][1].density == pytest.approx(fit(0.02 * 2 * 1e6 / DENSE_BYTES).density)


@pytest.mark.parametrize("seconds", [0.002, 0.03, 0.3])
@pytest.mark.parametrize("size", [1_000_000, 30_000_000])
def test_seconds_a_step_follow_a_line_that_becomes_slower_and_faster(seconds, size):
    """Also where a budget is too small to measure the line by: a step now and then measures it."""
    shard = FakeShard()
    density = schedule(psclient.Budget(seconds_per_step=seconds), [shard], [size])
    for rate in (5e5, 5e4, 5e6):
        for step in range(500):
            took = shard.transfer(density(step), 4 * size, rate)
        least = 4 * size * element_bits(fit(1e-6).density, INT4) / 32 / rate
        assert took <= 1.2 * max(seconds, least)
        assert took >= 0.8 * min(seconds, 4 * size * element_bits(1.0, INT4) / 32 / rate)


def test_few_steps_measure_the_line():
    shard = FakeShard()
    density = schedule(psclient.Budget(seconds_per_step=0.01), [shard], [10_000_000])
    found = []
    for step in range(1000):
        found.append(density(step))
        shard.transfer(found[-1], 40_000_000, 1e6)
    usual = min(found)
    assert sum(each > 2 * usual for each in found) == 10


def test_a_fast_line_carries_everything_and_a_dead_one_next_to_nothing():
    assert schedule(psclient.Budget(seconds_per_step=1.0), [FakeShard(1e9, 1e9)])(1) == 1.0
    assert 0 < schedule(psclient.Budget(bytes_per_second=1e-3), [FakeShard()])(1) <= fit(0.03).density


def test_a_method_that_sends_everything_gets_the_fewest_bits_at_least():
    shard = FakeShard(1e3, 1e3)
    assert schedule(psclient.Budget(seconds_per_step=0.01), [shard], sends_all=True)(1) == 1.0
    assert shard.forms == [(pb.VALUE_CODEC_INT4, (1.0, pb.VALUE_CODEC_INT4))]


def test_small_tensors_are_whole_only_where_they_take_little_of_the_budget():
    few = BudgetSchedule(psclient.Budget(share=0.03), layout_of(1_000_000, 4000), 4096, sends_all=False)
    assert few.dense_below == 4096
    many = BudgetSchedule(psclient.Budget(share=0.03), layout_of(100_000, *[4000] * 20), 4096, sends_all=False)
    assert many.dense_below == 4000
    assert BudgetSchedule(psclient.Budget(share=0.03), layout_of(300, 20), 4096, sends_all=False).dense_below <= 20


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"share": 0.1, "seconds_per_step": 1.0},
        {"reply_share": 0.1},
        {"reply_share": 0.1, "bytes_per_second": 1e6},
    ],
)
def test_a_budget_is_one_number(given):
    with pytest.raises(psclient.errors.ConfigurationError, match="one of share="):
        psclient.Budget(**given)


@pytest.mark.parametrize("share", [0, -0.1, 1.5, float("nan"), True, "0.1"])
def test_the_share_of_replies_is_a_share(share):
    with pytest.raises(psclient.errors.ConfigurationError, match="reply_share of a budget must be"):
        psclient.Budget(share=0.1, reply_share=share)
