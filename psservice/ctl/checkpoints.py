"""``psservice checkpoint``: the checkpoints that shards keep, on their disks."""

import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from rich.text import Text

from pscore.units import human_bytes
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl import render
from psservice.ctl.asking import agreed
from psservice.ctl.client import EXIT_REFUSED, Outcome, ShardClients, exit_status
from psservice.ctl.commands import ask_all, nothing_done, one_run, plain, report, take_snapshots
from psservice.ctl.fleet import Fleet, read_fleet


def create(clients: ShardClients, options: Namespace) -> int:
    """Take one checkpoint over all shards, with a name or an id; if one shard does not answer, none is taken."""
    fleet = one_run(clients)
    if fleet.unreached:
        return nothing_done(fleet, fleet.unreached, "no checkpoint was taken", options)

    def words(answer: pb.TakeSnapshotResponse) -> str:
        return f"checkpoint {answer.checkpoint or '(of this shard alone)'}, version {answer.version}: {answer.path}"

    return report(take_snapshots(clients, [*fleet.reached], options.name or ""), words, options)


def list_kept(clients: ShardClients, options: Namespace) -> int:
    """Print the checkpoints of all shards, oldest first."""
    fleet = read_fleet(clients)
    outcomes = ask_all(clients, fleet, "ListCheckpoints", pb.ListCheckpointsRequest())
    rows, indices = _rows(fleet, outcomes), [each.shard_index for each in fleet.reached.values()]
    if options.output != "table":
        failed = plain([each for each in outcomes if each.error is not None])
        render.print_plain({"checkpoints": rows, "failed": failed}, options.output)
    elif rows:
        columns = (
            render.Column("checkpoint", lambda row: render.cell(row["checkpoint"] or _of_one(row)), True),
            render.Column("version", lambda row: render.range_of([*row["versions"].values()])),
            render.Column("taken", lambda row: f"{max(0.0, time.time() - row['created_unix_seconds']):,.0f} s ago"),
            render.Column("size", lambda row: human_bytes(row["bytes"])),
            render.Column("kept", _kept, True),
            render.Column("", lambda row: _missing(row, indices), True),
        )
        table = render.table_of(columns, rows)
        table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
        render.new_console().print(table)
    elif exit_status(outcomes) == 0:
        render.say("no snapshots yet")
    render.say_errors(outcomes)
    return exit_status(outcomes)


def show(clients: ShardClients, options: Namespace) -> int:
    """Print one checkpoint of the shards: version and bytes at each."""
    fleet = one_run(clients)
    outcomes = ask_all(clients, fleet, "ListCheckpoints", pb.ListCheckpointsRequest())
    found = [row for row in _rows(fleet, outcomes) if row["checkpoint"] == options.checkpoint]
    missing = [*_indices_without(found, fleet)]
    if options.output != "table":
        failed = plain([each for each in outcomes if each.error is not None])
        render.print_plain({"checkpoints": found, "failed": failed}, options.output)
    elif found:
        (row,) = found
        render.say(f"checkpoint {row['checkpoint']} of run {_run_of(fleet) or '–'}, kept {_kept(row)}")
        for index, version in row["versions"].items():
            render.say(f"shard {index}: version {version}")
        render.say(f"{human_bytes(row['bytes'])} of tensors")
    render.say_errors(outcomes)
    for index in missing:
        render.say(f"checkpoint {options.checkpoint} is not at shard {index}", failed=True)
    return EXIT_REFUSED if missing and not any(each.error for each in outcomes) else exit_status(outcomes)


def pin(clients: ShardClients, options: Namespace) -> int:
    """Keep a checkpoint of all shards until it is deleted; if one of them does not have it, nothing changes."""
    fleet = one_run(clients)
    if fleet.unreached:
        return nothing_done(fleet, fleet.unreached, "nothing was pinned", options)
    listed = ask_all(clients, fleet, "ListCheckpoints", pb.ListCheckpointsRequest())
    if failed := [each for each in listed if each.error is not None]:
        return nothing_done(fleet, failed, "nothing was pinned", options)
    found = [row for row in _rows(fleet, listed) if row["checkpoint"] == options.checkpoint]
    if missing := [*_indices_without(found, fleet)]:
        where = ", ".join(map(str, missing))
        render.say(f"checkpoint {options.checkpoint} is not at shard {where}; nothing was pinned", failed=True)
        return EXIT_REFUSED
    outcomes = ask_all(clients, fleet, "PinCheckpoint", pb.PinCheckpointRequest(checkpoint=options.checkpoint))
    return report(
        outcomes,
        lambda answer: f"checkpoint {options.checkpoint}, version {answer.version}, is kept until it is deleted",
        options,
    )


def delete(clients: ShardClients, options: Namespace) -> int:
    """Delete a named or pinned checkpoint at every shard; it is enough that one shard has it."""
    name, fleet = options.checkpoint, one_run(clients)
    if not agreed(f"Deletes checkpoint {name} of run {_run_of(fleet) or '–'} at {len(fleet.reached)} shards.", options):
        return EXIT_REFUSED
    return report(
        ask_all(clients, fleet, "DeleteCheckpoint", pb.DeleteCheckpointRequest(checkpoint=name)),
        lambda answer: f"checkpoint {name}, version {answer.version}, deleted",
        options,
        {ErrorCode.NO_SUCH_CHECKPOINT: f"checkpoint {name} is not here"},
    )


def _rows(fleet: Fleet, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return what shards list, one object for each checkpoint, oldest first."""
    indices = {address: status.shard_index for address, status in fleet.reached.items()}
    by_name: dict[str, dict[int, pb.CheckpointStatus]] = defaultdict(dict)
    for each in outcomes:
        for checkpoint in each.answer.checkpoints if each.error is None else ():
            index = indices[each.address]
            name = checkpoint.checkpoint or f"\0{index}-{checkpoint.version}-{checkpoint.created_unix_seconds}"
            by_name[name][index] = checkpoint
    return sorted(map(_plain, by_name.values()), key=itemgetter("created_unix_seconds"))


def _plain(by_shard: dict[int, pb.CheckpointStatus]) -> dict[str, Any]:
    first = next(iter(by_shard.values()))
    return {
        "checkpoint": first.checkpoint,
        "named": first.named,
        "pinned": all(each.pinned for each in by_shard.values()),
        "versions": {str(index): by_shard[index].version for index in sorted(by_shard)},
        "created_unix_seconds": max(each.created_unix_seconds for each in by_shard.values()),
        "bytes": sum(each.bytes for each in by_shard.values()),
    }


def _kept(row: dict[str, Any]) -> str:
    return "until deleted" if row["named"] or row["pinned"] else "until newer ones come"


def _run_of(fleet: Fleet) -> str:
    return next((status.run_id for status in fleet.reached.values() if status.run_id), "")


def _indices_without(found: Sequence[dict[str, Any]], fleet: Fleet) -> Iterable[int]:
    """Return the indices of the shards that answered and do not have a checkpoint."""
    there = found[0]["versions"] if found else {}
    return (each.shard_index for each in fleet.reached.values() if str(each.shard_index) not in there)


def _of_one(row: dict[str, Any]) -> str:
    (index,) = row["versions"]
    return f"(of shard {index} alone)"


def _missing(row: dict[str, Any], indices: Iterable[int]) -> Text:
    missing = [index for index in sorted({*indices}) if str(index) not in row["versions"]]
    return render.missing_cell(missing if row["checkpoint"] else ())
