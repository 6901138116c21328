"""``psservice checkpoints``: what the shards keep, as one list, and the end of what an operator has named."""

import json
import time
from collections import defaultdict

from rich import box
from rich.table import Table

from pscore.units import human_bytes
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.operator import render
from psservice.operator.client import Lines, Outcome, exit_status
from psservice.operator.commands import ask_all, one_run, report_known
from psservice.operator.fleet import look


def delete(lines: Lines, *, as_json: bool, checkpoint: str) -> int:
    """Delete a named checkpoint at every shard; shards that have none of it are no failure if another one does."""
    request = pb.DeleteCheckpointRequest(checkpoint=checkpoint)
    return report_known(
        ask_all(lines, one_run(lines), "DeleteCheckpoint", request),
        lambda answer: f"checkpoint {checkpoint}, version {answer.version}, deleted",
        ErrorCode.NO_SUCH_CHECKPOINT,
        f"checkpoint {checkpoint} is not here",
        as_json=as_json,
    )


def show(lines: Lines, *, as_json: bool) -> int:
    """Print the checkpoints of all shards, oldest first."""
    found = look(lines)
    indices = {address: status.shard_index for address, status in found.reached.items()}
    outcomes = ask_all(lines, found, "ListCheckpoints", pb.ListCheckpointsRequest())
    by_name: dict[str, dict[int, pb.CheckpointStatus]] = defaultdict(dict)
    for each in outcomes:
        for checkpoint in each.answer.checkpoints if each.error is None else ():
            index = indices[each.address]
            name = checkpoint.checkpoint or f"\0{index}-{checkpoint.version}-{checkpoint.created_unix_seconds}"
            by_name[name][index] = checkpoint
    rows = sorted(by_name.values(), key=lambda row: max(each.created_unix_seconds for each in row.values()))
    if as_json:
        failed = [render.outcome_plain(each) for each in outcomes if each.error is not None]
        print(json.dumps({"checkpoints": [_plain(row) for row in rows], "failed": failed}, indent=2))
    elif rows:
        render.new_console().print(_table(rows, {*indices.values()}))
    elif exit_status(outcomes) == 0:
        render.say("no snapshots yet")
    _complain(outcomes)
    return exit_status(outcomes)


def _complain(outcomes: list[Outcome]) -> None:
    for each in outcomes:
        if each.error is not None:
            render.say(str(each.error), failed=True)


def _plain(row: dict[int, pb.CheckpointStatus]) -> dict[str, object]:
    one = next(iter(row.values()))
    return {
        "checkpoint": one.checkpoint,
        "named": one.named,
        "versions": {str(index): row[index].version for index in sorted(row)},
        "created_unix_seconds": max(each.created_unix_seconds for each in row.values()),
        "bytes": sum(each.bytes for each in row.values()),
    }


def _table(rows: list[dict[int, pb.CheckpointStatus]], indices: set[int]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("checkpoint", overflow="fold")
    for name in ("version", "taken", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kept", no_wrap=True)
    table.add_column("", no_wrap=True)
    now = time.time()
    for row in rows:
        one = next(iter(row.values()))
        versions = sorted({each.version for each in row.values()})
        missing = ", ".join(map(str, sorted(indices - {*row})))
        seconds = max(0.0, now - max(each.created_unix_seconds for each in row.values()))
        table.add_row(
            render.cell(one.checkpoint or "(of one shard alone)"),
            str(versions[0]) if len(versions) == 1 else f"{versions[0]}–{versions[-1]}",
            f"{seconds:,.0f} s ago",
            human_bytes(sum(each.bytes for each in row.values())),
            "until deleted" if one.named else "until newer ones come",
            render.cell(f"not at shard {missing}" if missing and one.checkpoint else "", "yellow"),
        )
    return table
