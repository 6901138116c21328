"""From measurements to the model: bytes by value type, and what replies cost."""

from dataclasses import replace

import pytest

from benchmarks.network.costs import Curve, Measured
from benchmarks.network.servercosts import PushWork, ReplyWork, ServerCosts
from benchmarks.network.workercosts import WorkerCosts
from benchmarks.workload.layouts import one_tensor

ENTRIES = 1000
WORKER = WorkerCosts(0.01, 0.02, 0.0, 0.0, 0.03, push_size=3000, push_entries=ENTRIES, reply_entries=ENTRIES)
REPLY = ReplyWork(0.01, 0.1, 0.2, ENTRIES, frame_bytes=1000, value_bits=32)
SERVER = ServerCosts(
    sparse=PushWork(0.001, 0.002),
    dense=PushWork(0.1, 0.2),
    exact={1: REPLY, 4: replace(REPLY, density=0.0394, entries=3940, frame_bytes=3940)},
    topk={"fp16": {n: replace(REPLY, build=n / 10, value_bits=16) for n in (1, 4)}},
    whole=replace(REPLY, density=1.0, entries=100_000, frame_bytes=0),
)
MEASURED = Measured(one_tensor(100_000), 0.01, SERVER, WORKER, {"fp16": WORKER}, call=0.004, byte=1e-6)


def test_a_value_type_that_was_measured_has_its_own_bytes():
    assert MEASURED.costs(Curve("fp16", "topk")).push_size == 3000


def test_a_top_k_reply_has_its_own_bytes_however_much_it_covers():
    costs = MEASURED.costs(Curve("fp16", "topk"))
    assert costs.reply(1).size == costs.reply(9).size == 1000 + ENTRIES * 16 / 8
    assert costs.reply(4).build == pytest.approx(0.4, rel=0.01), "it takes longer after more pushes"


def test_an_exact_reply_holds_fp32_and_grows_with_what_it_covers():
    costs = MEASURED.costs(Curve("fp16", "exact"))
    assert costs.reply(1).size == pytest.approx(5000)
    assert costs.reply(4).size == pytest.approx(3940 * 5, rel=0.01)
    assert costs.reply(4).install == pytest.approx(3.94 * costs.reply(1).install, rel=0.01)


def test_bytes_alone_cost_no_time():
    costs = MEASURED.bytes_alone(Curve("fp16", "exact"))
    assert costs.push_size == 3000
    assert costs.select == costs.encode == costs.decode == costs.apply == costs.call == 0
    assert costs.reply(1).build == costs.reply(1).encode == costs.reply(1).install == 0


def test_grpc_costs_every_byte():
    costs = MEASURED.costs(Curve("fp16", "topk"))
    assert costs.decode == pytest.approx(0.001 + 3000e-6)
    assert costs.reply(1).encode == pytest.approx(0.2 + 3000e-6)
