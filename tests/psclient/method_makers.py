"""A method's push without an optimizer around it, and the published algorithms beside it."""

import math
from types import SimpleNamespace

import torch

from psclient.compress.gradients import Gradients
from psclient.compress.groups import ParamGroups
from psclient.compress.host_table import Choice
from psclient.compress.selector import Selector
from psclient.model.module import describe
from psclient.optim import asgd, dgc, dgs, gradient_dropping
from psclient.optim.asgd import METHOD as ASGD
from psclient.optim.dgc import METHOD as DGC
from psclient.optim.dgs import METHOD as DGS
from psclient.optim.gradient_dropping import METHOD as DROPPING
from psclient.report import StepReport
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SELECTORS
from pscore.wire.codecs.names import VALUE_CODECS
from pscore.wire.codecs.values import VALUE_FORMATS

METHODS = {"asgd": ASGD, "gradient_dropping": DROPPING, "dgc": DGC, "dgs": DGS}
SPARSE = ("gradient_dropping", "dgc", "dgs")
SIZES = (1, 2, 7, 100, 999)
EPS = torch.finfo(torch.float32).eps


class OneTensor:
    """A compressor of a model of one tensor, without an optimizer around it; ``state`` is the tensor's."""

    def __init__(self, method, like, choice):
        self.parameter = torch.nn.Parameter(torch.zeros_like(like))
        self.group = {"params": [self.parameter]}
        self.states = {self.parameter: {}}
        model = describe(None, [self.group])
        grouping = SimpleNamespace(densities={}, groups=())
        self.groups = ParamGroups([self.group])
        self.compressor = Selector(method, model, self.states, self.groups, choice, grouping)

    @property
    def state(self):
        return self.states[self.parameter]

    def push(self, gradient, group, density, theta=None):
        """One step: what is sent."""
        self.group.update(group | {"density": density})
        self.groups.read()
        if theta is not None:
            self.parameter.data.copy_(theta)
        [sent] = self.compressor.compress(range(1), Gradients({0: gradient}), 1.0, StepReport(0)).slices
        return sent

    def flush(self, group):
        """Everything that is held."""
        self.group.update(group)
        self.groups.read()
        nothing = SparseSlice(Span(0, 0), torch.empty(0, dtype=torch.int64), torch.empty(0))
        return next(iter(self.compressor.take_residuals(range(1))), nothing)

    def come_back(self, group, sent):
        """Give back what was sent with these hyper-parameters."""
        self.group.update(group)
        self.compressor._shares[0] = self.compressor._method.recurrence(group).share
        self.compressor.restore([sent])


class Tensors(dict):
    """The state of a tensor between the pushes of a test, and its compressor, made at the first push."""

    def of(self, name, like, selector):
        if "compressor" not in self.__dict__:
            self.compressor = OneTensor(METHODS[name], like, Choice(selector, 0))
            self.compressor.states[self.compressor.parameter] = self
        return self.compressor


def push(name, state, gradient, group, density=1.0, value="fp32", selector=SELECTORS["exact"]):
    """One step of a method without an optimizer around it: what arrives when values travel as ``value``."""
    sent = state.of(name, gradient, selector).push(gradient, group, density)
    return travelled(name, state, group, sent, value, gradient)


def flush(name, state, group):
    """Send everything that a state holds; values travel in fp32 then."""
    return state.of(name, torch.zeros(1), SELECTORS["exact"]).flush(group)


def come_back(name, state, group, sent, like):
    """Give back what was sent with these hyper-parameters."""
    state.of(name, like, SELECTORS["exact"]).come_back(group, sent)


def whole(values):
    """A tensor that is sent whole."""
    return SparseSlice(Span(0, values.numel()), None, values)


def travelled(name, state, group, sent, value, like):
    """Quantise what is sent, and give the error back, as a push does."""
    if not sent.values.numel():
        return sent
    arrived = torch.from_numpy(VALUE_FORMATS[VALUE_CODECS[value]].encode(sent.values.numpy())[1].copy())
    come_back(name, state, group, SparseSlice(sent.span, sent.offsets, sent.values - arrived), like)
    return SparseSlice(sent.span, sent.offsets, arrived)


def group(lr=0.1, momentum=0.0):
    return {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "density": 1.0}


def dense(sent, size):
    """What is sent, as a whole tensor."""
    whole = torch.zeros(size)
    if sent.offsets is None:
        whole.copy_(sent.values)
    else:
        whole[sent.offsets] = sent.values
    return whole


def gradients(size, steps, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + size)
    return [torch.randn(size, generator=generator) for _ in range(steps)]


def rates(kind, steps):
    """Learning rates step by step."""
    return {
        "constant": [0.1] * steps,
        "steps down": [0.1 if step < steps // 2 else 0.01 for step in range(steps)],
        "wanders": [0.05 * (2 + math.sin(step)) for step in range(steps)],
    }[kind]


REFERENCES = {
    "asgd": asgd.reference_step,
    "gradient_dropping": gradient_dropping.reference_step,
    "dgc": dgc.reference_step,
    "dgs": dgs.reference_step,
}
"""The papers' algorithms, which stand in the methods' own files."""
