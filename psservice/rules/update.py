"""Update rules: what the server does with a push."""

from collections.abc import Callable

import torch

from pscore.kernels import backend_of
from pscore.segment import Segment

UpdateRule = Callable[[torch.Tensor, Segment], None]


def subtract(theta: torch.Tensor, push: Segment) -> None:
    """``θ −= p``: the rule of every method whose worker sends learning rate times direction.

    Args:
        theta: the shard's parameters, fp32 ``[n]``; changed in place.
        push: the update over the whole shard; values fp32 on the same device.
    """
    if push.offsets is None:
        theta.sub_(push.values)
    else:
        backend_of(theta).subtract_at(theta, push.offsets, push.values)
