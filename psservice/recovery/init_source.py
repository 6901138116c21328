"""Starting from a model file or another run's directory: tensors by name, put into the first worker's order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pscore.model import modelfile
from pscore.model.layout import ModelLayout, digest_of
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.update.base import PortableState
from psservice.recovery import export
from psservice.sampling.dataset import Datasets


@dataclass(frozen=True, slots=True)
class Start:
    """What a run begins with: a model's tensors by name and, from another run, how far that had come.

    Attributes:
        memories: of the update rules of all shards before; none where there was no run.
        layout: by which the memories are cut.
        buffer_weight: how many contributions the averages of the buffers stand for.
    """

    tensors: modelfile.StateDict
    version: int = 0
    samples: int = 0
    memories: Sequence[PortableState] = ()
    layout: ModelLayout | None = None
    datasets: Datasets = field(default_factory=Datasets)
    buffer_weight: float = 0.0


def read(path: Path, checkpoint: str) -> Start:
    """Read a model file, or a checkpoint of a data directory; raises ``ModelFileError`` or :class:`StorageError`."""
    if not path.is_dir():
        return Start(modelfile.read(path))
    brought = export.histories(path, checkpoint=checkpoint)
    first = brought[0]  # of the coordinator, which counts samples and averages buffers
    return Start(
        export.state_of(brought, exact=True),
        max(history.model.version for history in brought),
        first.samples,
        [history.model.rule.export_portable() for history in brought],
        first.layout,
        first.datasets,
        first.buffers.weight if first.buffers else 0.0,
    )


def fit(
    layout: ModelLayout, state: modelfile.StateDict, *, with_buffers: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the file's parameters laid flat (fp32 ``[n]``) and its buffers in layout order.

    Raises:
        Rejected: ``FINGERPRINT_MISMATCH`` where file and model do not hold the same tensors.
    """
    known = {name for spec in layout.tensors() for name in (spec.name, *spec.aliases)}
    for name in state:
        if name not in known:
            raise Rejected(
                ErrorCode.FINGERPRINT_MISMATCH, f"the --init file has tensor {name!r}, the model has not", tensor=name
            )
    for frozen in layout.frozen:
        tensor = state.get(frozen.spec.name)
        if tensor is not None and digest_of(tensor.to(frozen.spec.dtype)) != frozen.digest:
            raise Rejected(
                ErrorCode.FINGERPRINT_MISMATCH,
                f"the --init file has other values of frozen parameter {frozen.spec.describe()} than the worker",
                tensor=frozen.spec.name,
            )
    try:
        flat = modelfile.flatten(layout, state)
    except modelfile.ModelFileError as error:
        raise Rejected(ErrorCode.FINGERPRINT_MISMATCH, f"the --init file does not fit the model: {error}") from error
    buffers = []
    for spec in layout.buffers if with_buffers else ():
        tensor = state.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape:
            raise Rejected(
                ErrorCode.FINGERPRINT_MISMATCH, f"the --init file lacks buffer {spec.describe()}", tensor=spec.name
            )
        buffers.append(tensor.to(spec.dtype))
    return flat, buffers
