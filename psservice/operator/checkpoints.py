"""``psservice checkpoints``: the checkpoints of all shards as one list, and deletion of named ones."""

import json
import time
from argparse import Namespace
from collections import defaultdict

from rich.text import Text

from pscore.units import human_bytes
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.operator import render
from psservice.operator.client import ShardClients, exit_status
from psservice.operator.commands import ask_all, one_run, report
from psservice.operator.fleet import read_fleet

_ByShard = dict[int, pb.CheckpointStatus]


def checkpoints(clients: ShardClients, options: Namespace) -> int:
    """Print the checkpoints of all shards, oldest first, or delete a named one."""
    if options.delete:
        return _delete(clients, options)
    fleet = read_fleet(clients)
    indices = {address: status.shard_index for address, status in fleet.reached.items()}
    outcomes = ask_all(clients, fleet, "ListCheckpoints", pb.ListCheckpointsRequest())
    by_name: dict[str, _ByShard] = defaultdict(dict)
    for each in outcomes:
        for checkpoint in each.answer.checkpoints if each.error is None else ():
            index = indices[each.address]
            name = checkpoint.checkpoint or f"\0{index}-{checkpoint.version}-{checkpoint.created_unix_seconds}"
            by_name[name][index] = checkpoint
    rows = sorted(by_name.values(), key=_created)
    if options.json:
        failed = [render.outcome_plain(each) for each in outcomes if each.error is not None]
        print(json.dumps({"checkpoints": [_plain(row) for row in rows], "failed": failed}, indent=2))
    elif rows:
        columns = (
            render.Column("checkpoint", lambda row: render.cell(_one(row).checkpoint or "(of one shard alone)"), True),
            render.Column("version", _versions),
            render.Column("taken", lambda row: f"{max(0.0, time.time() - _created(row)):,.0f} s ago"),
            render.Column("size", lambda row: human_bytes(sum(each.bytes for each in row.values()))),
            render.Column("kept", lambda row: "until deleted" if _one(row).named else "until newer ones come", True),
            render.Column("", lambda row: _missing({*indices.values()}, row), True),
        )
        table = render.table_of(columns, rows)
        table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
        render.new_console().print(table)
    elif exit_status(outcomes) == 0:
        render.say("no snapshots yet")
    render.say_errors(outcomes)
    return exit_status(outcomes)


def _delete(clients: ShardClients, options: Namespace) -> int:
    """Delete a named checkpoint at every shard; it is enough that one shard has it."""
    name = options.delete
    outcomes = ask_all(clients, one_run(clients), "DeleteCheckpoint", pb.DeleteCheckpointRequest(checkpoint=name))
    return report(
        outcomes,
        lambda answer: f"checkpoint {name}, version {answer.version}, deleted",
        options,
        {ErrorCode.NO_SUCH_CHECKPOINT: f"checkpoint {name} is not here"},
    )


def _one(row: _ByShard) -> pb.CheckpointStatus:
    return next(iter(row.values()))


def _created(row: _ByShard) -> float:
    return max(each.created_unix_seconds for each in row.values())


def _versions(row: _ByShard) -> str:
    versions = sorted({each.version for each in row.values()})
    return str(versions[0]) if len(versions) == 1 else f"{versions[0]}–{versions[-1]}"


def _missing(indices: set[int], row: _ByShard) -> Text:
    return render.missing_cell(sorted(indices - {*row}) if _one(row).checkpoint else ())


def _plain(row: _ByShard) -> dict[str, object]:
    return {
        "checkpoint": _one(row).checkpoint,
        "named": _one(row).named,
        "versions": {str(index): row[index].version for index in sorted(row)},
        "created_unix_seconds": _created(row),
        "bytes": sum(each.bytes for each in row.values()),
    }
