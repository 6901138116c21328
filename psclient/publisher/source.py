"""The sources of a publisher: a module, a state dict, or any iterator of names and tensors."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from psclient.errors import ConfigurationError
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.names import tensor_name_fault
from pscore.wire.messages import DATA_TYPES

Source = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""Tensors by name, always in the same order. An iterator may hand the same memory out again and again."""

Octets = NDArray[np.uint8]

_WIDEST_WORD = 4


def named(source: Source, *wrappers: type[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors; raises :class:`ConfigurationError` for a tensor that cannot be published.

    A tensor that consists of others is one of those, unless it is of one of the classes ``wrappers``.
    """
    if isinstance(source, torch.nn.Module):
        source = source.state_dict()
    pairs: Iterable[Any] = source.items() if isinstance(source, Mapping) else source
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise ConfigurationError(f"a source has names and tensors, and not {pair!r:.80}")
        name, tensor = pair
        if fault := tensor_name_fault(name):
            raise ConfigurationError(fault)
        if tensor.is_meta or tensor.layout is not torch.strided:
            raise ConfigurationError(f"{name!r} has no values that could be published: it is {_kind(tensor)}")
        if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, wrappers):
            raise ConfigurationError(
                f"{name!r} is a {type(tensor).__name__}, which consists of other tensors: publish what it stands "
                "for. DTensors are published by publishers on all ranks: Publisher(…, group=torch.distributed.group."
                "WORLD)"
            )
        if tensor.dtype not in DATA_TYPES:
            raise ConfigurationError(f"{name!r} has a data type that is not published: {tensor.dtype}")
        yield name, tensor


def _kind(tensor: torch.Tensor) -> str:
    return "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor."""
    return TensorSpec(name, tuple(tensor.shape), tensor.dtype)


def octets_of(tensor: torch.Tensor) -> Octets:
    """Return the bytes of a tensor's elements, in order; without a copy if it is contiguous and on the host."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def layout_of(specs: list[TensorSpec]) -> ModelLayout:
    """Return the layout of a feed: in words as wide as its narrowest elements, and of four bytes at most.

    Raises :class:`ConfigurationError` if a name occurs twice, or there is nothing.
    """
    if not sum(spec.nbytes for spec in specs):
        raise ConfigurationError("there is nothing to publish: the source has no elements")
    try:
        return ModelLayout(tuple(specs), word_bytes=min(_WIDEST_WORD, *(spec.dtype.itemsize for spec in specs)))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
