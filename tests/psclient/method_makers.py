"""The published recurrences in float64, written from the formulas and from nothing else."""

import math

import torch

from psclient.methods.asgd import ASGD
from psclient.methods.base import Tools
from psclient.methods.dgc import DGC
from psclient.methods.dgs import DGS
from psclient.methods.gradient_dropping import GradientDropping
from pscore.selection import select
from pscore.selectors import SELECTORS

METHODS = {"asgd": ASGD, "gradient_dropping": GradientDropping, "dgc": DGC, "dgs": DGS}
SPARSE = ("gradient_dropping", "dgc", "dgs")
SIZES = (1, 2, 7, 100, 999)
EPS = torch.finfo(torch.float32).eps


def tools(density, dtype=torch.float32, dense_below=0):
    """What the optimizer hands to a method, for values that travel in ``dtype``."""
    limit = torch.finfo(dtype).max

    def quantise(values):
        return values if dtype == torch.float32 else values.clamp(-limit, limit).to(dtype).float()

    return Tools(lambda x: select(x, density, dense_below, SELECTORS["exact"]), quantise)


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


def top(x, density):
    """A mask of the largest share of |x|: k = max(1, ⌊ρ·n⌋)."""
    k = min(x.numel(), max(1, math.floor(density * x.numel())))
    mask = torch.zeros(x.numel(), dtype=torch.bool)
    mask[x.abs().topk(k).indices] = True
    return mask


class Reference:
    """One tensor's recurrence in float64; ``step`` returns (mask, what is sent)."""

    def __init__(self, size, density, m):
        self.u = torch.zeros(size, dtype=torch.float64)
        self.r = torch.zeros(size, dtype=torch.float64)
        self.density, self.m = density, m


class ReferenceASGD(Reference):
    def step(self, g, lr):
        self.u = self.m * self.u + g.double()
        return torch.ones(g.numel(), dtype=torch.bool), lr * self.u


class ReferenceGradientDropping(Reference):
    def step(self, g, lr):
        self.r = self.r + lr * g.double()
        mask = top(self.r, self.density)
        sent = torch.where(mask, self.r, 0)
        self.r = torch.where(mask, 0, self.r)
        return mask, sent


class ReferenceDGC(Reference):
    def step(self, g, lr):
        self.u = self.m * self.u + g.double()
        self.r = self.r + self.u
        mask = top(self.r, self.density)
        sent = torch.where(mask, lr * self.r, 0)
        self.r = torch.where(mask, 0, self.r)
        self.u = torch.where(mask, 0, self.u)
        return mask, sent


class ReferenceDGS(Reference):
    """As published: u = m·u + lr·g; send top ρ; an unsent entry is divided by m so that it does not decay."""

    def step(self, g, lr):
        self.u = self.m * self.u + lr * g.double()
        mask = top(self.u, self.density)
        sent = torch.where(mask, self.u, 0)
        self.u = torch.where(mask, self.u, self.u / self.m)
        return mask, sent


REFERENCES = {
    "asgd": ReferenceASGD,
    "gradient_dropping": ReferenceGradientDropping,
    "dgc": ReferenceDGC,
    "dgs": ReferenceDGS,
}
