"""The model as it was: out of a data directory, with no server running or beside one."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pscore.model import modelfile
from psservice.recovery.replayer import LogReplayer, bring_back
from psservice.settings import ShardSettings
from psservice.storage.files import DISK, StorageError


def shard_directories(data_dir: Path) -> list[Path]:
    """Return the directories of all shards, in order; raises :class:`StorageError` unless there is one of each."""
    found = sorted(data_dir.glob("shard-*-of-*"), key=lambda path: int(path.name.split("-")[1]))
    if not found:
        raise StorageError(f"{data_dir} holds no shard's directory; is it what a server was given as --data-dir?")
    totals = {int(path.name.split("-")[3]) for path in found}
    if len(totals) > 1:
        raise StorageError(f"{data_dir} holds shards of runs with {sorted(totals)} shards; keep them apart")
    (total,) = totals
    missing = {*range(total)} - {int(path.name.split("-")[1]) for path in found}
    if missing:
        raise StorageError(f"{data_dir} lacks shard {min(missing)} of {total}; copy its directory here")
    return found


def histories(data_dir: Path, version: int | None = None, checkpoint: str = "") -> list[LogReplayer]:
    """Bring every shard back to a version, a checkpoint, or the last version; raises :class:`StorageError`."""
    brought: list[LogReplayer] = []
    for directory in shard_directories(data_dir):
        where = (directory, DISK, torch.device("cpu"), ShardSettings())
        history = bring_back(*where, version=version, checkpoint=checkpoint)
        runs = {each.run_id for each in (*brought, history)} - {""}  # a shard that was just begun may not know it yet
        if brought and (len(runs) > 1 or history.layout.fingerprint != brought[0].layout.fingerprint):
            raise StorageError(f"{directory} belongs to another run than {brought[0].snapshot.path.parents[1]}")
        brought.append(history)
    return brought


def state_of(brought: Sequence[LogReplayer], *, exact: bool) -> modelfile.StateDict:
    """Join the shards of one model into a state dict; parameters in fp32 if ``exact``, else in their own dtypes."""
    layout, buffers = brought[0].layout, brought[0].buffers
    flat = torch.cat([history.model.current() for history in brought])
    state = modelfile.assemble(layout, flat, buffers.state().values() if buffers else ())
    if exact:
        for i, spec in enumerate(layout.parameters):
            state[spec.name] = flat[layout.offsets[i] : layout.offsets[i + 1]].reshape(spec.shape)
    return state


def replay(data_dir: Path, out: Path, *, version: int | None, checkpoint: str) -> None:
    """Write the model at a version or a checkpoint as a safetensors file; raises :class:`StorageError`."""
    brought = histories(data_dir, version, checkpoint)
    versions = [history.model.version for history in brought]
    metadata = {"run_id": brought[0].run_id, "version": str(versions[0]), "format": "pt"}
    try:
        modelfile.write(out, state_of(brought, exact=False), metadata)
    except modelfile.ModelFileError as error:
        raise StorageError(str(error)) from error
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error
    replayed = sum(history.replayed for history in brought)
    print(f"{out}: version {', '.join(map(str, versions))}, {replayed} records replayed", file=sys.stderr)
