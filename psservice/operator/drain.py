"""``psservice drain``: closing shards before maintenance of their machines."""

import json
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.operator import render
from psservice.operator.client import EXIT_PARTIAL, OperateError, Outcome, ShardClients, exit_status
from psservice.operator.commands import ask_all, one_run, report, take_snapshots
from psservice.operator.fleet import read_fleet

_POLL_SECONDS = 0.2


def drain(clients: ShardClients, options: Namespace) -> int:
    """Close the shards, wait for the calls under way, take one last checkpoint, and perhaps end the processes.

    The wait is as long as a call's deadline. A shard that is not drained by then stays closed and continues.
    """
    if options.undo:
        opened = ask_all(clients, one_run(clients), "Drain", pb.DrainRequest(action=pb.DRAIN_ACTION_OPEN))
        return report(opened, lambda answer: f"open again at version {answer.version}", options)
    fleet = one_run(clients)
    closed = _until(clients, [*fleet.reached], pb.DRAIN_ACTION_CLOSE, _is_drained)
    drained = [address for address, each in closed.items() if each.error is None and _is_drained(each.answer)]
    now = fleet.reached | read_fleet(clients).reached  # an upload that was under way has brought the model since
    durable = [a for a in drained if now[a].durability not in ("", "none") and now[a].generation]
    before = [fleet.reached[a] for a in durable]
    kept = {_last_checkpoint(status) for status in before}
    if len(kept) == 1 and "" not in kept:  # by an earlier drain, and nothing has changed since
        taken = [pb.TakeSnapshotResponse(checkpoint=each.snapshot_checkpoint, version=each.version) for each in before]
        snapshots = {a: Outcome(a, answer) for a, answer in zip(durable, taken, strict=True)}
    else:
        snapshots = {each.address: each for each in take_snapshots(clients, durable)}
    stopped: dict[str, Outcome] = {}
    if options.stop:
        ready = [a for a in drained if a not in snapshots or snapshots[a].error is None]
        stopped = _until(clients, ready, pb.DRAIN_ACTION_STOP, lambda answer: answer.stopping)
    results = [
        _Drained(closed.get(shard.address, shard), snapshots.get(shard.address), stopped.get(shard.address))
        for shard in fleet.shards
    ]
    if options.json:
        print(json.dumps([each.plain() for each in results], indent=2))
    for each in results:
        if each.error is not None or not options.json:
            render.say(each.words(), failed=each.error is not None)
    if any(each.is_late for each in results):
        return EXIT_PARTIAL
    return exit_status([Outcome(each.closed.address, error=each.error) for each in results])


@dataclass(frozen=True)
class _Drained:
    """One shard's part of a drain; ``None`` for what was not asked of the shard."""

    closed: Outcome
    snapshot: Outcome | None
    stopped: Outcome | None

    @property
    def error(self) -> OperateError | None:
        return next((each.error for each in (self.closed, self.snapshot, self.stopped) if each and each.error), None)

    @property
    def is_pending(self) -> bool:
        return self.closed.error is None and not _is_drained(self.closed.answer)

    @property
    def is_stopping(self) -> bool:
        return self.stopped is not None and self.stopped.error is None and self.stopped.answer.stopping

    @property
    def is_late(self) -> bool:
        runs_on = self.stopped is not None and self.stopped.error is None and not self.is_stopping
        return self.is_pending or runs_on

    def plain(self) -> dict[str, Any]:
        values = render.outcome_plain(self.closed)
        values["drained"] = self.closed.error is None and not self.is_pending
        values["snapshot"] = render.outcome_plain(self.snapshot) if self.snapshot is not None else None
        values["stopping"] = self.is_stopping
        if self.stopped is not None and self.stopped.error is not None:
            values["error"] = str(self.stopped.error)
        return values

    def words(self) -> str:
        address, answer = self.closed.address, self.closed.answer
        if self.closed.error is not None:
            return str(self.closed.error)
        if self.is_pending:
            return (
                f"{address}: closed, and not drained yet: {answer.calls_inside} calls under way, "
                f"{answer.queued} waiting for the apply thread; ask again"
            )
        parts = [f"{address}: drained at version {answer.version}"]
        if self.snapshot is None:
            parts.append("nothing is kept (no --data-dir, or no model yet)")
        elif self.snapshot.error is not None:
            parts.append(f"no snapshot: {self.snapshot.error}")
        else:
            taken = self.snapshot.answer
            parts.append(f"checkpoint {taken.checkpoint or '(of this shard alone)'}: {taken.path or 'taken before'}")
        if self.stopped is not None:
            failed = self.stopped.error or "it is busy, ask again"
            parts.append("stopping" if self.is_stopping else f"not stopped: {failed}")
        return "; ".join(parts)


def _last_checkpoint(status: pb.GetStatusResponse) -> str:
    """Return the checkpoint that has a drained shard as it is; empty where the shard is open, or there is none."""
    is_drained = status.draining and not status.calls_inside and not status.queued
    return status.snapshot_checkpoint if is_drained and status.snapshot_version == status.version else ""


def _is_drained(answer: pb.DrainResponse) -> bool:
    return answer.draining and not answer.calls_inside and not answer.queued


def _until(
    clients: ShardClients,
    addresses: Sequence[str],
    action: "pb.DrainAction.ValueType",
    is_done: Callable[[pb.DrainResponse], bool],
) -> dict[str, Outcome]:
    """Repeat an action at these shards until it is done, for as long as a call may take; return the last outcomes."""
    request = pb.DrainRequest(action=action)
    end = time.monotonic() + clients.timeout_seconds
    outcomes = {each.address: each for each in clients.all("Drain", request, addresses)}
    while late := [a for a, each in outcomes.items() if each.error is None and not is_done(each.answer)]:
        if time.monotonic() >= end:
            break
        time.sleep(_POLL_SECONDS)
        outcomes |= {each.address: each for each in clients.all("Drain", request, late)}
    return outcomes
