"""What tests of feeds share: sources of tensors of many kinds, and comparison bit by bit."""

import torch

from psclient.settings import ClientSettings

QUIET = ClientSettings(server="local", deadline_seconds=5, patience_seconds=30)
SECONDS = 60.0


def bits(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def same_bits(one, other):
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and bits(one[name]) == bits(other[name])
        for name in one
    )


def copied(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def odd_tensors(dtype=torch.bfloat16):
    """Return tensors whose bits a number would lose: NaN payloads, −0.0, infinities, subnormals."""
    words = torch.arange(-600, 600, dtype=torch.int16) * 53
    return {
        "strange": words.view(torch.bfloat16).view(30, 40),
        "plain": torch.randn(50, 20, generator=torch.Generator().manual_seed(0)).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "scalar": torch.tensor(2.5, dtype=dtype),
    }


def mixed_tensors():
    """Return tensors of one to eight bytes an element."""
    generator = torch.Generator().manual_seed(0)
    return {
        "fp8": torch.randn(33, 7, generator=generator).to(torch.float8_e4m3fn),
        "mask": torch.rand(11, generator=generator) > 0.5,
        "scale": torch.randn(9, generator=generator),
        "fp16": torch.randn(2, 3, 5, generator=generator).half(),
        "count": torch.tensor(7),
        "ids": torch.randint(-5, 5, (6,), generator=generator),
        "wide": torch.randn(4, generator=generator, dtype=torch.float64),
    }


def change(tensors, number):
    """Change some elements of each tensor in place, others each time."""
    for tensor in tensors.values():
        octets = tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else None
        if octets is not None:
            octets[number % 3 :: 7] ^= 1
