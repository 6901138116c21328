"""``psservice drain``: closing shards before their machines are worked on."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.operator import render
from psservice.operator.client import EXIT_PARTIAL, Lines, OperateError, Outcome, exit_status
from psservice.operator.commands import ask_all, one_run, report, take_snapshots
from psservice.operator.fleet import look

_POLL_SECONDS = 0.2


def undrain(lines: Lines, *, as_json: bool) -> int:
    """Open the shards again."""
    return report(
        ask_all(lines, one_run(lines), "Drain", pb.DrainRequest(action=pb.DRAIN_ACTION_OPEN)),
        lambda answer: f"open again at version {answer.version}",
        as_json=as_json,
    )


def drain(lines: Lines, *, as_json: bool, stop: bool) -> int:
    """Close the shards, wait for what is under way, take one last checkpoint, and perhaps end the processes.

    The deadline of the lines is also how long is waited. A shard that is not drained by then stays closed and goes on
    with what is under way.
    """
    found = one_run(lines)
    closed = _until(lines, [*found.reached], pb.DRAIN_ACTION_CLOSE, _is_drained)
    drained = [address for address, each in closed.items() if each.error is None and _is_drained(each.answer)]
    now = found.reached | look(lines).reached  # an upload that was under way has brought the model since
    kept = [a for a in drained if now[a].durability not in ("", "none") and now[a].generation]
    snapshots = {each.address: each for each in take_snapshots(lines, kept)}
    stopped: dict[str, Outcome] = {}
    if stop:
        ready = [a for a in drained if a not in snapshots or snapshots[a].error is None]
        stopped = _until(lines, ready, pb.DRAIN_ACTION_STOP, lambda answer: answer.stopping)
    results = []
    for shard in found.shards:
        address = shard.address
        outcome = closed.get(address, Outcome(address, error=shard.error))
        results.append(_Drained(address, outcome, snapshots.get(address), stopped.get(address)))
    if as_json:
        print(json.dumps([each.plain() for each in results], indent=2))
    for each in results:
        if each.error is not None or not as_json:
            render.say(each.words(), failed=each.error is not None)
    if any(each.is_late for each in results):
        return EXIT_PARTIAL
    return exit_status([Outcome(each.address, error=each.error) for each in results])


class _Drained:
    """What became of one shard in a drain."""

    def __init__(self, address: str, closed: Outcome, snapshot: Outcome | None, stopped: Outcome | None) -> None:
        self.address = address
        self._closed, self._snapshot, self._stopped = closed, snapshot, stopped
        self._is_pending = closed.error is None and not _is_drained(closed.answer)
        goes_on = stopped is not None and stopped.error is None and not stopped.answer.stopping
        self.is_late = self._is_pending or goes_on

    @property
    def error(self) -> OperateError | None:
        """The first thing that has failed."""
        found = [
            each.error for each in (self._closed, self._snapshot, self._stopped) if each is not None and each.error
        ]
        return found[0] if found else None

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        found = render.outcome_plain(self._closed)
        found["drained"] = self._closed.error is None and not self._is_pending
        found["snapshot"] = render.outcome_plain(self._snapshot) if self._snapshot is not None else None
        found["stopping"] = self._stopped is not None and self._stopped.error is None and self._stopped.answer.stopping
        if self._stopped is not None and self._stopped.error is not None:
            found["error"] = str(self._stopped.error)
        return found

    def words(self) -> str:
        """Say it."""
        if self._closed.error is not None:
            return str(self._closed.error)
        answer = self._closed.answer
        if self._is_pending:
            return (
                f"{self.address}: closed, and not drained yet: {answer.calls_inside} calls under way, "
                f"{answer.queued} waiting for the writer; ask again"
            )
        parts = [f"{self.address}: drained at version {answer.version}"]
        if self._snapshot is None:
            parts.append("nothing is kept (no --data-dir, or no model yet)")
        elif self._snapshot.error is not None:
            parts.append(f"no snapshot: {self._snapshot.error}")
        else:
            taken = self._snapshot.answer
            parts.append(f"checkpoint {taken.checkpoint or '(of this shard alone)'}: {taken.path}")
        if self._stopped is not None:
            failed = self._stopped.error or (None if self._stopped.answer.stopping else "it is busy, ask again")
            parts.append(f"not stopped: {failed}" if failed else "stopping")
        return "; ".join(parts)


def _is_drained(answer: pb.DrainResponse) -> bool:
    return answer.draining and not answer.calls_inside and not answer.queued


def _until(
    lines: Lines,
    addresses: Sequence[str],
    action: "pb.DrainAction.ValueType",
    is_done: Callable[[pb.DrainResponse], bool],
) -> dict[str, Outcome]:
    """Ask these shards for an action until it is done, as long as a call may take; return what came last."""
    request = pb.DrainRequest(action=action)
    end = time.monotonic() + lines.timeout_seconds
    found = {each.address: each for each in lines.all("Drain", request, addresses)}
    while late := [a for a, each in found.items() if each.error is None and not is_done(each.answer)]:
        if time.monotonic() >= end:
            break
        time.sleep(_POLL_SECONDS)
        found |= {each.address: each for each in lines.all("Drain", request, late)}
    return found
