"""Update rules: what the server does with a push."""

from collections.abc import Callable

import torch

from pscore.kernels import backend_of
from pscore.reasons import Reason, Refusal
from pscore.segment import Segment

_LARGE = 1e30  # smaller values cannot take a parameter out of its range, nor can many of them in a lifetime

UpdateRule = Callable[[torch.Tensor, Segment], None]


def subtract(theta: torch.Tensor, push: Segment) -> None:
    """``θ −= p``: the rule of every method whose worker sends learning rate times direction.

    Args:
        theta: the shard's parameters, fp32 ``[n]``; changed in place.
        push: the update over the whole shard; values fp32 on the same device.

    Raises:
        Refusal: ``NON_FINITE``, where a parameter would leave the range of fp32; nothing is changed.
    """
    if push.entries and bool(push.values.abs().max() > _LARGE):
        before = theta if push.offsets is None else theta[push.offsets]
        if not bool((before - push.values).isfinite().all()):
            raise Refusal(Reason.NON_FINITE, "this push would take a parameter out of the range of fp32")
    if push.offsets is None:
        theta.sub_(push.values)
    else:
        backend_of(theta).subtract_at(theta, push.offsets, push.values)
