"""A gradient that names its rows trains these rows as a dense gradient does, and costs nothing of the others."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from psclient.compress.gradients import finite
from psclient.compress.groups import ParamGroups
from psclient.compress.host_table import Choice
from psclient.compress.selector import Selector
from psclient.engine.segments import joined
from psclient.errors import ConfigurationError, ModelChangedError, NonFiniteGradientError
from psclient.model.module import describe
from psclient.optim.asgd import METHOD as ASGD
from psclient.optim.dgc import METHOD as DGC
from psclient.optim.dgs import METHOD as DGS
from psclient.optim.gradient_dropping import METHOD as DROPPING
from psclient.optim.server_adagrad import METHOD as ADAGRAD
from psclient.report import StepReport
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SELECTORS
from tests.pscore.selection_reference import Tensor, accumulate, take_all, warm
from tests.tiers import examples

METHODS = (ASGD, DGC, DGS, DROPPING, ADAGRAD)
HYPER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "decay": 1.0, "density": 1.0}
SHAPES = ((40, 6), (7,), (25, 2, 3), (5, 4))
some = settings(deadline=None, max_examples=examples(25))
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


class Worker:
    """A model whose tensors 0 and 2 are tables, and a selector of its gradients."""

    def __init__(self, method, dense_below=0, **hyper):
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        self.described = describe(None, [{"params": self.parameters}])
        self.groups = ParamGroups([HYPER | hyper | {"params": self.parameters}])
        self.states = defaultdict(dict)
        choice, grouping = (
            Choice(SELECTORS["warm"], dense_below, lambda _: None),
            SimpleNamespace(densities={}, groups=()),
        )
        self.selector = Selector(method, self.described, self.states, self.groups, choice, grouping)

    def compress(self, gradients, clip=1.0):
        """What is sent, as a whole layout; NaN where nothing is."""
        self.groups.read()
        found = finite(self.described, gradients)
        self.sent = self.selector.compress(range(len(SHAPES)), found, clip, StepReport(0))
        whole = torch.full((self.described.layout.size,), float("nan"))
        last = 0
        for each in joined(Span(0, whole.numel()), self.sent.slices):
            assert each.span.start >= last, "segments ascend"
            last = each.span.end
            if each.offsets is None:
                whole[each.span.start : each.span.end] = each.values
            else:
                assert bool((each.offsets.diff() > 0).all())
                whole[each.offsets + each.span.start] = each.values
        return whole

    def memory(self, name, position):
        return self.states[self.parameters[position]].get(name)

    def part(self, whole, position):
        span = self.described.layout.span(position)
        return whole[span.start : span.end].reshape(SHAPES[position][0], -1)


def named(shape, rows, values):
    """A gradient as ``nn.Embedding(sparse=True)`` leaves it: rows in any order, some twice."""
    return torch.sparse_coo_tensor(torch.tensor(rows)[None], values, shape, check_invariants=True)


def dense_gradients(generator, *positions):
    return {n: torch.randn(SHAPES[n], generator=generator) for n in positions}


@each_method
@given(st.sampled_from([0.05, 0.4, 1.0]), st.sampled_from([0, 100]), st.sampled_from([1.0, 0.3]), st.integers(0, 2**16))
@some
def test_a_gradient_that_names_all_rows_is_a_dense_one(method, density, dense_below, clip, seed):
    """Bit for bit: what is sent, and the memories; also after some came back."""
    generator = torch.Generator().manual_seed(seed)
    ours, dense = Worker(method, dense_below, density=density), Worker(method, dense_below, density=density)
    for _ in range(4):
        gradients = dense_gradients(generator, 0, 1, 2, 3)
        by_rows = gradients | {n: named(SHAPES[n], range(SHAPES[n][0]), gradients[n]) for n in (0, 2)}
        # As numbers: a tensor that is sent in part may or may not send a zero.
        sent = ours.compress(by_rows, clip).nan_to_num()
        assert torch.equal(sent, dense.compress(gradients, clip).nan_to_num())
        lost = SparseSlice(Span(0, 100), None, sent[:100] / 4)
        for worker in (ours, dense):
            worker.selector.restore([lost])
        for name in ("residual", "momentum"):
            for position in range(len(SHAPES)):
                mine, other = ours.memory(name, position), dense.memory(name, position)
                assert (mine is None or not mine.any()) if other is None else torch.equal(mine, other)


@each_method
@given(st.sampled_from([0.01, 0.1, 1.0]), st.sampled_from([0, 1000]), st.integers(0, 2**16))
@some
def test_touched_rows_are_a_tensor_of_their_own(method, density, dense_below, seed):
    """Against the recurrence in numpy on the rows that a step names; the memories of the others keep their bits."""
    generator, numbers = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    worker = Worker(method, dense_below, density=density)
    rule = method.recurrence(HYPER | {"density": density})
    states = {n: {} for n in (0, 2)}
    for _ in range(4):
        gradients = dense_gradients(generator, 1)
        expected = {}
        for n, state in states.items():
            count, columns = SHAPES[n][0], int(np.prod(SHAPES[n][1:]))
            given = numbers.integers(0, count, numbers.integers(1, 9))
            values = torch.randn((given.size, *SHAPES[n][1:]), generator=generator)
            gradients[n] = named(SHAPES[n], given.tolist(), values)
            rows = np.unique(given)
            g = gradients[n].to_dense().reshape(count, -1).numpy()[rows].reshape(-1)
            expected[n] = rows, _one(rule, state, rows, g, count, columns, density, dense_below)
        sent = worker.compress(dict(sorted(gradients.items())))
        for n, (rows, values) in expected.items():
            found = worker.part(sent, n)
            others = np.setdiff1d(np.arange(SHAPES[n][0]), rows)
            assert bool(found[others].isnan().all())
            assert torch.equal(found[rows].nan_to_num().reshape(-1), torch.from_numpy(values))
            for name, held in states[n].items():
                if name != "recall":
                    mine = worker.memory(name, n)
                    mine = np.zeros_like(held) if mine is None else mine.reshape(held.shape).numpy()
                    assert np.array_equal(mine, held), name


def _one(rule, state, rows, g, count, columns, density, dense_below):
    """What one step sends of the touched rows, by the recurrence; the state has whole tables."""
    size = g.size
    table = {name: state.setdefault(name, np.zeros((count, columns), np.float32)) for name in ("residual", "momentum")}
    r, u = (table[name][rows].reshape(-1) for name in ("residual", "momentum"))
    x = np.float32(rule.rate) * accumulate(g, None, u if rule.factor else None, rule.scale, 0.0, rule.factor, 1.0)
    sent = np.zeros(size, np.float32)
    r[:] = np.float32(rule.retain) * r + x
    k = min(size, max(1, int(density * count * columns)))
    if rule.whole:
        sent[:], r[:] = np.float32(rule.unit) * r, 0
    else:
        tensor = Tensor(r, rule.keep)
        is_small = count * columns < dense_below
        offsets, values = take_all(tensor) if is_small else warm(tensor, k, state.setdefault("recall", {}))
        sent[offsets] = np.float32(rule.unit) * values
        if rule.masks_momentum and rule.factor and not is_small:
            u[offsets] = 0
    for name, values in (("residual", r), ("momentum", u)):
        table[name][rows] = values.reshape(-1, columns)
    return sent


@each_method
def test_entries_that_come_back_go_with_the_next_push_whatever_rows_it_names(method):
    generator = torch.Generator().manual_seed(0)
    worker = Worker(method, 1000, momentum=0.0)
    lost = worker.compress({0: named(SHAPES[0], [3, 9], torch.randn(2, 6, generator=generator))})
    worker.selector.restore(worker.sent.slices)
    sent = worker.part(worker.compress({0: named(SHAPES[0], [4], torch.ones(1, 6))}), 0)
    assert torch.equal(sent[[3, 9]], worker.part(lost, 0)[[3, 9]])
    assert sent.isfinite().any(1).nonzero().view(-1).tolist() == [3, 4, 9]
    sent = worker.part(worker.compress({0: named(SHAPES[0], [4], torch.ones(1, 6))}), 0)
    assert sent.isfinite().any(1).nonzero().view(-1).tolist() == [4]


def test_errors_of_quantisation_wait_until_their_row_is_named_again():
    worker = Worker(ASGD, momentum=0.0)
    worker.compress({0: named(SHAPES[0], [3], torch.ones(1, 6))})
    worker.selector.restore(worker.sent.slices, at_once=False)
    sent = worker.part(worker.compress({0: named(SHAPES[0], [5], torch.ones(1, 6))}), 0)
    assert sent.isfinite().any(1).nonzero().view(-1).tolist() == [5]
    sent = worker.part(worker.compress({0: named(SHAPES[0], [3], torch.ones(1, 6))}), 0)
    assert torch.allclose(sent[3], torch.full((6,), 0.2))


def test_what_came_back_goes_with_a_dense_gradient_and_with_a_flush():
    for flushes in (False, True):
        worker = Worker(ASGD, momentum=0.0)
        worker.compress({0: named(SHAPES[0], [3], torch.ones(1, 6))})
        worker.selector.restore(worker.sent.slices)
        if flushes:
            (piece,) = worker.selector.take_residuals(range(len(SHAPES)))
            assert piece.offsets.tolist() == [*range(18, 24)]
            assert piece.values.tolist() == pytest.approx([0.1] * 6)
        else:
            sent = worker.part(worker.compress({0: torch.zeros(SHAPES[0])}), 0)
            assert sent[3].tolist() == pytest.approx([0.1] * 6)


def test_what_came_back_of_a_dense_gradient_and_of_a_loaded_state_goes_with_the_next_rows():
    for loads in (False, True):
        worker = Worker(ASGD, momentum=0.0)
        worker.compress({0: torch.ones(SHAPES[0])})
        lost = SparseSlice(Span(0, 240), torch.tensor([18, 239]), torch.tensor([1.0, 2.0]))
        worker.selector.restore([lost])
        if loads:
            worker.compress({0: named(SHAPES[0], [3, 39], torch.zeros(2, 6))})  # they have gone, and come back
            worker.selector.restore([lost])
            loaded = defaultdict(dict)
            for parameter in worker.parameters:
                found = worker.states[parameter]
                loaded[parameter] = {name: memory.clone() for name, memory in found.items() if name == "residual"}
            worker.states = worker.selector.memories.states = loaded
        sent = worker.part(worker.compress({0: named(SHAPES[0], [5], torch.ones(1, 6))}), 0)
        assert sent.isfinite().any(1).nonzero().view(-1).tolist() == [3, 5, 39]
        assert (sent[3, 0].item(), sent[39, 5].item()) == (1.0, 2.0)


def test_no_row_is_no_entry():
    worker = Worker(DGS)
    sent = worker.compress({0: named(SHAPES[0], [], torch.zeros(0, 6)), 1: torch.ones(7)})
    assert sent.isfinite().nonzero().view(-1).tolist() == [*range(240, 247)]
    assert worker.sent.entries == {0: 0, 1: 7}


def test_a_weight_decay_is_refused_and_says_what_to_do():
    worker = Worker(DGS, weight_decay=0.1)
    with pytest.raises(ConfigurationError, match=r"parameter_0.*weight_decay=0"):
        worker.compress({0: named(SHAPES[0], [3], torch.ones(1, 6))})
    worker.compress({0: torch.ones(SHAPES[0])})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_refused_by_name(bad):
    worker = Worker(DGS)
    with pytest.raises(NonFiniteGradientError, match="parameter_2"):
        worker.compress({2: named(SHAPES[2], [3], torch.full((1, 2, 3), bad))})


@pytest.mark.parametrize("row", [-1, 40])
def test_a_row_that_the_table_does_not_have_is_refused(row):
    gradient = torch.sparse_coo_tensor(torch.tensor([[row]]), torch.ones(1, 6), SHAPES[0], check_invariants=False)
    with pytest.raises(ModelChangedError, match=f"row {row} of 40"):
        Worker(DGS).compress({0: gradient})


def test_half_precision_rows_are_read_exactly():
    worker = Worker(ASGD, lr=1.0)
    values = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    sent = worker.part(worker.compress({0: named(SHAPES[0], [7, 1], values)}), 0)
    assert torch.equal(sent[[7, 1]], values.float())
