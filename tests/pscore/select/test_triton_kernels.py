"""Device selection against the reference, bit for bit: under Triton's interpreter, or on a GPU where there is one."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.pscore.kernel_makers import (
    DEVICE,
    FEEDS,
    capacity_of,
    check_against_reference,
    feed_of,
    randn,
    same_bits,
    selection,
)

pytest.importorskip("triton")

from pscore.select.kernels import cuda
from pscore.select.kernels.base import GradientUpdate
from pscore.select.kernels.cuda import available


def test_triton_is_known_to_be_installed():
    assert available()


@pytest.mark.parametrize("kind", FEEDS)
@pytest.mark.parametrize("n", [1, 7, 256, 257, 1000])
def test_every_feed_gives_the_bits_of_the_reference(kind, n):
    select, state = selection(), {}
    memory = randn(n, 99) * 0.1
    momentum = torch.zeros(n, device=DEVICE) if "momentum" in kind else None
    twin_momentum = None if momentum is None else momentum.clone()
    for step in range(3):
        feed = feed_of(kind, n, step, momentum)
        keep = 0.0 if momentum is not None else 0.7
        check_against_reference(select, memory, feed, twin_momentum, max(1, n // 20), keep, state)
        if momentum is not None:
            assert same_bits(momentum, twin_momentum)


def test_blocks_of_the_usual_size():
    select, state = selection(block=4096), {}
    memory = torch.zeros(20_001, device=DEVICE)
    for step in range(3):
        pending = check_against_reference(
            select, memory, GradientUpdate(randn(20_001, step), 0.1), None, 200, 0.5, state
        )
        assert abs(pending.count - 200) <= 20


def test_the_same_calls_give_the_same_bits():
    def run():
        select, state, memory, found = selection(), {}, torch.zeros(2000, device=DEVICE), []
        for step in range(4):
            found += select.take(memory, GradientUpdate(randn(2000, step), 0.1), 20, 0.7, state).collect()
        return [memory, state["threshold"].view(1), *found]

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def without_corrections(monkeypatch):
    """The first sift of a warm start stands, however many hits it has."""
    monkeypatch.setattr(cuda, "CORRECTIONS", 0)


def test_what_does_not_fit_stays(without_corrections):
    n, k = 3000, 40
    for turn in range(5):
        state = {"threshold": torch.tensor(0.5, device=DEVICE), "turn": turn}
        memory = randn(n)
        before = memory.clone()
        pending = check_against_reference(selection(), memory, None, None, k, 0.0, state)
        assert pending.count == capacity_of(n, k) < pending.hits
        taken = pending.collect()
        restored = memory.cpu()
        restored[taken.offsets] = taken.values
        assert same_bits(restored, before)


def test_the_place_where_filling_starts_goes_round(without_corrections):
    n, k = 1000, 100
    select, state = selection(), {}
    memory = torch.ones(n, device=DEVICE)
    for _ in range(4 * n // capacity_of(n, k)):
        state["threshold"] = torch.tensor(0.5, device=DEVICE)
        select.take(memory, GradientUpdate(torch.ones(n, device=DEVICE), 1.0), k, 0.0, state).collect()
    assert float(memory.max()) <= 2 * n / capacity_of(n, k), "an entry has been passed over for long"


def test_a_block_with_more_hits_than_its_slot_holds_is_read_again(without_corrections):
    n, k = 16 * 256, 200
    memory = torch.zeros(n, device=DEVICE)
    memory[5 * 256 : 6 * 256] = randn(256) + 10
    state = {"threshold": torch.tensor(1.0, device=DEVICE)}
    pending = check_against_reference(selection(), memory, None, None, k, 0.5, state)
    assert pending.hits == 256
    assert pending.count == 250


@pytest.mark.parametrize("k", [1, 30, 300, 5000])
def test_nothing_is_taken_from_zeros(k):
    memory = torch.zeros(300, device=DEVICE)
    state = {}
    for _ in range(2):
        assert check_against_reference(selection(), memory, None, None, k, 0.5, state).count == 0


@pytest.mark.parametrize("n", [1, 2, 300])
def test_everything_that_is_not_zero_goes_where_all_is_asked_for(n):
    state = {"threshold": torch.tensor(9.0, device=DEVICE)}
    memory = randn(n)
    memory[n // 2] = 0
    before = memory.cpu().clone()
    pending = check_against_reference(selection(), memory, None, None, n, 0.0, state)
    assert pending.collect().offsets.tolist() == before.nonzero().view(-1).tolist()
    assert float(state["threshold"]) == 9.0, "a flush says nothing about the steps to come"


def test_ties_are_cut_at_the_capacity():
    memory = torch.full((2000,), -0.25, device=DEVICE)
    state = {}
    for _ in range(3):
        assert check_against_reference(selection(), memory, None, None, 20, 0.0, state).count == 25


def test_where_fewer_than_k_are_not_zero_all_of_them_go():
    for start in ({}, {"threshold": torch.tensor(0.3, device=DEVICE)}):
        memory = torch.zeros(2000, device=DEVICE)
        memory[::100] = randn(20)
        assert check_against_reference(selection(), memory, None, None, 100, 0.0, start).count == 20


@pytest.mark.parametrize("density", [0.1, 0.01])
@pytest.mark.parametrize("kind", ["normal", "laplace", "student", "mixed", "half zeros"])
def test_a_cold_start_finds_the_threshold(kind, density):
    n = 30_000
    x = randn(n)
    x = {
        "normal": x,
        "laplace": x.sign() * -torch.log1p(-(torch.erf(x.abs() / 2**0.5) * 0.999999)),
        "student": x / ((randn(n, 1) ** 2 + randn(n, 2) ** 2 + randn(n, 3) ** 2) / 3).sqrt(),
        "mixed": x * torch.where(torch.arange(n, device=DEVICE) < n // 20, 30.0, 1.0),
        "half zeros": x * (randn(n, 4) > 0),
    }[kind].contiguous()
    k = int(density * n)
    pending = check_against_reference(selection(block=16384), x, None, None, k, 0.0, {})
    assert abs(pending.count - k) <= 0.1 * k


def test_the_threshold_follows_a_run_and_a_drop_of_the_learning_rate():
    n, k, drop = 32768, 1310, 30
    select, state, memory = selection(block=32768), {}, torch.zeros(n, device=DEVICE)
    found = []
    for step in range(50):
        pending = select.take(memory, GradientUpdate(randn(n, step), 0.1 if step < drop else 0.01), k, 0.7, state)
        pending.collect()
        found.append((abs(pending.count - k) <= 0.1 * k, pending.passes))
    settled = found[10:drop]
    assert all(within for within, _ in settled)
    assert sum(passes for _, passes in settled) <= 1.5 * len(settled)
    assert sum(not within for within, _ in found) <= 1, "the step of the drop itself may miss, no other"


def test_the_state_can_be_saved_and_goes_on_with_the_same_bits():
    select, state, memory = selection(), {}, torch.zeros(2000, device=DEVICE)
    select.take(memory, GradientUpdate(randn(2000), 0.1), 20, 0.7, state).collect()
    assert state["threshold"].shape == ()
    assert state["threshold"].dtype == torch.float32
    kept, kept_memory = copy.deepcopy(state), memory.clone()
    for other, own_state, own_memory in ((select, state, memory), (selection(), kept, kept_memory)):
        other.take(own_memory, GradientUpdate(randn(2000, 1), 0.1), 20, 0.7, own_state).collect()
    assert same_bits(memory, kept_memory)
    assert same_bits(state["threshold"].view(1), kept["threshold"].view(1))


def test_nothing_is_asked_of_the_device_before_it_is_collected(monkeypatch):
    select, state, memory = selection(), {}, torch.zeros(600, device=DEVICE)
    feed = GradientUpdate(randn(600), 0.1)

    def refuse(*_, **__):
        raise AssertionError("take() waits for the device")

    with monkeypatch.context() as patch:
        for name in ("item", "nonzero", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        pending = [select.take(memory, feed, 6, 0.7, state) for _ in range(2)]
        pending.append(select.take(memory, None, 600, 0.0, state))
    assert all(one.collect().values.numel() for one in pending)


@pytest.mark.parametrize(("n", "k"), [(0, 1), (10, 0)])
def test_there_must_be_something_to_take(n, k):
    with pytest.raises(ValueError, match=f"{k} of {n} elements"):
        selection().take(torch.zeros(n, device=DEVICE), None, k, 0.0, {})


def test_the_kernels_compile_for_two_generations_of_gpus(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_kernels.py")
    root = script.parents[3]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), "80", "90"]
    answer = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr
