"""A device that is none: its tensors lie on the host, refuse to meet tensors of the host, and count what waits."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "equal")
"""Operations whose result the host waits for."""

_aten = torch.ops.aten


class OnDevice(torch.Tensor):
    """A tensor on the device; ``inner`` is where its values are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout, device=DEVICE,
        )  # fmt: skip

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"OnDevice({self.inner})"

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """Makes tensors there inside its block; ``counts`` has what was called with a tensor of the device, by name."""

    def __init__(self):
        super().__init__()
        self.counts = COUNTS

    def __enter__(self):
        COUNTS.clear()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    @property
    def waits(self):
        """How often the host has waited for the device: copies to the host, and values that decide."""
        return sum(COUNTS[name] for name in (*WAITS, "down"))


COUNTS = Counter()


def run(function, args, kwargs):
    leaves = tree_leaves((args, kwargs))
    device = [each for each in leaves if isinstance(each, OnDevice)]
    host = [each for each in leaves if isinstance(each, torch.Tensor) and not isinstance(each, OnDevice)]
    name = function.overloadpacket.__name__
    asked = kwargs.get("device")
    there = bool(device) if asked is None else torch.device(asked).type == DEVICE.type
    copies = function in (_aten._to_copy.default, _aten.copy_.default)
    if device:
        COUNTS[name] += 1
        if name in ("index", "index_put_") and any(each is not None and each.dtype is torch.bool for each in args[1]):
            COUNTS["nonzero"] += 1
        if not copies and any(each.dim() for each in host):
            raise RuntimeError(f"{name}: tensors of the device meet tensors of the host")
        if (name == "copy_" and host) or (name == "_to_copy" and not there):
            COUNTS["up" if isinstance(args[0], OnDevice) == (name == "copy_") else "down"] += 1
    elif there and name == "_to_copy":
        COUNTS["up"] += 1
    plain = {"device": torch.device("cpu")} if asked is not None else {}
    if kwargs.get("pin_memory"):
        plain["pin_memory"] = False
    inner = tree_map(lambda each: each.inner if isinstance(each, OnDevice) else each, (args, {**kwargs, **plain}))
    found = function(*inner[0], **inner[1])
    if name == "_to_copy" and any(found is each for each in tree_leaves(inner)):
        found = found.clone()
    if not there or name in ("_local_scalar_dense",):
        return found
    known = {id(each.inner): each for each in device}

    def wrapped(each):
        if not isinstance(each, torch.Tensor):
            return each
        return known[id(each)] if id(each) in known else OnDevice(each)

    return tree_map(wrapped, found)
