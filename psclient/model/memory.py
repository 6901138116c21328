"""Which tensors have elements in the same memory: looks at addresses, and reads no tensor."""

import math
from collections.abc import Sequence

import torch


def first_shared(tensors: Sequence[torch.Tensor], *, written: int) -> tuple[int, int] | None:
    """Return the positions of two tensors that have a common element, one of them among the first ``written``.

    Tensors without memory of their own (sparse, meta, empty) have none in common. Without an overlap this takes some
    milliseconds for thousands of tensors.
    """
    inside: list[tuple[int, int, int]] = []  # those that may reach beyond the next one's first byte
    for first, end, number in sorted(_ranges(tensors)):
        inside = [each for each in inside if each[1] > first]
        for _, _, other in inside:
            one, two = min(number, other), max(number, other)
            if one < written and _meet(tensors[one], tensors[two]):
                return one, two
        inside.append((first, end, number))
    return None


def repeats(tensor: torch.Tensor) -> bool:
    """Tell whether several elements of a tensor are one in memory, as in ``expand()``."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    mask = torch.zeros(_elements(tensor), dtype=torch.bool, device="cpu")
    mask.as_strided(tensor.shape, tensor.stride(), 0).fill_(True)
    return int(mask.sum()) < tensor.numel()


def unrepeated(tensor: torch.Tensor) -> tuple[int | slice, ...]:
    """Return the index of an expanded tensor's elements without their repetitions."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(0 if size > 1 and not stride else slice(None) for size, stride in sizes)


def _ranges(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return the bytes ``[first, end)`` in which each tensor lies, with its position; not all need be its own."""
    found = []
    for number, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a tensor that consists of others
            continue
        if address:
            elements = tensor.numel() if tensor.is_contiguous() else _elements(tensor)
            found.append((address, address + elements * tensor.element_size(), number))
    return found


def _elements(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors, whose ranges of bytes overlap, have a common byte."""
    if one.device != other.device:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    begin = min(one.data_ptr(), other.data_ptr())
    unit = math.gcd(one.element_size(), other.element_size(), one.data_ptr() - begin, other.data_ptr() - begin)
    masks = [(tensor, tensor.element_size() // unit, (tensor.data_ptr() - begin) // unit) for tensor in (one, other)]
    taken = torch.zeros(
        max(first + width * _elements(tensor) for tensor, width, first in masks), dtype=torch.bool, device="cpu"
    )
    ours, theirs = (
        taken.as_strided((*tensor.shape, width), (*(width * stride for stride in tensor.stride()), 1), first)
        for tensor, width, first in masks
    )
    ours.fill_(True)
    return bool(theirs.any())
