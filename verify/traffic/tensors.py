"""Models of a feed as torch's tensors, and back."""

from collections.abc import Mapping

import numpy as np
import torch

from verify.model import words


def tensors_of(layout: str, octets: words.Octets) -> dict[str, torch.Tensor]:
    """Return a model as tensors of their own memory."""
    found = {}
    for tensor, part in words.parts(layout, octets):
        made = found[tensor.name] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        if part.size:
            made.view(-1).view(torch.uint8).copy_(torch.from_numpy(part.copy()))
    return found


def octets_of(layout: str, tensors: Mapping[str, torch.Tensor]) -> words.Octets:
    """Return the model that tensors are; raises ``ValueError`` if a shape or a data type is another."""
    found = []
    for tensor in words.LAYOUTS[layout]:
        held = tensors[tensor.name].detach()
        if (tuple(held.shape), held.dtype) != (tensor.shape, getattr(torch, tensor.dtype)):
            raise ValueError(f"{tensor.name} is {tuple(held.shape)} of {held.dtype}")
        flat = held.contiguous().reshape(-1)
        found.append(flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8))
    return np.concatenate(found)
