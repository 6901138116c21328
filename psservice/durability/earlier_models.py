"""A model as it was at a version or a checkpoint, from a data directory, with or without a server that uses it.

``psservice replay`` writes such a model to a file, ``--init`` begins a run with one, and a rollback goes back to one.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pscore.model import modelfile
from psservice.durability.replay import Past
from psservice.durability.storage_error import or_storage_error
from psservice.feed.staged_shard import StagedShard
from psservice.settings import ShardSettings
from psservice.storage.files import DISK, Files, StorageError
from psservice.storage.lock_file import Watermark
from psservice.storage.recovery_source import RecoverySource, newest_source
from psservice.storage.snapshots import readable

log = logging.getLogger(__name__)


def replay_to(
    directory: Path,
    files: Files,
    device: torch.device,
    settings: ShardSettings,
    version: int | None,
    checkpoint: str,
    clock: Callable[[], float] = time.monotonic,
    publication: str = "",
) -> Past:
    """Replay a shard to a version (of its newest history that had it), to a checkpoint, or to the end.

    Of a feed the version may be that of a publication, which the shard may have staged only. Raises
    :class:`StorageError` if that is not kept, or is damaged.
    """
    if version is None and not checkpoint:
        newest = newest_source(directory, files)
        if newest is None:
            raise StorageError(f"{directory} holds no model yet")
        with or_storage_error(directory):
            past = Past(newest, device, settings, clock)
            past.replay_to(None)
        return past

    why = ""
    kept = readable(files, directory / "snapshots")
    for snapshot in reversed(kept):
        first = snapshot.manifest
        if (first.checkpoint != checkpoint) if version is None else (first.version > version):
            continue
        try:
            with or_storage_error(directory):
                source = RecoverySource(directory, files, kept, snapshot, Watermark())
                past = Past(source, device, settings, clock)
                if publication:
                    past.replay_to_publication(publication)
                else:
                    past.replay_to(first.version if version is None else version)
                past.apply_settings()
        except StorageError as error:
            log.debug("not from this snapshot", extra={"path": str(snapshot.path), "error": str(error)})
            why = why or f". Tried first: {snapshot.path}: {error}"
        else:
            return past
    manifests = [each.manifest for each in kept]
    names = ", ".join(f"{each.version}" + (f" ({each.checkpoint})" if each.checkpoint else "") for each in manifests)
    there = f"there are snapshots of version {names}" if kept else "there are no snapshots"
    if version is None:
        raise StorageError(f"{directory} has no whole snapshot of checkpoint {checkpoint!r}: {there}{why}")
    what = f"version {version}" + (f" (publication {publication})" if publication else "")
    raise StorageError(f"{what} is not covered by what {directory} keeps: {there}{why}")


def _shard_directories(data_dir: Path) -> list[Path]:
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


def replay_shards(data_dir: Path, version: int | None = None, checkpoint: str = "") -> list[Past]:
    """Replay every shard as :func:`replay_to` does, of a feed or a relay to the publication of shard 0."""
    shards: list[Past] = []
    publication = ""
    for directory in _shard_directories(data_dir):
        first = shards[0].model if shards else None
        if isinstance(first, StagedShard):
            version, checkpoint, publication = first.version, "", first.publication
        where = (directory, DISK, torch.device("cpu"), ShardSettings())
        shard = replay_to(*where, version, checkpoint, publication=publication)
        runs = {each.state.run.run_id for each in (*shards, shard)} - {""}  # a new shard may not know it
        if shards and (len(runs) > 1 or shard.model.layout.fingerprint != shards[0].model.layout.fingerprint):
            raise StorageError(f"{directory} belongs to another run than {shards[0].snapshot.path.parents[1]}")
        shards.append(shard)
    return shards


def state_of(shards: Sequence[Past], *, exact: bool) -> modelfile.StateDict:
    """Join the shards of one model into a state dict; parameters in fp32 if ``exact``, else in their own dtypes."""
    layout, buffers = shards[0].model.layout, shards[0].state.buffers
    flat = torch.cat([shard.model.current() for shard in shards])
    state = modelfile.assemble(layout, flat, buffers.state().values() if buffers else ())
    if exact:
        for i, spec in enumerate(layout.parameters):
            state[spec.name] = flat[layout.offsets[i] : layout.offsets[i + 1]].reshape(spec.shape)
    return state


def write_model(data_dir: Path, out: Path, *, version: int | None, checkpoint: str) -> None:
    """Write the model at a version or a checkpoint as a safetensors file (``StorageError``, ``ModelFileError``)."""
    modelfile.check_path(out)
    shards = replay_shards(data_dir, version, checkpoint)
    with or_storage_error(data_dir):
        state = state_of(shards, exact=False)
    versions = [shard.model.version for shard in shards]
    metadata = {"run_id": shards[0].state.run.run_id, "version": str(versions[0]), "format": "pt"}
    try:
        modelfile.write(out, state, metadata)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error
    replayed = sum(shard.replayed for shard in shards)
    print(f"{out}: version {', '.join(map(str, versions))}, {replayed} records replayed", file=sys.stderr)
