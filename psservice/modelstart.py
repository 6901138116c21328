"""Starting from a model file: the file's tensors by name, put into the order of the first worker's layout."""

import torch

from pscore import modelfile
from pscore.layout import ModelLayout
from pscore.reasons import Reason, Refusal


def fit(
    layout: ModelLayout, state: modelfile.StateDict, *, with_buffers: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the file's parameters laid flat (fp32 ``[n]``) and its buffers in layout order.

    Raises:
        Refusal: ``FINGERPRINT_MISMATCH`` where file and model do not hold the same tensors.
    """
    known = {name for spec in layout.tensors() for name in (spec.name, *spec.aliases)}
    for name in state:
        if name not in known:
            raise Refusal(
                Reason.FINGERPRINT_MISMATCH, f"the --init file has tensor {name!r}, the model has not", tensor=name
            )
    try:
        flat = modelfile.flatten(layout, state)
    except modelfile.ModelFileError as error:
        raise Refusal(Reason.FINGERPRINT_MISMATCH, f"the --init file does not fit the model: {error}") from error
    buffers = []
    for spec in layout.buffers if with_buffers else ():
        tensor = state.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape:
            raise Refusal(
                Reason.FINGERPRINT_MISMATCH, f"the --init file lacks buffer {spec.describe()}", tensor=spec.name
            )
        buffers.append(tensor.to(spec.dtype))
    return flat, buffers
