"""The compiled pass over all tensors does what plain torch operations do tensor by tensor, bit for bit."""

import copy
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from psclient.compress.choice import Choice
from psclient.compress.compressor import Compressor
from psclient.compress.gradients import Gradients
from psclient.compress.groups import ParamGroups
from psclient.engine.checks import finite
from psclient.engine.engine import joined
from psclient.errors import ModelChangedError, NonFiniteGradientError, UpdateOverflowError
from psclient.model.module import describe
from psclient.optim.asgd import METHOD as ASGD
from psclient.optim.dgc import METHOD as DGC
from psclient.optim.dgs import METHOD as DGS
from psclient.optim.gradient_dropping import METHOD as DROPPING
from psclient.optim.outer import METHOD as OUTER
from psclient.optim.server_optimizer import METHOD as SERVER
from psclient.optim.ssgd import METHOD as SSGD
from psclient.optim.wagma import METHOD as WAGMA
from psclient.report import StepReport
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SELECTORS
from pscore.selection.host import segments

METHODS = (ASGD, DGC, DGS, DROPPING, OUTER, SERVER, SSGD, WAGMA)
NEVER = 1 << 60
HYPER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "decay": 1.0, "density": 0.1}
some = settings(deadline=None, max_examples=40)


class Model:
    """Parameters, and a compressor of their gradients."""

    def __init__(self, method, tensors, groups, dense_below, compiled_from, on_device=lambda _: None):
        self.parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
        owned = np.array_split(np.arange(len(tensors)), len(groups))
        self.groups = [
            group | {"params": [self.parameters[n] for n in own]} for group, own in zip(groups, owned, strict=True)
        ]
        self.described = describe(None, self.groups)
        self.states = defaultdict(dict)
        choice = Choice(SELECTORS["warm"], "tensor", dense_below, on_device=on_device, compiled_from=compiled_from)
        grouping = SimpleNamespace(densities={})
        self.of_groups = ParamGroups(self.groups)
        self.of_groups.read()
        self.compressor = Compressor(method, self.described, self.states, self.of_groups, choice, grouping)

    def compress(self, gradients, clip=1.0):
        """What the model sends, whole: offsets in the layout and values."""
        size = self.described.layout.size
        self.report = StepReport(0)
        self.of_groups.read()  # a test may have changed them
        self.sent = self.compressor.compress(range(len(self.parameters)), Gradients(gradients), clip, self.report)
        pieces = joined(Span(0, size), self.sent.slices)
        dense = torch.zeros(size)
        for each in pieces:
            if each.offsets is None:
                dense[each.span.start : each.span.end] = each.values
            else:
                dense[each.offsets + each.span.start] = each.values
        return pieces, dense

    def memories(self):
        return [
            {name: memory.clone() for name, memory in self.states[p].items() if isinstance(memory, torch.Tensor)}
            for p in self.parameters
        ]


def same(ours, theirs):
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.keys() == yours.keys()
        for name in mine:
            assert torch.equal(mine[name], yours[name]), name


hyper = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.1, 1.0, 3.0]),
        "momentum": st.sampled_from([0.0, 0.7]),
        "weight_decay": st.sampled_from([0.0, 0.01]),
        "decay": st.sampled_from([1.0, 0.5]),
        "density": st.sampled_from([0.02, 0.3, 1.0]),
    }
)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    st.lists(hyper, min_size=1, max_size=2),
    st.sampled_from([0, 60]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([1.0, 0.3]),
    st.integers(0, 2**16),
)
@some
def test_all_tensors_at_once_are_as_each_by_itself(method, sizes, groups, dense_below, dtype, clip, seed):
    """Entries, memories and reports are the same at the same thresholds; also after parts came back."""
    generator = torch.Generator().manual_seed(seed)
    groups = groups[: len(sizes)]
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    ours = Model(method, tensors, groups, dense_below, 0)
    theirs = Model(method, tensors, groups, dense_below, NEVER)
    for _ in range(4):
        some_have = torch.rand(len(sizes), generator=generator) < 0.8
        gradients = {
            n: torch.randn(size, generator=generator).to(dtype) for n, size in enumerate(sizes) if some_have[n]
        }
        (mine, dense), (yours, expected) = ours.compress(gradients, clip), theirs.compress(gradients, clip)
        assert torch.equal(dense, expected)
        assert [each.span for each in mine] == [each.span for each in yours]
        if mine and mine[0].offsets is not None:
            assert torch.equal(mine[0].offsets, yours[0].offsets)
        assert ours.sent.entries == theirs.sent.entries
        assert ours.report.wanted_entries == theirs.report.wanted_entries
        assert ours.report.selected_entries == theirs.report.selected_entries
        same(ours.memories(), theirs.memories())
        for model in (ours, theirs):
            model.compressor.restore([SparseSlice(each.span, each.offsets, each.values / 4) for each in yours])
        same(ours.memories(), theirs.memories())
        for one, other in zip(ours.parameters, theirs.parameters, strict=True):
            if "recall" in ours.states[one]:
                ours.states[one]["recall"] = copy.deepcopy(theirs.states[other]["recall"])


def test_pieces_and_threads_change_nothing():
    """Tensors beyond a piece, on several threads: the same entries, memories and thresholds."""
    generator, before = torch.Generator().manual_seed(1), torch.get_num_threads()
    tensors = [torch.randn(size, generator=generator) for size in (3 * segments.PIECE + 5, 7, 400_000, 90_000)]
    gradients = [{n: torch.randn(len(t), generator=generator) for n, t in enumerate(tensors)} for _ in range(5)]
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            model = Model(DGS, tensors, [HYPER], 4096, 0)
            sent = [model.compress(each)[1] for each in gradients]
            found.append((sent, model.memories(), [model.states[p].get("recall") for p in model.parameters]))
    finally:
        torch.set_num_threads(before)
    for sent, memories, recalls in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(sent, found[0][0], strict=True))
        same(memories, found[0][1])
        assert recalls == found[0][2]


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 6), st.integers(0, 3)), min_size=1, max_size=5),
    st.sampled_from([0.01, 0.2]),
    st.integers(0, 2**16),
)
@some
def test_a_threshold_that_misses_is_corrected_as_that_of_one_tensor(rows, density, seed):
    """From thresholds far off either way, on values with ties, zeros, and a few that dwarf the rest."""
    generator = torch.Generator().manual_seed(seed)
    gradients = {}
    for n, (size, _, kind) in enumerate(rows):
        x = torch.randn(size, generator=generator)
        gradients[n] = (x, x.round(), x * (torch.rand(size, generator=generator) < 0.05), x * 10 ** (4 * x))[kind]
    tensors = [torch.zeros(size) for size, _, _ in rows]
    ours, theirs = (Model(DGC, tensors, [HYPER | {"density": density}], 0, from_) for from_ in (0, NEVER))
    for model in (ours, theirs):
        for n, (_, factor, _) in enumerate(rows):
            model.states[model.parameters[n]]["recall"] = {"threshold": factor * float(gradients[n].abs().mean())}
    for _ in range(3):
        sent = [model.compress(gradients)[1] for model in (ours, theirs)]
        assert torch.equal(*sent)
        assert ours.sent.entries == theirs.sent.entries
        same(ours.memories(), theirs.memories())
        for one, other in zip(ours.parameters, theirs.parameters, strict=True):
            mine, yours = ours.states[one]["recall"], theirs.states[other]["recall"]
            assert mine == pytest.approx(yours, rel=1e-9)
            mine.update(yours)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_group_of_which_every_element_is_sent_is_dense(threads):
    """Also where several threads pass over the group; one zero makes the slice sparse again."""
    before = torch.get_num_threads()
    sizes = [2 * segments.PIECE + 5, 7, 5 * segments.PIECE, 3]
    gradients = {n: torch.full((size,), 1.0 + n) for n, size in enumerate(sizes)}
    try:
        torch.set_num_threads(threads)
        model = Model(DGS, [torch.zeros(size) for size in sizes], [HYPER], NEVER, 0)
        [sent], _ = model.compress(gradients)
        assert sent.offsets is None
        assert torch.equal(sent.values, torch.cat([0.1 * gradient for gradient in gradients.values()]))
        for missing in (0, sizes[0], sum(sizes) - 1):
            model = Model(DGS, [torch.zeros(size) for size in sizes], [HYPER], NEVER, 0)
            flat = torch.cat(list(gradients.values()))
            flat[missing] = 0
            [sent], _ = model.compress(dict(enumerate(flat.split(sizes))))
            assert torch.equal(sent.offsets, flat.nonzero().view(-1))
    finally:
        torch.set_num_threads(before)


def test_gradients_and_parameters_of_any_strides_are_read_in_logical_order():
    plain = torch.randn(4, 6)
    strided = plain.t().contiguous().t()
    for weight_decay in (0.0, 0.1):
        model = Model(DGS, [plain], [HYPER | {"density": 1.0, "weight_decay": weight_decay}], 0, 0)
        twin = Model(DGS, [plain], [HYPER | {"density": 1.0, "weight_decay": weight_decay}], 0, 0)
        twin.parameters[0].data = strided
        assert torch.equal(model.compress({0: plain})[1], twin.compress({0: strided})[1])


def test_memories_on_the_host_are_views_of_one_array_and_others_are_adopted():
    model = Model(DGC, [torch.zeros(5), torch.zeros(3)], [HYPER | {"density": 0.2}], 0, 0)
    ones = {0: torch.ones(5), 1: torch.ones(3)}
    model.compress(ones)
    first, second = (model.states[p] for p in model.parameters)
    assert second["residual"].data_ptr() == first["residual"].data_ptr() + 4 * 5
    assert first["residual"].untyped_storage().nbytes() == 4 * 5, "what is saved of a memory is that memory"
    address = first["residual"].data_ptr()
    first["residual"] = torch.full((5,), 10.0)
    model.compress(ones)
    assert first["residual"].data_ptr() == address
    assert (first["residual"] > 5).sum() == 4
    model.states.clear()
    model.compress(ones)
    assert first["residual"].numel() == 5
    assert bool((model.states[model.parameters[0]]["residual"] <= 1).all()), "a memory that is gone begins at zero"


@pytest.mark.parametrize("compiled_from", [0, NEVER])
@pytest.mark.parametrize("method", [DGS, ASGD, SSGD])
def test_what_overflows_is_named_and_cleared_and_the_rest_comes_back(method, compiled_from):
    tensors = [torch.zeros(40), torch.zeros(60)]
    model = Model(method, tensors, [HYPER | {"lr": 3e38, "momentum": 0.0}], 0, compiled_from)
    gradients = {0: torch.zeros(40), 1: torch.linspace(0, 1, 60)}
    gradients[1][7] = 10.0
    with pytest.raises(UpdateOverflowError, match="parameter_1"):
        model.compress(gradients)
    residual = model.states[model.parameters[1]]["residual"]
    assert bool(residual.isfinite().all())
    assert residual[7] == 0


@pytest.mark.parametrize("dtype", segments.KINDS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_first_gradient_that_is_not_finite_is_named(dtype, bad):
    sizes = [20_000, 0, 300, 200_000, 3]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    model = describe(None, [{"params": parameters}])
    gradients = {n: torch.full((size,), torch.finfo(dtype).max, dtype=dtype) for n, size in enumerate(sizes) if size}
    assert finite(model, gradients).keys() == gradients.keys()
    for broken in ((3, 199_999), (2, 0), (0, 19_999)):
        gradients[broken[0]][broken[1]] = bad
        with pytest.raises(NonFiniteGradientError, match=f"parameter_{broken[0]}"):
            finite(model, gradients)


def test_a_gradient_that_has_lost_its_size_is_refused():
    parameters = [nn.Parameter(torch.zeros(size)) for size in (20_000, 30)]
    model = describe(None, [{"params": parameters}])
    gradients = {0: torch.ones(20_000), 1: torch.ones(30)}
    gradients[1].data = torch.ones(29)
    with pytest.raises(ModelChangedError, match="parameter_1"):
        finite(model, gradients)


@pytest.mark.parametrize("size", [30, 20_000])
def test_gradients_that_torch_has_only_marked_count_as_their_values(size):
    parameters = [nn.Parameter(torch.zeros(size)) for _ in range(3)]
    model = describe(None, [{"params": parameters}])
    negated = torch.complex(torch.zeros(size), torch.ones(size)).conj().imag
    assert negated.is_neg()
    given = {0: torch._neg_view(torch.ones(size)), 1: torch._efficientzerotensor(size), 2: negated}
    found = finite(model, given)
    for n, value in enumerate((-1.0, 0.0, -1.0)):
        assert np.array_equal(found[n].numpy(), np.full(size, value, np.float32))


@pytest.mark.parametrize("size", [30, 20_000])
def test_a_gradient_whose_memory_is_freed_is_refused(size):
    parameters = [nn.Parameter(torch.zeros(size)) for _ in range(2)]
    model = describe(None, [{"params": parameters}])
    gradients = {0: torch.ones(size), 1: torch.ones(size)}
    gradients[1].untyped_storage().resize_(0)
    with pytest.raises(ModelChangedError, match="parameter_1"):
        finite(model, gradients)


def test_sets_of_gradients_that_vary_without_end_are_not_all_kept():
    """As of a mixture of experts."""
    model = Model(DGS, [torch.zeros(30) for _ in range(12)], [HYPER], 0, 0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        chosen = (torch.rand(12, generator=generator) < 0.5).tolist()
        model.compress({n: torch.ones(30) for n in range(12) if chosen[n]})
    assert sum(len(key[-1]) // 8 for key in model.compressor._known) <= 16 * 12


def test_a_dense_update_that_is_still_in_use_is_not_overwritten():
    model = Model(ASGD, [torch.zeros(30)], [HYPER | {"density": 1.0}], 0, 0)
    model.compress({0: torch.ones(30)})
    kept = model.sent.slices[0].values[3:5]
    before = kept.clone()
    address = model.sent.slices[0].values.data_ptr()
    model.compress({0: torch.full((30,), 2.0)})
    assert torch.equal(kept, before)
    del kept
    model.compress({0: torch.ones(30)})
    assert model.sent.slices[0].values.data_ptr() == address, "memory is reused where no push refers to it"
