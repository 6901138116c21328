"""Starting from a model file or another run's directory: tensors by name, put into the first worker's order."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pscore import modelfile
from pscore.layout import ModelLayout
from pscore.reasons import Reason, Refusal
from psservice import replay


@dataclass(frozen=True, slots=True)
class Start:
    """What a run begins with, and from which version it counts."""

    tensors: modelfile.StateDict
    version: int


def read(path: Path, checkpoint: str) -> Start:
    """Read a model file, or a checkpoint of a data directory.

    Raises:
        ModelFileError: the file cannot be read.
        StorageError: the directory does not have it.
    """
    if not path.is_dir():
        return Start(modelfile.read(path), 0)
    brought = replay.histories(path, checkpoint=checkpoint)
    return Start(replay.state_of(brought, exact=True), max(history.model.version for history in brought))


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
