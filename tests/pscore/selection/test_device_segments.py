"""Selection on a device against the host's loops, bit for bit: in Triton's interpreter, or on a GPU where one is."""

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pscore.selection.cuda import device_kernels
from pscore.selection.cuda import launches as cuda
from pscore.selection.cuda import segments as device
from pscore.selection.cuda.segments import DeviceSegments
from pscore.selection.exact import exact
from tests.pscore.kernel_makers import DEVICE, Twins, randn, same_bits
from tests.pscore.selection_reference import Tensor, warm
from tests.tiers import long_but

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 7, 255, 256, 600, 513]


def alike(twins, selected, expected):
    """The device's entries, memories and momenta have the bits of the host's."""
    offsets, values, counts = expected
    assert selected.offsets.dtype == np.int64
    np.testing.assert_array_equal(selected.offsets, offsets)
    np.testing.assert_array_equal(selected.values.view(np.int32), values.view(np.int32))
    np.testing.assert_array_equal(selected.counts, counts)
    assert same_bits(twins.memory, torch.from_numpy(twins.host["memory"]))
    assert same_bits(twins.momentum, torch.from_numpy(twins.host["momentum"]))


@pytest.mark.parametrize("form", ["plain", "momentum"])
@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], DTYPES), ids=str)
@pytest.mark.parametrize("shift", long_but([1], [0, 1]))
def test_every_recurrence_has_the_bits_of_the_host(form, dtype, shift):
    twins = Twins(SIZES, shift=shift)
    twins.want(twins.sizes, searched=False)
    twins.rows["keep"] = 0.7
    for step in range(2):
        twins.give("gradient", [randn(n, step * 10 + n).to(dtype) for n in SIZES], shift)
        if form != "plain":
            twins.give("parameters", [randn(n, n + 5).to(DTYPES[(n + step) % 3]) for n in SIZES], shift)
            twins.rows["scale"], twins.rows["decay"], twins.rows["factor"] = 0.3, 0.01, 0.9
            twins.rows["retain"], twins.rows["rate"] = 0.8, 0.1
        twins.rows["threshold"] = [0, -1, 0.05, 0.2, 0.1, 0.3]
        alike(twins, twins.select({}, clip=0.37), twins.on_host(clip=0.37))


def test_one_table_may_have_every_kind_of_gradient():
    twins = Twins([300, 512, 700])
    twins.want(twins.sizes, searched=False)
    twins.give("gradient", [randn(n, n).to(dtype) for n, dtype in zip(twins.sizes.tolist(), DTYPES, strict=True)])
    alike(twins, twins.select({}), twins.on_host())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_numbers_are_treated_as_on_the_host(dtype):
    odd = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -1e-45, 3e-8, 6e-5, 65504.0]
    gradient = torch.tensor(odd * 60).to(dtype)
    twins = Twins([gradient.numel()], memory=torch.zeros(gradient.numel()))
    twins.want(twins.sizes, searched=False)
    twins.give("gradient", [gradient])
    with np.errstate(invalid="ignore"):
        alike(twins, twins.select({}), twins.on_host())


@pytest.mark.long
def test_a_tensor_of_many_blocks_of_the_usual_size():
    n, k = 2**20 + 3, 10_000
    twins = Twins([n], block=32768)
    twins.want([k])
    twins.give("gradient", [randn(n)])
    twins.rows["keep"] = 0.5
    state = {"threshold": 2.6}
    selected = twins.select({0: state})
    twins.rows["threshold"] = 2.6
    alike(twins, selected, twins.on_host())
    assert abs(selected.counts[0] - k) <= 0.1 * k
    assert state["threshold"] != 2.6


def test_accepted_numbers_become_those_of_the_hosts_rule():
    n, k = 3000, 300
    x, threshold = randn(n), 1.6
    twins, state, own = Twins([n], memory=x.clone()), {"threshold": threshold}, {"threshold": threshold}
    twins.want([k])
    selected = twins.select({0: state})
    offsets, _ = warm(Tensor(x.numpy().copy()), k, own)
    assert selected.counts[0] == offsets.size
    assert state.keys() == own.keys() == {"threshold", "drift"}
    assert state == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize("threshold", long_but([1.1], [1.1, 1.3]))
def test_of_a_surplus_the_largest_stay_as_on_the_host_and_one_launch_puts_back_the_rest(threshold):
    """With equal magnitudes; the momentum is cleared where entries stay taken, and only there."""
    n, k = 3000, 300
    x, calls = torch.cat([(8 * randn(n)).round() / 8, randn(n, 1)]), []
    state, own = {"threshold": threshold}, {"threshold": threshold}
    twins = Twins([n, n], memory=x.clone())
    twins.want([k, k])
    twins.rows["masked"], twins.rows["keep"] = [True, False], 0.5
    kernels, momentum = twins.segments._kernels, twins.momentum.cpu().clone()
    for name in ("launch", "scatter"):
        real = getattr(kernels, name)
        setattr(kernels, name, lambda *a, real=real, name=name, **kw: calls.append(name) or real(*a, **kw))
    selected = twins.select({0: state, 1: {"threshold": 1.645}})
    memory = x[:n].clone()
    offsets, values = warm(Tensor(memory.numpy(), 0.5), k, own)
    assert calls == ["launch", "scatter"]
    assert selected.counts[0] == offsets.size == k
    np.testing.assert_array_equal(selected.offsets[:k], offsets)
    assert same_bits(torch.from_numpy(selected.values[:k]), torch.from_numpy(values))
    assert same_bits(twins.memory[:n], memory)
    assert state == pytest.approx(own, rel=1e-6)
    assert same_bits(twins.momentum, momentum.index_fill(0, torch.from_numpy(offsets), 0.0))


@pytest.mark.parametrize("failing", long_but(["_search"], ["_keep_largest", "_search", "rank"]))
def test_after_an_error_in_a_correction_the_memories_have_their_entries_again(failing, monkeypatch):
    """A row is accepted, one has a surplus, one is searched, and one, of equal magnitudes, is ranked after that."""
    x = [randn(500, 1), randn(500, 2), randn(500, 3), torch.ones(500)]
    twins = Twins([500] * 4, memory=torch.cat(x))
    twins.want([100] * 4)
    states = {row: {"threshold": threshold} for row, threshold in enumerate([1.28, 1.1, 3.0, 0.5])}

    def fail(*_):
        raise torch.OutOfMemoryError("no memory on the device")

    monkeypatch.setattr(*((device, "rank") if failing == "rank" else (twins.segments, failing)), fail)
    with pytest.raises(torch.OutOfMemoryError):
        twins.select(states)
    assert same_bits(twins.memory, torch.cat(x))
    monkeypatch.undo()
    assert twins.select(states).counts[3] == 100


def test_momentum_is_cleared_where_a_masked_row_is_taken():
    twins = Twins([500, 500])
    twins.want(twins.sizes, searched=False)
    twins.rows["masked"] = [True, False]
    twins.rows["threshold"] = 0.1
    before = twins.momentum.clone()
    selected = twins.select({})
    cleared = torch.zeros(1000, dtype=torch.bool)
    cleared[selected.offsets[selected.offsets < 500]] = True
    assert selected.counts.min() > 0
    assert torch.equal(twins.momentum.cpu(), torch.where(cleared, 0.0, before.cpu()))


@pytest.mark.parametrize(
    "kind", long_but(["normal", "half zeros"], ["normal", "laplace", "student", "mixed", "half zeros"])
)
def test_a_cold_start_finds_the_threshold(kind):
    n = 6000
    x = randn(n)
    x = {
        "normal": x,
        "laplace": x.sign() * -torch.log1p(-(torch.erf(x.abs() / 2**0.5) * 0.999999)),
        "student": x / ((randn(n, 1) ** 2 + randn(n, 2) ** 2 + randn(n, 3) ** 2) / 3).sqrt(),
        "mixed": x * torch.where(torch.arange(n) < n // 20, 1e20, 1e-20),
        "half zeros": x * (randn(n, 4) > 0),
    }[kind]
    k = [600, 60, 6, 1]
    twins, states = Twins([n] * 4, block=2048, memory=x.repeat(4)), {row: {} for row in range(4)}
    twins.want(k)
    before = twins.memory.cpu().clone()
    selected = twins.select(states)
    slack = np.maximum(0.1 * np.array(k), 2 * np.sqrt(k))
    assert (np.abs(selected.counts - k) <= slack).all()
    offsets = torch.from_numpy(selected.offsets)
    assert same_bits(torch.from_numpy(selected.values), before[offsets])
    left = before.index_fill(0, offsets, 0.0)
    assert torch.equal(twins.memory.cpu(), left)
    for row, part in enumerate(offsets.split(selected.counts.tolist())):
        assert before[part].abs().min() > left[row * n : (row + 1) * n].abs().max()
    assert all(state["threshold"] > 0 for state in states.values())


@pytest.mark.parametrize(
    "start", long_but([{}], [{}, {"threshold": 1e-3, "drift": 0.0}, {"threshold": 99.0}, {"ranked": 2}])
)
def test_equal_magnitudes_are_taken_in_ascending_order(start):
    n, k = 2000, 20
    x = torch.full((n,), -0.25)
    x[1500:1507] = 0.5
    twins, state = Twins([n], memory=x.clone()), dict(start)
    twins.want([k])
    twins.rows["masked"] = True
    selected = twins.select({0: state})
    expected = torch.from_numpy(exact(x.numpy(), k))
    np.testing.assert_array_equal(selected.offsets, expected.numpy())
    assert same_bits(torch.from_numpy(selected.values), x[expected])
    x[expected] *= 0
    assert same_bits(twins.memory, x)
    assert not twins.momentum[selected.offsets].any()
    below = float(np.nextafter(np.float32(0.25), np.float32(0)))
    assert state == ({"ranked": 1} if "ranked" in start else {"threshold": below, "drift": 0.0})


@pytest.mark.long
def test_where_fewer_than_k_are_not_zero_all_of_them_go():
    for start in ({}, {"threshold": 0.3}, {"threshold": 0.0}):
        memory, state = torch.zeros(2000), dict(start)
        memory[::100] = randn(20)
        twins = Twins([2000], memory=memory)
        twins.want([100])
        selected = twins.select({0: state})
        assert selected.offsets.tolist() == list(range(0, 2000, 100))
        assert state["threshold"] == 0.0
        assert not twins.memory.any()


def test_nothing_is_taken_from_zeros():
    twins, states = Twins([300] * 3, memory=torch.zeros(900)), {0: {}, 1: {}}
    twins.want([1, 30, 300])
    for _ in range(2):
        assert twins.select(states).counts.tolist() == [0, 0, 0]


def test_only_tensors_that_miss_are_searched(monkeypatch):
    searched = []
    search = DeviceSegments._search
    monkeypatch.setattr(
        DeviceSegments, "_search", lambda own, rows: searched.append(rows.tolist()) or search(own, rows)
    )
    states = {row: {"threshold": threshold} for row, threshold in enumerate((1.65, 9.0, 1.6))}
    twins = Twins([1000] * 3, memory=randn(3000))
    twins.want([100] * 3)
    selected = twins.select(states)
    assert searched == [[1]]
    assert (np.abs(selected.counts - 100) <= 20).all()
    assert bool((np.diff(selected.offsets) > 0).all())


@pytest.mark.long
def test_the_same_calls_give_the_same_bits_and_a_state_goes_on():
    def run(twins, states, steps):
        found = []
        for step in steps:
            twins.give("gradient", [0.1 * randn(1000, step), 0.1 * randn(2000, step)])
            selected = twins.select(states)
            found += [torch.from_numpy(selected.offsets), torch.from_numpy(selected.values)]
        return [*found, twins.memory.clone()]

    def made(memory=None):
        twins = Twins([1000, 2000], block=1024, memory=memory)
        twins.want([50, 100])
        twins.rows["keep"] = 0.7
        return twins

    states = {0: {}, 1: {}}
    one, first = made(), run(made(), copy.deepcopy(states), range(4))
    run(one, states, range(2))
    other = run(made(one.memory.cpu()), copy.deepcopy(states), range(2, 4))
    for left, right in zip(first[4:], other, strict=True):
        assert torch.equal(left, right)


@pytest.mark.long
def test_the_threshold_follows_a_run_and_a_drop_of_the_learning_rate():
    n, k, drop = 4096, 409, 16
    twins, state, launches = Twins([n], block=4096, memory=torch.zeros(n)), {}, []
    twins.want([k])
    twins.rows["keep"] = 0.7
    launch = twins.segments._kernels.launch
    twins.segments._kernels.launch = lambda *a, **kw: launches.append(step) or launch(*a, **kw)
    for step in range(20):
        twins.give("gradient", [randn(n, step) * (0.1 if step < drop else 0.01)])
        assert abs(twins.select({0: state}).counts[0] - k) <= 0.1 * k
    assert sum(launches.count(step) == 2 for step in range(8, drop)) <= 3, "thresholds are predicted"


def test_nothing_is_asked_of_the_device_before_it_is_collected(monkeypatch):
    twins, states = Twins([600, 600]), {0: {"threshold": 0.2}}
    twins.want([60, 600])
    twins.align()

    def refuse(*_, **__):
        raise AssertionError("launch() waits for the device")

    with monkeypatch.context() as patch:
        for name in ("item", "nonzero", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        twins.segments.launch(1.0, states)
    selected = twins.segments.collect(twins.parts(twins.memory), {})
    assert selected.counts[1] == 600


def test_tensors_that_are_whole_are_written_out():
    twins = Twins([5, 300, 1000])
    twins.give("gradient", [randn(n, n) for n in twins.sizes.tolist()])
    twins.want(twins.sizes, searched=False)
    twins.rows["whole"], twins.rows["unit"], twins.rows["retain"] = True, 0.5, 0.25
    twins.rows["memory"][1] = 0
    twins.align()
    before = twins.memory.cpu().clone()
    twins.segments.launch(2.0, {})
    values = twins.segments.whole()
    gradients = torch.cat([randn(n, n) for n in twins.sizes.tolist()])
    has_memory = torch.ones(1305, dtype=torch.bool)
    has_memory[5:305] = False
    expected = 0.5 * torch.where(has_memory, 0.25 * before + 2.0 * gradients, 2.0 * gradients)
    assert same_bits(values, expected)
    assert same_bits(twins.memory, before)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_entries_are_scattered_to_tensors(dtype, sparse, adds):
    sizes = [3, 5000, 1, 700]
    x, master = [randn(n, n).to(dtype).to(DEVICE) for n in sizes], [randn(n, n).to(DEVICE) for n in sizes]
    expected = [each.cpu().clone() for each in x]
    masters = [each.cpu().clone() for each in master]
    where = [torch.arange(n) if not sparse else (randn(n, 7) > 1).nonzero().view(-1) for n in sizes]
    values = [randn(each.numel(), 8) for each in where]
    targets = np.zeros(4, cuda.TARGET)
    targets["address"] = [each.data_ptr() for each in x]
    targets["master"] = [each.data_ptr() for each in (x if dtype is torch.float32 else master)]
    targets["kind"] = cuda.KINDS[dtype]
    counts = np.array([each.numel() for each in where])
    offsets = torch.cat([each + 10_000 * row for row, each in enumerate(where)]).numpy()
    targets["shift"] = -10_000 * np.arange(4) if sparse else -(np.cumsum(counts) - counts)
    kernels = cuda.DeviceKernels(DEVICE)
    kernels.scatter(targets, counts, offsets if sparse else None, torch.cat(values).numpy(), adds=adds)
    for each, copy_, at, value in zip(expected, masters, where, values, strict=True):
        if adds and dtype is torch.float32:
            each[at] += value
        elif adds:
            copy_[at] += value
            each[at] = copy_[at].to(dtype)
        else:
            each[at] = value.to(dtype)
    for got, wanted in zip(x, expected, strict=True):
        assert torch.equal(got.cpu(), wanted)
    if adds and dtype is not torch.float32:
        assert all(map(torch.equal, (each.cpu() for each in master), masters))


def test_that_the_host_stands_in_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: False)
    device_kernels.cache_clear()
    with caplog.at_level(logging.WARNING, logger="pscore"):
        assert device_kernels(torch.device("cuda")) is None
        assert device_kernels(torch.device("cuda")) is None
    device_kernels.cache_clear()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["Triton is not installed"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_kernels_compile_for_two_generations_of_gpus(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_kernels.py")
    root = script.parents[3]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), "80", "90"]
    answer = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=500)
    assert answer.returncode == 0, answer.stderr
