"""``psservice drain``: close shards before maintenance of their machines, take a last checkpoint, perhaps end them."""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl import render
from psservice.ctl.client import EXIT_PARTIAL, OperateError, Outcome, ShardClients, exit_status
from psservice.ctl.commands import ask_all, one_run, report, take_snapshots
from psservice.ctl.fleet import Fleet, read_fleet

_POLL_SECONDS = 0.2

_Outcomes = dict[str, Outcome]
"""Outcomes of a call by address."""


def drain(clients: ShardClients, options: Namespace) -> int:
    """Close the shards and wait for the calls under way, then checkpoint those that are drained, and perhaps end them.

    The wait is as long as a call's deadline. A shard that is not drained by then stays closed and continues.
    """
    fleet = one_run(clients)
    if options.undo:
        opened = ask_all(clients, fleet, "Drain", pb.DrainRequest(action=pb.DRAIN_ACTION_OPEN))
        return report(opened, lambda answer: f"open again at version {answer.version}", options)
    closed = _repeat(clients, [*fleet.reached], pb.DRAIN_ACTION_CLOSE, _is_drained)
    drained = [address for address, each in closed.items() if each.error is None and _is_drained(each.answer)]
    snapshots = _checkpoint(clients, fleet, drained)
    ready = [a for a in drained if a not in snapshots or snapshots[a].error is None] if options.stop else []
    stopped = _repeat(clients, ready, pb.DRAIN_ACTION_STOP, lambda answer: answer.stopping)
    results = [
        _Result(closed.get(shard.address, shard), snapshots.get(shard.address), stopped.get(shard.address))
        for shard in fleet.shards
    ]
    if options.output != "table":
        render.print_plain([each.plain() for each in results], options.output)
    for each in results:
        if each.error is not None or options.output == "table":
            render.say(each.words(), failed=each.error is not None)
    if any(each.is_late for each in results):
        return EXIT_PARTIAL
    return exit_status([Outcome(each.closed.address, error=each.error) for each in results])


def _checkpoint(clients: ShardClients, before: Fleet, drained: Sequence[str]) -> _Outcomes:
    """Take one checkpoint over drained shards that keep a model; if nothing has changed, name an earlier drain's."""
    now = before.reached | read_fleet(clients).reached  # an upload that was under way has brought the model since
    durable = [a for a in drained if now[a].durability not in ("", "none") and now[a].generation]
    known = {a: before.reached[a] for a in durable}
    if len(kept := {_last_checkpoint(status) for status in known.values()}) == 1 and "" not in kept:
        return {
            a: Outcome(a, pb.TakeSnapshotResponse(checkpoint=status.snapshot_checkpoint, version=status.version))
            for a, status in known.items()
        }
    return {each.address: each for each in take_snapshots(clients, durable)}


@dataclass(frozen=True)
class _Result:
    """One shard's part of a drain; ``None`` for what was not asked of the shard."""

    closed: Outcome
    snapshot: Outcome | None
    stopped: Outcome | None

    @property
    def error(self) -> OperateError | None:
        return next((each.error for each in (self.closed, self.snapshot, self.stopped) if each and each.error), None)

    @property
    def is_drained(self) -> bool:
        return self.closed.error is None and _is_drained(self.closed.answer)

    @property
    def is_stopping(self) -> bool:
        return self.stopped is not None and self.stopped.error is None and self.stopped.answer.stopping

    @property
    def is_late(self) -> bool:
        runs_on = self.stopped is not None and self.stopped.error is None and not self.is_stopping
        return runs_on or (self.closed.error is None and not self.is_drained)

    def plain(self) -> dict[str, Any]:
        values = render.outcome_plain(self.closed) | {"drained": self.is_drained, "stopping": self.is_stopping}
        values["snapshot"] = render.outcome_plain(self.snapshot) if self.snapshot is not None else None
        if self.stopped is not None and self.stopped.error is not None:
            values["error"] = str(self.stopped.error)
        return values

    def words(self) -> str:
        address, answer = self.closed.address, self.closed.answer
        if self.closed.error is not None:
            return str(self.closed.error)
        if not self.is_drained:
            return (
                f"{address}: closed, and not drained yet: {answer.calls_inside} calls under way that may change it; "
                "ask again"
            )
        words = f"{address}: drained at version {answer.version}; "
        if self.snapshot is None:
            words += "nothing is kept (no --data-dir, or no model yet)"
        elif self.snapshot.error is not None:
            words += f"no snapshot: {self.snapshot.error}"
        else:
            taken = self.snapshot.answer
            words += f"checkpoint {taken.checkpoint or '(of this shard alone)'}: {taken.path or 'taken before'}"
        if self.stopped is not None:
            failed = self.stopped.error or "it is busy, ask again"
            words += "; stopping" if self.is_stopping else f"; not stopped: {failed}"
        return words


def _is_drained(state: pb.DrainResponse | pb.GetStatusResponse) -> bool:
    return state.draining and not state.calls_inside


def _last_checkpoint(status: pb.GetStatusResponse) -> str:
    """Return the checkpoint that has a drained shard as it is; empty if the shard is open, or there is none."""
    return status.snapshot_checkpoint if _is_drained(status) and status.snapshot_version == status.version else ""


def _repeat(
    clients: ShardClients,
    addresses: Sequence[str],
    action: "pb.DrainAction.ValueType",
    is_done: Callable[[pb.DrainResponse], bool],
) -> _Outcomes:
    """Repeat an action at these shards until it is done, for as long as a call may take; return the last outcomes."""
    outcomes: _Outcomes = {}
    end = time.monotonic() + clients.timeout_seconds
    late = [*addresses]
    while late:
        outcomes |= {each.address: each for each in clients.all("Drain", pb.DrainRequest(action=action), late)}
        late = [a for a in late if outcomes[a].error is None and not is_done(outcomes[a].answer)]
        if time.monotonic() >= end:
            break
        time.sleep(_POLL_SECONDS if late else 0.0)
    return outcomes
