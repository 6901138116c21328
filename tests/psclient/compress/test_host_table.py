"""The pass over all tensors does what plain numpy does tensor by tensor, bit for bit."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from psclient.compress.gradients import Gradients, finite
from psclient.compress.groups import ParamGroups
from psclient.compress.host_table import Choice
from psclient.compress.selector import Selector
from psclient.engine.segments import joined
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
from pscore.selection import SELECTORS, entries_for
from pscore.selection.host import segments
from tests.pscore.selection_reference import Tensor, accumulate, take_all, warm
from tests.tiers import examples

METHODS = (ASGD, DGC, DGS, DROPPING, OUTER, SERVER, SSGD, WAGMA)
HYPER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "decay": 1.0, "density": 0.1}
some = settings(deadline=None, max_examples=examples(40))


class Model:
    """Parameters, and a compressor of their gradients."""

    def __init__(self, method, tensors, groups, dense_below, on_device=lambda _: None, kept_in=torch.float32):
        self.parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
        owned = np.array_split(np.arange(len(tensors)), len(groups))
        self.groups = [
            group | {"params": [self.parameters[n] for n in own]} for group, own in zip(groups, owned, strict=True)
        ]
        self.described = describe(None, self.groups)
        self.states = defaultdict(dict)
        choice = Choice(SELECTORS["warm"], dense_below, on_device=on_device, kept_in=kept_in)
        self.grouping = grouping = SimpleNamespace(densities={}, groups=())
        self.of_groups = ParamGroups(self.groups)
        self.of_groups.read()
        self.compressor = Selector(method, self.described, self.states, self.of_groups, choice, grouping)

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


class Plain:
    """The same tensor by tensor: the method's recurrence in numpy, and the reference of the selection."""

    def __init__(self, model, method, dense_below):
        self.model, self.method, self.dense_below = model, method, dense_below
        self.states = [{} for _ in model.parameters]
        self.numbers = model.of_groups.numbers_of(model.described.parameters).tolist()

    def compress(self, gradients, clip):
        """What is sent, as a whole layout; entries by position."""
        self.entries, self.wanted, self.selected = {}, 0, 0
        dense = [torch.zeros(p.numel()) for p in self.model.parameters]
        for n, gradient in gradients.items():
            self.entries[n] = self._one(n, gradient, clip, dense[n].numpy())
        return torch.cat(dense)

    def _one(self, n, gradient, clip, sent):
        group = self.model.of_groups.values(self.numbers[n])
        rule, state, size = self.method.recurrence(group), self.states[n], sent.size
        if rule.factor and "momentum" not in state:
            state["momentum"] = np.zeros(size, np.float32)
        theta = self.model.parameters[n].detach().float().numpy()
        g, u = gradient.float().numpy(), state.get("momentum")
        x = np.float32(rule.rate) * accumulate(g, theta, u, rule.scale, rule.decay, rule.factor, clip)
        if rule.whole:
            if "residual" in state:
                x = np.float32(rule.retain) * state.pop("residual") + x
            sent[:] = np.float32(rule.unit) * x
            return size
        r = state.setdefault("residual", np.zeros(size, np.float32))
        r[:] = np.float32(rule.retain) * r + x
        tensor, k = Tensor(r, rule.keep), entries_for(size, group["density"])
        if size < self.dense_below:
            offsets, values = take_all(tensor)
        else:
            offsets, values = warm(tensor, k, state.setdefault("recall", {}))
            self.wanted, self.selected = self.wanted + k, self.selected + offsets.size
            if rule.masks_momentum and rule.factor:
                u[offsets] = 0
        sent[offsets] = np.float32(rule.unit) * values
        return offsets.size

    def restore(self, dense):
        """Give back a whole layout's worth of what was sent."""
        for n, part in enumerate(dense.split([p.numel() for p in self.model.parameters])):
            if n in self.entries:
                share = self.method.recurrence(self.model.of_groups.values(self.numbers[n])).share
                held = self.states[n].setdefault("residual", np.zeros(part.numel(), np.float32))
                held += np.float32(share) * part.numpy()

    def memories(self):
        return [
            {name: torch.from_numpy(held.copy()) for name, held in state.items() if name != "recall"}
            for state in self.states
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
    ours = Model(method, tensors, groups, dense_below)
    plain = Plain(ours, method, dense_below)
    for _ in range(4):
        some_have = torch.rand(len(sizes), generator=generator) < 0.8
        gradients = {
            n: torch.randn(size, generator=generator).to(dtype) for n, size in enumerate(sizes) if some_have[n]
        }
        _, dense = ours.compress(gradients, clip)
        assert torch.equal(dense, plain.compress(gradients, clip))
        assert ours.sent.entries == plain.entries
        assert (ours.report.wanted_entries, ours.report.selected_entries) == (plain.wanted, plain.selected)
        same(ours.memories(), plain.memories())
        ours.compressor.restore([SparseSlice(each.span, each.offsets, each.values / 4) for each in ours.sent.slices])
        plain.restore(dense / 4)
        same(ours.memories(), plain.memories())
        for parameter, state in zip(ours.parameters, plain.states, strict=True):
            if state.get("recall"):
                assert ours.states[parameter]["recall"] == pytest.approx(state["recall"], rel=1e-9)


def test_pieces_and_threads_change_nothing():
    """Tensors beyond a piece, on several threads: the same entries, memories and thresholds."""
    generator, before = torch.Generator().manual_seed(1), torch.get_num_threads()
    tensors = [torch.randn(size, generator=generator) for size in (3 * segments.PIECE + 5, 7, 400_000, 90_000)]
    gradients = [{n: torch.randn(len(t), generator=generator) for n, t in enumerate(tensors)} for _ in range(5)]
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            model = Model(DGS, tensors, [HYPER], 4096)
            sent = [model.compress(each)[1] for each in gradients]
            found.append((sent, model.memories(), [model.states[p].get("recall") for p in model.parameters]))
    finally:
        torch.set_num_threads(before)
    for sent, memories, recalls in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(sent, found[0][0], strict=True))
        same(memories, found[0][1])
        assert recalls == found[0][2]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_group_of_which_every_element_is_sent_is_dense(threads):
    """Also where several threads pass over the group; one zero makes the slice sparse again."""
    before = torch.get_num_threads()
    sizes = [2 * segments.PIECE + 5, 7, 5 * segments.PIECE, 3]
    gradients = {n: torch.full((size,), 1.0 + n) for n, size in enumerate(sizes)}
    try:
        torch.set_num_threads(threads)
        model = Model(DGS, [torch.zeros(size) for size in sizes], [HYPER], 1 << 60)
        [sent], _ = model.compress(gradients)
        assert sent.offsets is None
        assert torch.equal(sent.values, torch.cat([0.1 * gradient for gradient in gradients.values()]))
        for missing in (0, sizes[0], sum(sizes) - 1):
            model = Model(DGS, [torch.zeros(size) for size in sizes], [HYPER], 1 << 60)
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
        model = Model(DGS, [plain], [HYPER | {"density": 1.0, "weight_decay": weight_decay}], 0)
        twin = Model(DGS, [plain], [HYPER | {"density": 1.0, "weight_decay": weight_decay}], 0)
        twin.parameters[0].data = strided
        assert torch.equal(model.compress({0: plain})[1], twin.compress({0: strided})[1])


def test_memories_on_the_host_are_views_of_one_array_and_others_are_adopted():
    model = Model(DGC, [torch.zeros(5), torch.zeros(3)], [HYPER | {"density": 0.2}], 0)
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


@pytest.mark.parametrize("method", [DGS, ASGD, SSGD])
def test_what_overflows_is_named_and_cleared_and_the_rest_comes_back(method):
    tensors = [torch.zeros(40), torch.zeros(60)]
    model = Model(method, tensors, [HYPER | {"lr": 3e38, "momentum": 0.0}], 0)
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
    model = Model(DGS, [torch.zeros(30) for _ in range(12)], [HYPER], 0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        chosen = (torch.rand(12, generator=generator) < 0.5).tolist()
        model.compress({n: torch.ones(30) for n in range(12) if chosen[n]})
    assert sum(len(key[-1]) // 8 for key in model.compressor._known) <= 16 * 12


def test_a_dense_update_that_is_still_in_use_is_not_overwritten():
    model = Model(ASGD, [torch.zeros(30)], [HYPER | {"density": 1.0}], 0)
    model.compress({0: torch.ones(30)})
    kept = model.sent.slices[0].values[3:5]
    before = kept.clone()
    address = model.sent.slices[0].values.data_ptr()
    model.compress({0: torch.full((30,), 2.0)})
    assert torch.equal(kept, before)
    del kept
    model.compress({0: torch.ones(30)})
    assert model.sent.slices[0].values.data_ptr() == address, "memory is reused where no push refers to it"


@pytest.mark.parametrize("method", [DGC, DGS, DROPPING], ids=lambda method: method.name)
def test_memories_in_16_bits_lose_nothing_on_average(method):
    """What is held and what was sent are the gradients, however small these are beside the residual."""
    sizes, hyper = (3_000, 50, 1_200), HYPER | {"lr": 1.0, "momentum": 0.5, "density": 0.02}
    model = Model(method, [torch.zeros(n) for n in sizes], [hyper], 100, kept_in=torch.bfloat16)
    share = model.compressor._method.recurrence(hyper | {"density": 0.02}).share  # of a sent entry that does not stay
    sent, given = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
    for step in range(60):
        random = torch.Generator().manual_seed(step)
        gradients = {position: torch.randn(n, generator=random) * 0.01 + 0.01 for position, n in enumerate(sizes)}
        sent += share * model.compress(gradients)[1]
        given += torch.cat([*gradients.values()])
    states = [model.states[parameter] for parameter in model.parameters]
    names = {"residual", "momentum"} if method is DGC else {"residual"}
    assert all(state[name].dtype == torch.bfloat16 for state in states for name in names)
    assert not any(name in state for state in states for name in {"residual", "momentum"} - names)
    whole = sent + torch.cat([state["residual"].float() for state in states])
    if method is DGC:  # an entry that is sent loses its momentum
        assert 1.5 <= float(whole.mean() / given.mean()) <= 2.0
        return
    assert float(whole.mean()) == pytest.approx(float(given.mean()), rel=1e-3)
    assert (whole - given).abs().max() <= 0.05 * given.abs().max()


def test_memories_in_16_bits_are_left_alone_by_a_push_that_sends_all():
    model = Model(ASGD, [torch.zeros(500)], [HYPER], 100, kept_in=torch.bfloat16)
    gradients = {0: torch.randn(500)}
    _, sent = model.compress(gradients)
    model.compressor.restore([SparseSlice(Span(0, 500), None, sent)])
    residual = model.states[model.parameters[0]]["residual"]
    assert residual.dtype == torch.bfloat16
    torch.testing.assert_close(residual.float(), sent, rtol=2**-7, atol=0)
    _, again = model.compress({0: torch.zeros(500)})
    momentum = model.states[model.parameters[0]]["momentum"].float()
    torch.testing.assert_close(again, residual.float() + 0.1 * momentum, rtol=2**-7, atol=0)
