"""A model's tensors on a device are compressed at once: in Triton's interpreter, or on a GPU where one is."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton")

import psclient
from psclient.compress.gradients import finite, norms, refuse_unsound
from psclient.errors import NonFiniteGradientError, UpdateOverflowError
from psclient.model.replica import Replica
from psclient.optim.asgd import METHOD as ASGD
from psclient.optim.dgc import METHOD as DGC
from psclient.optim.dgs import METHOD as DGS
from psclient.optim.gradient_dropping import METHOD as DROPPING
from psclient.report import StepReport
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.cuda import launches as cuda
from pscore.selection.cuda.launches import DeviceKernels, UnsoundError
from tests.psclient.compress.test_host_table import HYPER, METHODS, Model, same
from tests.pscore.kernel_makers import DEVICE, randn
from tests.tiers import long_but

SHAPES = [(3,), (30, 40), (7,), (2000,), (50, 9)]
DTYPES = [torch.float32, torch.float16, torch.float32, torch.bfloat16, torch.float32]


FULL = {"momentum": 0.7, "weight_decay": 0.01, "lr": 0.3}


def made(method, hyper, kernels, dense_below=0, groups=1):
    tensors = [randn(torch.Size(shape).numel(), 77 + n).reshape(shape) for n, shape in enumerate(SHAPES)]
    device = DEVICE if kernels is not None else torch.device("cpu")
    tensors = [each.to(device, dtype) for each, dtype in zip(tensors, DTYPES, strict=True)]
    return Model(method, tensors, [hyper] * groups, dense_below, on_device=lambda _: kernels)


def gradients_of(model, seed, without=()):
    found = {}
    for n, parameter in enumerate(model.parameters):
        gradient = randn(parameter.numel(), 10 * seed + n).reshape(parameter.shape) * 0.1
        found[n] = gradient.to(parameter.device, parameter.dtype)
    return {n: gradient for n, gradient in found.items() if n not in without}


def on_host(memories):
    return [{name: memory.cpu() for name, memory in each.items()} for each in memories]


@pytest.mark.parametrize("method", long_but([DGC, DGS], METHODS), ids=lambda method: method.name)
@pytest.mark.parametrize("hyper", long_but([FULL], [{}, FULL]))
def test_where_all_is_sent_memories_and_entries_have_the_bits_of_the_host(method, hyper):
    hyper = HYPER | hyper | {"density": 1.0}
    device, host = made(method, hyper, DeviceKernels(DEVICE, block=2048, part=2048)), made(method, hyper, None)
    for step in range(2):
        without = () if step else (3,)
        joined, dense = device.compress(gradients_of(device, step, without), 0.5)
        _, expected = host.compress(gradients_of(host, step, without), 0.5)
        assert torch.equal(dense, expected)
        assert device.sent.entries == host.sent.entries
        assert all(each.values.is_cpu for each in joined)
        same(on_host(device.memories()), host.memories())


@pytest.mark.long
@pytest.mark.parametrize("method", long_but([DGC], [DGC, DGS]))
def test_what_is_not_sent_stays_and_a_refused_push_returns(method):
    hyper = HYPER | {"density": 0.05}
    model = made(method, hyper, DeviceKernels(DEVICE, block=2048, part=2048), dense_below=100)
    for step in range(2):
        model.compress(gradients_of(model, step))
    before = on_host(model.memories())
    joined, _ = model.compress(gradients_of(model, 9, without=range(5)))
    assert joined == []
    joined, _ = model.compress({n: torch.zeros_like(p) for n, p in enumerate(model.parameters)})
    assert model.report.selected_entries > 0
    assert abs(model.report.selected_entries - model.report.wanted_entries) <= 45
    model.compressor.restore(joined)
    for now, then in zip(on_host(model.memories()), before, strict=True):
        if method is DGS:
            torch.testing.assert_close(now["residual"], then["residual"])
        else:
            torch.testing.assert_close(now["residual"], then["residual"] + 0.9 * then["momentum"])


def test_a_refused_push_returns_with_the_bits_of_the_host():
    hyper = HYPER | {"density": 1.0, "momentum": 0.3}
    device, host = made(DGS, hyper, DeviceKernels(DEVICE)), made(DGS, hyper, None)
    for model in (device, host):
        joined, _ = model.compress(gradients_of(model, 1))
        model.compressor.restore(joined)
    same(on_host(device.memories()), host.memories())


def test_a_state_goes_on_from_the_host_to_a_device_and_back():
    """Thresholds and drifts are kept under the same names: nothing is searched for anew."""
    hyper, searches = HYPER | {"density": 0.2, "lr": 0.1, "momentum": 0.0}, []
    kernels = DeviceKernels(DEVICE, block=2048, part=2048)
    launch = kernels.launch
    kernels.launch = lambda *a, search=False, **kw: searches.append(search) or launch(*a, search=search, **kw)
    device, host = made(DGS, hyper, kernels), made(DGS, hyper, None)
    for step in range(6):
        host.compress(gradients_of(host, step))
    for ours, theirs in zip(device.parameters, host.parameters, strict=True):
        device.states[ours] = copy.deepcopy(host.states[theirs])
        device.states[ours]["residual"] = device.states[ours]["residual"].to(DEVICE)
    device.compress(gradients_of(device, 6))
    assert searches.count(True) <= 1
    for ours, theirs in zip(device.parameters, host.parameters, strict=True):
        assert device.states[ours]["recall"].keys() == host.states[theirs]["recall"].keys() == {"threshold", "drift"}
        host.states[theirs] = copy.deepcopy(device.states[ours])
        host.states[theirs]["residual"] = host.states[theirs]["residual"].cpu()
    _, dense = host.compress(gradients_of(host, 7))
    assert 0 < int(dense.count_nonzero()) < dense.numel() // 2


def test_an_update_that_overflows_leaves_finite_memories():
    model = made(DGS, HYPER | {"density": 0.5, "lr": 1e38}, DeviceKernels(DEVICE, block=2048, part=2048))
    gradients = gradients_of(model, 0)
    gradients[3] *= 1e4
    with pytest.raises(UpdateOverflowError, match="3"):
        model.compress(gradients)
    assert all(bool(memory["residual"].isfinite().all()) for memory in model.memories())


@pytest.mark.parametrize("method", long_but([DGS], METHODS), ids=lambda method: method.name)
def test_gradients_that_are_not_finite_change_nothing_though_nobody_waits_for_their_check(method):
    model = made(method, HYPER | {"density": 0.1, "momentum": 0.5}, DeviceKernels(DEVICE, block=2048, part=2048))
    model.compress(gradients_of(model, 0))
    before, recalls = on_host(model.memories()), copy.deepcopy([state.get("recall") for state in model.states.values()])
    gradients = gradients_of(model, 1)
    gradients[3][5] = float("nan")
    ready = finite(model.described, gradients, waits=False)
    with pytest.raises(UnsoundError):
        model.compressor.compress(range(5), ready, 1.0, StepReport(0))
    with pytest.raises(NonFiniteGradientError, match="3"):
        refuse_unsound(model.described, ready)
    same(on_host(model.memories()), before)
    assert [state.get("recall") for state in model.states.values()] == recalls


@pytest.mark.long
@pytest.mark.parametrize("bound", [0.1, 1e6])
def test_a_clip_on_the_device_has_the_bits_of_the_host(bound):
    clipped = []
    for kernels in (DeviceKernels(DEVICE), None):
        model = made(DGC, HYPER | {"density": 1.0, "momentum": 0.3}, kernels)
        gradients = gradients_of(model, 1)
        clip = psclient.DGC._gradient_scale(SimpleNamespace(clip_norm=bound), list(gradients.values()), 4)
        clipped.append(model.compress(gradients, clip if kernels else float(clip))[1].cpu())
    assert torch.equal(*clipped)
    assert bool(clipped[0].any())


def test_a_norm_that_overflows_is_no_reason_to_refuse_finite_gradients():
    model = made(DGS, HYPER | {"density": 1.0}, DeviceKernels(DEVICE, block=2048, part=2048))
    gradients = gradients_of(model, 1)
    gradients[4][0, :] = 3e38
    ready = finite(model.described, gradients, waits=False)
    with pytest.raises(UnsoundError):
        model.compressor.compress(range(5), ready, 1.0, StepReport(0))
    refuse_unsound(model.described, ready)
    _, dense = model.compress(ready)
    assert bool(dense.isfinite().all())


def on_devices_of_the_host(method, hyper, kernels):
    """A model whose odd tensors are on another device than the even ones, with kernels by device."""
    if DEVICE.type != "cpu":
        pytest.skip("the devices are the host's, for the interpreter")

    class Placed(nn.Parameter):
        device = property(lambda self: torch.device("cpu", self.numel() % 2))

    model = Model(method, [randn(n) for n in (100, 101, 200, 201)], [HYPER | hyper], 0)
    for parameter in model.parameters:
        parameter.__class__ = Placed
    choice = model.compressor._choice
    object.__setattr__(choice, "on_device", kernels.get)
    model.compressor.__init__(
        method, model.described, model.states, model.compressor._groups, choice, model.compressor._grouping
    )
    return model


def test_all_devices_work_before_the_first_is_waited_for():
    order = []

    class Noted(DeviceKernels):
        def __init__(self, name):
            super().__init__(torch.device("cpu"), block=2048, part=2048)
            self.name = name

        def launch(self, *arguments, **options):
            order.append(("launch", self.name))
            pending = super().launch(*arguments, **options)
            wait = pending.wait
            pending.wait = lambda: order.append(("wait", self.name)) or wait()
            return pending

    model = on_devices_of_the_host(DGS, {"density": 1.0}, {torch.device("cpu", n): Noted(n) for n in range(2)})
    _, dense = model.compress(gradients_of(model, 1))
    assert [kind for kind, _ in order[:3]] == ["launch", "launch", "wait"]
    assert {name for _, name in order[:2]} == {0, 1}
    assert torch.equal(dense, torch.cat([gradient * 0.1 for gradient in gradients_of(model, 1).values()]))


@pytest.mark.long
@pytest.mark.parametrize("failing", long_but([1], [0, 1]))
def test_an_error_of_one_device_loses_no_entry_of_any(failing):
    """The search of one device fails, while the other's entries have been collected, or are under way."""

    class Failing(DeviceKernels):
        fails = False

        def launch(self, *arguments, search=False, **options):
            if search and self.fails:
                raise torch.OutOfMemoryError("no memory on the device")
            return super().launch(*arguments, search=search, **options)

    kernels = {torch.device("cpu", n): Failing(DEVICE) for n in range(2)}
    model = on_devices_of_the_host(DROPPING, {"density": 0.1}, kernels)
    given = gradients_of(model, 1)
    model.compressor.restore(model.compress(given)[0])
    kernels[torch.device("cpu", failing)].fails = True
    for parameter in model.parameters:
        if parameter.device.index == failing:
            model.states[parameter]["recall"]["threshold"] = 1e9
    with pytest.raises(torch.OutOfMemoryError):
        model.compress({n: torch.zeros_like(gradient) for n, gradient in given.items()})
    for gradient, state in zip(given.values(), model.memories(), strict=True):
        assert torch.equal(state["residual"].flatten(), gradient.flatten() * 0.1)


class Launched:
    """Triton's kernels, or one of them for a grid, whose launches are counted."""

    def __init__(self, real, counts):
        self._real, self._counts = real, counts

    def __getattr__(self, name):
        return Launched(getattr(self._real, name), self._counts)

    def __getitem__(self, grid):
        return Launched(self._real[grid], self._counts)

    def __call__(self, *arguments, **options):
        self._counts.launches += 1
        with _disable_current_modes():
            self._real(*arguments, **options)


class Counts(TorchDispatchMode):
    """Counts torch's operations, apart those for whose result the host waits; launches; and copies."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item")

    def __init__(self, patch, kernels):
        super().__init__()
        self.operations = self.waits = self.launches = self.up = self.down = self.fetched = 0
        kernels._kernels = Launched(kernels._kernels, self)
        to_device, wait = cuda.to_device, cuda.Pending.wait
        copy_to_host = cuda.SideStream.copy_to_host

        def upload(*arguments):
            self.up += 1
            with _disable_current_modes():
                return to_device(*arguments)

        def download(own, tensor):
            self.down += 1
            return copy_to_host(own, tensor)

        def waited(own):
            self.fetched += 1
            wait(own)

        patch.setattr(cuda, "to_device", upload)
        patch.setattr(cuda.SideStream, "copy_to_host", download)
        patch.setattr(cuda.Pending, "wait", waited)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        self.waits += any(name in function.__name__ for name in self.WAITS)
        return function(*args, **(kwargs or {}))


@pytest.mark.long
@pytest.mark.parametrize("method", [ASGD, DGC, DGS])
def test_a_warm_step_costs_the_same_calls_for_few_tensors_and_for_many(method, monkeypatch):
    """Check, selection, a refused push that returns, and a reply: of 4 tensors, and of 24."""
    found = []
    for count in (4, 24):
        with monkeypatch.context() as patch:
            kernels = DeviceKernels(DEVICE, block=2048, part=2048)
            tensors = [randn(60, n).to(DEVICE) for n in range(count)]
            model = Model(method, tensors, [HYPER | {"density": 0.1}], 50, on_device=lambda _, own=kernels: own)
            replica = Replica(model.described.layout, model.parameters, on_device=lambda _, own=kernels: own)
            size, parts = model.described.layout.size, {}
            for state in (0, 1):  # the second step is warm
                for parameter in model.parameters if state else ():
                    model.states[parameter].setdefault("recall", {}).update(threshold=0.0, drift=0.0)
                    if "residual" in model.states[parameter]:
                        model.states[parameter]["residual"].zero_()[:3] = 9.0
                gradients = {n: torch.zeros_like(p) for n, p in enumerate(model.parameters)}
                counts = Counts(patch, kernels) if state else None
                with counts or _disable_current_modes():
                    ready = finite(model.described, gradients, waits=False)
                    clip = psclient.DGC._gradient_scale(SimpleNamespace(clip_norm=0.1), list(ready.values()), 4)
                    sent = model.compressor.compress(range(count), ready, clip, StepReport(0))
                if counts is not None:
                    parts["select"] = (counts.launches, counts.up, counts.down, counts.fetched, counts.waits)
                    with counts:
                        model.compressor.restore(sent.slices)
                        replica.write([SparseSlice(Span(0, size), torch.arange(0, size, 7), torch.ones(-(-size // 7)))])
                        float(norms(gradients.values()).sum())
                    parts["all"] = (counts.launches, counts.up, counts.down, counts.fetched, counts.waits)
            assert sent.entries.keys() == set(range(count))
            found.append(parts)
    assert found[0] == found[1]
    launches = 1 if method is ASGD else 4
    assert found[0]["select"] == (launches, 1, 1, 1, 0)
    assert found[0]["all"] == (launches + 2, 3, 1, 1, 1)


def test_the_check_of_gradients_waits_once(monkeypatch):
    model = made(DGS, HYPER, DeviceKernels(DEVICE))
    gradients = gradients_of(model, 0)
    monkeypatch.setattr("psclient.compress.gradients._is_cpu", lambda _: False)  # as on a device
    waits = []
    is_true = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda own: waits.append(1) or is_true(own))
    finite(model.described, gradients)
    assert waits == [1]
    gradients[3][5] = float("inf")
    with pytest.raises(NonFiniteGradientError):
        finite(model.described, gradients)


def in_groups(model, *ends):
    """Have a model push in groups, the last one first, that end before these positions."""
    edges = [0, *ends, len(model.parameters)]
    model.grouping.groups = tuple(range(*pair) for pair in reversed([*itertools.pairwise(edges)]))
    return model


def launches_of(kernels, patch):
    """Of each series of launches from now on, whether it searches."""
    searches, launch = [], kernels.launch
    patch.setattr(kernels, "launch", lambda *a, **k: searches.append(k.get("search", False)) or launch(*a, **k))
    return searches


def compressed(model, gradients):
    """What each group sends, and the whole of it as a dense layout."""
    model.of_groups.read()
    dense = torch.zeros(model.described.layout.size)
    for group in model.grouping.groups:
        sent = model.compressor.compress(group, gradients, 1.0, StepReport(0))
        assert sent.entries.keys() == {n for n in group if n in gradients}
        assert sum(sent.entries.values()) == sum(each.entries for each in sent.slices)
        for each in sent.slices:
            where = slice(None) if each.offsets is None else each.offsets
            dense[each.span.start : each.span.end][where] = each.values
    return dense


@pytest.mark.long
def test_groups_of_one_device_are_selected_from_by_one_series_of_launches(monkeypatch):
    """And each group gets its own part: what is sent, and what is kept, has the bits of one group."""
    hyper = HYPER | {"density": 0.1, "momentum": 0.3}
    kernels = DeviceKernels(DEVICE, block=2048, part=2048)
    ours, one = (
        in_groups(made(DGS, hyper, kernels), 1, 4),
        made(DGS, hyper, DeviceKernels(DEVICE, block=2048, part=2048)),
    )
    for step in range(3):
        gradients = finite(ours.described, gradients_of(ours, step, without=(2,)))
        with monkeypatch.context() as patch:
            searches = launches_of(kernels, patch)
            dense = compressed(ours, gradients)
        assert searches.count(False) == 1
        assert torch.equal(dense, one.compress(gradients_of(one, step, without=(2,)))[1])
        same(on_host(ours.memories()), on_host(one.memories()))


@pytest.mark.long
def test_groups_that_nobody_asks_for_return_to_the_residuals():
    hyper = HYPER | {"density": 0.1, "momentum": 0.0}
    given = {"kernels": DeviceKernels(DEVICE, block=2048, part=2048)}
    ours, one = in_groups(made(DROPPING, hyper, **given), 1, 4), made(DROPPING, hyper, **given)
    gradients = finite(ours.described, gradients_of(ours, 0))
    ours.of_groups.read()
    first = ours.compressor.compress(ours.grouping.groups[0], gradients, 1.0, StepReport(0))
    ours.compressor.abandon()
    ours.compressor.restore(first.slices)
    ours.compressor.abandon()  # harmless twice
    one.compress(gradients_of(one, 0))
    one.compressor.restore(one.sent.slices)
    same(on_host(ours.memories()), on_host(one.memories()))


@pytest.mark.long
def test_dense_groups_are_written_out_one_by_one_and_so_are_outputs_that_are_too_large(monkeypatch):
    for method, density, most in ((ASGD, 1.0, None), (DROPPING, 0.1, 1000)):
        kernels = DeviceKernels(DEVICE, block=2048, part=2048)
        ours = in_groups(made(method, HYPER | {"density": density}, kernels), 1, 4)
        one = made(method, HYPER | {"density": density}, DeviceKernels(DEVICE, block=2048, part=2048))
        with monkeypatch.context() as patch:
            if most is not None:
                patch.setattr("psclient.compress.selector._MOST_AT_ONCE", most)
            searches = launches_of(kernels, patch)
            dense = compressed(ours, finite(ours.described, gradients_of(ours, 0)))
        assert searches.count(False) == 3
        assert torch.equal(dense, one.compress(gradients_of(one, 0))[1])
