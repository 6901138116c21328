"""``psservice checkpoint``: backups, which are checkpoints in a store (``--to``, ``--from``)."""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from typing import Any, TypeVar

from pscore.units import human_bytes
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.backups import exporting
from psservice.backups.exporting import FileHead, ReadShard, Sink
from psservice.backups.manifest import BackupError, BackupManifest
from psservice.backups.retention import expired
from psservice.backups.store import Store
from psservice.ctl import render
from psservice.ctl.asking import agreed
from psservice.ctl.checkpoints import show
from psservice.ctl.client import EXIT_DONE, EXIT_REFUSED, OperateError, Outcome, ShardClients
from psservice.ctl.commands import nothing_done, one_run, take_snapshots
from psservice.durability.checkpoints import NEW

_MOST_THREADS = 16  # that read a store

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def export(clients: ShardClients, options: Namespace) -> int:
    """Write a checkpoint of all shards to a store, and remove old backups if asked for.

    All shards open their files before a byte is written: if the checkpoint is deleted meanwhile, nothing is missing.
    """
    store, checkpoint = Store(options.store), options.checkpoint
    fleet = one_run(clients)
    if fleet.unreached:
        return nothing_done(fleet, fleet.unreached, "nothing was exported", options)
    addresses = [*fleet.reached]
    if checkpoint == NEW:
        taken = take_snapshots(clients, addresses)
        if failed := [each for each in taken if each.error is not None]:
            return nothing_done(fleet, failed, "nothing was exported", options)
        checkpoint = taken[0].answer.checkpoint
    before = store.manifest(checkpoint)
    if before is not None:
        raise BackupError(
            f"{store.where(checkpoint)} is there already, of run {before.run_id or '–'}, exported {_age(before)} ago; "
            "nothing was exported"
        )
    began = time.monotonic()
    shards = _read_shards(
        clients,
        addresses,
        checkpoint,
        lambda index: exporting.into_store(store, checkpoint, f"shard-{index}-of-{len(addresses)}"),
    )
    if isinstance(shards, list):
        return nothing_done(fleet, shards, "no backup was written", options)
    manifest = exporting.manifest_of(shards, checkpoint, time.time())
    exporting.commit(store, manifest)
    removed = _remove_expired(store, manifest, options.keep, options.keep_days)
    if options.output != "table":
        render.print_plain({**_plain(manifest, store), "removed": removed}, options.output)
        return EXIT_DONE
    render.say(
        f"checkpoint {checkpoint} of {manifest.num_shards} shards is at {store.where(checkpoint)}: "
        f"{human_bytes(manifest.total_bytes)} in {time.monotonic() - began:.1f} s"
    )
    for each in removed:
        render.say(f"removed {store.where(each)}, which --keep and --keep-days keep no longer")
    return EXIT_DONE


def show_verified(clients: ShardClients, options: Namespace) -> int:
    """Print one checkpoint of the shards, read all of its files, and say whether they are whole."""
    if status := show(clients, options):
        return status
    fleet = one_run(clients)
    if fleet.unreached:
        return nothing_done(fleet, fleet.unreached, "nothing was verified", options)
    shards = _read_shards(clients, [*fleet.reached], options.checkpoint, lambda index: exporting.into_nothing)
    if isinstance(shards, list):
        return nothing_done(fleet, shards, "the checkpoint is not verified", options)
    manifest = exporting.manifest_of(shards, options.checkpoint, time.time())
    if options.output == "table":
        render.say(f"verified: {human_bytes(manifest.total_bytes)} at {manifest.num_shards} shards")
    return EXIT_DONE


def list_stored(options: Namespace) -> int:
    """Print the backups of a store, oldest first, and what exports that broke off have left."""
    store = Store(options.store)
    found, broken = [], []
    for checkpoint in store.checkpoints():
        try:
            manifest = store.manifest(checkpoint)
        except BackupError as error:
            broken.append((checkpoint, str(error)))
            continue
        if manifest is None:
            broken.append((checkpoint, "no backup: an export is under way, or broke off"))
        else:
            found.append(manifest)
    found.sort(key=lambda each: each.exported_unix_seconds)
    if options.output != "table":
        unusable = [{"checkpoint": name, "error": why} for name, why in broken]
        render.print_plain({"backups": [_plain(each, store) for each in found], "unusable": unusable}, options.output)
        return EXIT_DONE
    if found:
        columns = (
            render.Column("checkpoint", lambda each: render.cell(each.checkpoint), True),
            render.Column("run", lambda each: render.cell(each.run_id or "–"), True),
            render.Column("shards", lambda each: str(each.num_shards)),
            render.Column("version", lambda each: render.range_of([shard.version for shard in each.shards])),
            render.Column("exported", lambda each: f"{_age(each)} ago"),
            render.Column("size", lambda each: human_bytes(each.total_bytes)),
            render.Column("kept", _kept, True),
        )
        table = render.table_of(columns, found)
        table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
        render.new_console().print(table)
    elif not broken:
        render.say("no backups yet")
    for checkpoint, why in broken:
        render.say(f"{checkpoint}: {why}")
    return EXIT_DONE


def show_stored(options: Namespace) -> int:
    """Print a backup's manifest; with ``--verify`` after reading all of its files."""
    from psservice.backups.importing import check_files  # torch

    store = Store(options.store)
    manifest = store.require(options.checkpoint)
    if options.verify:
        _parallel(lambda index: check_files(store, manifest, index), range(manifest.num_shards), _MOST_THREADS)
    if options.output != "table":
        render.print_plain({**_plain(manifest, store), "verified": options.verify}, options.output)
        return EXIT_DONE
    render.say(
        f"checkpoint {manifest.checkpoint} of run {manifest.run_id or '–'}, {manifest.method or 'no method yet'}"
    )
    render.say(f"exported {_age(manifest)} ago by release {manifest.release}, kept {_kept(manifest)}")
    for index, shard in enumerate(manifest.shards):
        size = human_bytes(shard.total_bytes)
        render.say(f"shard {index}: version {shard.version}, {shard.length:,} parameters, {size}")
    if options.verify:
        render.say(f"verified: all files have the digests of the manifest, {human_bytes(manifest.total_bytes)}")
    return EXIT_DONE


def delete_stored(options: Namespace) -> int:
    """Delete a backup, or what an export that broke off has left."""
    store, checkpoint = Store(options.store), options.checkpoint
    if checkpoint not in store.checkpoints():
        store.require(checkpoint)
    try:
        manifest = store.manifest(checkpoint)
        what = (
            f"backup of run {manifest.run_id or '–'}, {human_bytes(manifest.total_bytes)}"
            if manifest
            else "unfinished backup"
        )
    except BackupError:
        what = "damaged backup"
    if not agreed(f"Deletes {store.where(checkpoint)} ({what}).", options):
        return EXIT_REFUSED
    store.delete(checkpoint)
    if options.output != "table":
        render.print_plain({"checkpoint": checkpoint, "deleted": store.where(checkpoint)}, options.output)
    else:
        render.say(f"{store.where(checkpoint)} deleted")
    return EXIT_DONE


def import_stored(options: Namespace) -> int:
    """Put a backup, or one shard of it, into an empty data directory."""
    from psservice.backups.importing import import_backup  # torch

    store = Store(options.store)
    manifest = store.require(options.checkpoint)
    shards = range(manifest.num_shards)
    if options.shard is not None:
        if options.shard >= manifest.num_shards:
            raise BackupError(f"the backup has shards 0 to {manifest.num_shards - 1}, and no shard {options.shard}")
        shards = range(options.shard, options.shard + 1)
    folders = import_backup(store, manifest, options.data_dir, shards)
    versions = [manifest.shards[index].version for index in shards]
    if options.output != "table":
        rows = [
            {"shard_index": index, "version": version, "path": str(folder)}
            for index, version, folder in zip(shards, versions, folders, strict=True)
        ]
        render.print_plain({**_plain(manifest, store), "imported": rows}, options.output)
        return EXIT_DONE
    for index, version, folder in zip(shards, versions, folders, strict=True):
        render.say(f"shard {index}: version {version}: {folder}")
    render.say(f"start the servers of run {manifest.run_id or '–'} with --data-dir {options.data_dir}")
    return EXIT_DONE


def _read_shards(
    clients: ShardClients, addresses: Sequence[str], checkpoint: str, sink_of: Callable[[int], Sink]
) -> tuple[ReadShard, ...] | list[Outcome]:
    """Read a checkpoint of all shards at once into sinks by shard index; return the errors if one cannot be read."""
    request = pb.ReadCheckpointRequest(checkpoint=checkpoint)
    with ExitStack() as opened:  # streams end first, so that no thread waits for one
        threads = opened.enter_context(ThreadPoolExecutor(len(addresses), thread_name_prefix="export"))
        streams = [opened.enter_context(clients.stream(address, "ReadCheckpoint", request)) for address in addresses]
        firsts = _outcomes(threads, addresses, next, streams)
        if failed := [each for each in firsts if each.error is not None]:
            return failed

        def read(index: int) -> ReadShard:
            parts = map(_part, chain([firsts[index].answer], streams[index]))
            return exporting.read_shard(addresses[index], parts, sink_of(index))

        done = _outcomes(threads, addresses, read, range(len(addresses)))
    if failed := [each for each in done if each.error is not None]:
        return failed
    return tuple(each.answer for each in done)


def _part(message: pb.ReadCheckpointResponse) -> FileHead | bytes:
    if message.WhichOneof("part") == "file":
        return message.file.name, message.file.bytes
    return message.data


def _outcomes(
    threads: Executor, addresses: Sequence[str], work: Callable[[_Item], object], items: Sequence[_Item]
) -> list[Outcome]:
    """Do work for each shard, all at once: a stream that nobody reads is cut by its shard."""

    def attempt(address: str, item: Any) -> Outcome:
        try:
            return Outcome(address, work(item))
        except StopIteration:
            why = "the answer ended before its end; is it a server of this release?"
            return Outcome(address, error=OperateError(f"{address}: {why}", refused=True))
        except BackupError as error:
            return Outcome(address, error=OperateError(str(error), refused=True))
        except OperateError as error:
            return Outcome(address, error=error)

    return list(threads.map(attempt, addresses, items))


def _parallel(work: Callable[[_Item], _Result], items: Sequence[_Item], most: int) -> list[_Result]:
    with ThreadPoolExecutor(min(most, len(items)), thread_name_prefix="store") as threads:
        futures: list[Future[_Result]] = [threads.submit(work, item) for item in items]
        return [each.result() for each in futures]


def _remove_expired(store: Store, newest: BackupManifest, keep: int | None, keep_days: float | None) -> list[str]:
    """Remove the backups that the rules keep no longer; return their checkpoints."""
    if keep is None and keep_days is None:
        return []
    backups = []
    for checkpoint in store.checkpoints():
        try:
            manifest = store.manifest(checkpoint)
        except BackupError as error:
            render.say(f"{error}; it stays", failed=True)
            continue
        if manifest is not None:
            backups.append(manifest)
    removed = []
    for each in expired(backups, newest, keep, keep_days):
        store.delete(each.checkpoint)
        removed.append(each.checkpoint)
    return removed


def _plain(manifest: BackupManifest, store: Store) -> dict[str, Any]:
    return {**manifest.model_dump(mode="json"), "bytes": manifest.total_bytes, "url": store.where(manifest.checkpoint)}


def _kept(manifest: BackupManifest) -> str:
    return "until deleted" if manifest.is_named else "until --keep or --keep-days"


def _age(manifest: BackupManifest) -> str:
    return f"{max(0.0, time.time() - manifest.exported_unix_seconds):,.0f} s"
