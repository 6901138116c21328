"""The model that ``--init`` names: read from a file or another run's data directory, fitted to a worker's layout."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pscore.model import modelfile
from pscore.model.layout import ModelLayout, digest_of
from pscore.wire.errors import ErrorCode, Rejected
from psservice.data_leases.dataset import Datasets
from psservice.durability.earlier_models import replay_shards, state_of
from psservice.durability.storage_error import or_storage_error
from psservice.rules.base import PortableState


@dataclass(frozen=True, slots=True)
class InitialModel:
    """The model that a run begins with: tensors by name and, from another run, the counts and memories of that.

    Attributes:
        memories: of the update rules of all shards before; none if there was no run.
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


def read_initial(path: Path, checkpoint: str) -> InitialModel:
    """Read a model file, or a checkpoint of a data directory; raises ``ModelFileError`` or :class:`StorageError`."""
    if not path.is_dir():
        return InitialModel(modelfile.read(path))
    shards = replay_shards(path, checkpoint=checkpoint)
    first = shards[0]  # of the coordinator, which counts samples and averages buffers
    with or_storage_error(path):
        return InitialModel(
            state_of(shards, exact=True),
            max(shard.model.version for shard in shards),
            first.state.run.samples,
            [shard.model.rule.export_portable() for shard in shards],
            first.model.layout,
            first.state.datasets,
            first.state.buffers.weight if first.state.buffers else 0.0,
        )


def fit(
    layout: ModelLayout, state: modelfile.StateDict, *, with_buffers: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the file's parameters laid flat (fp32 ``[n]``) and its buffers, both in a worker's order.

    Raises :class:`Rejected` (``FINGERPRINT_MISMATCH``) if file and model have other tensors.
    """

    def mismatch(message: str, tensor: str) -> Rejected:
        return Rejected(ErrorCode.FINGERPRINT_MISMATCH, f"the --init file {message}", tensor=tensor)

    known = {name for spec in layout.tensors() for name in (spec.name, *spec.aliases)}
    for name in state:
        if name not in known:
            raise mismatch(f"has tensor {name!r}, the model has not", name)
    for frozen in layout.frozen:
        tensor = state.get(frozen.spec.name)
        if tensor is not None and digest_of(tensor.to(frozen.spec.dtype)) != frozen.digest:
            raise mismatch(
                f"has other values of frozen parameter {frozen.spec.describe()} than the worker", frozen.spec.name
            )
    try:
        flat = modelfile.flatten(layout, state)
    except modelfile.ModelFileError as error:
        raise Rejected(ErrorCode.FINGERPRINT_MISMATCH, f"the --init file does not fit the model: {error}") from error
    buffers = []
    for spec in layout.buffers if with_buffers else ():
        tensor = state.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape:
            raise mismatch(f"lacks buffer {spec.describe()}", spec.name)
        buffers.append(tensor.to(spec.dtype))
    return flat, buffers
