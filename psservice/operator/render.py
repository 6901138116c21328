"""How statuses and workers are written: tables for people, plain values for programs."""

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pscore.names import escaped
from pscore.units import human_bytes
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.protojson import plain
from psservice.operator.client import OperateError, Outcome
from psservice.operator.fleet import Look, Worker, saved_bytes, saved_share

_PIPED_COLUMNS = 160

_MOST_STALENESS_SHOWN = 4
"""Shards; of more, the smallest and the largest staleness are shown."""


def say(text: str, *, failed: bool = False) -> None:
    """Print a line, in which nothing that a server said is obeyed by a terminal; what has failed goes to stderr."""
    line = escaped(text)
    print(f"psservice: {line}" if failed else line, file=sys.stderr if failed else sys.stdout)


def cell(text: str, style: str = "") -> Text:
    """Return a text of somebody else's for a table: nothing in it is markup, or obeyed by a terminal."""
    return Text(escaped(text), style)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the caller that nobody reads; rich would end the process with a status of ours."""
        raise BrokenPipeError


def new_console() -> Console:
    """Return a console for stdout; into a file or a pipe lines are as long as tables need."""
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=_PIPED_COLUMNS)


def outcome_plain(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome for JSON."""
    if outcome.error is not None:
        return {"address": outcome.address, **error_plain(outcome.error)}
    return {"address": outcome.address, **plain(outcome.answer)}


def error_plain(error: OperateError) -> dict[str, Any]:
    """Return an error for JSON: the message, and the reason of a refusal that has one."""
    return {"error": str(error), "reason": error.reason.name if error.reason else None}


def worker_plain(worker: Worker) -> dict[str, Any]:
    """Return a worker for JSON."""
    return {
        "worker_id": worker.worker_id,
        "incarnation": worker.incarnation,
        "step": worker.step,
        "staleness": {str(index): staleness for index, staleness in worker.staleness.items()},
        "lease_remaining_seconds": worker.lease_seconds,
        "idle_seconds": worker.idle_seconds,
        "pushes_per_second": worker.pushes_per_second,
        "push_bytes": worker.push_bytes,
        "pull_bytes": worker.pull_bytes,
        "missing_shards": list(worker.missing),
    }


def workers_plain(found: Look) -> dict[str, Any]:
    """Return the workers of all shards for JSON, and the shards that could not be asked."""
    return {
        "workers": [worker_plain(worker) for worker in found.workers()],
        "evicted": evicted(found),
        "unreached": [{"address": address, **error_plain(error)} for address, error in found.errors.items()],
    }


def evicted(found: Look) -> dict[str, float]:
    """Return who is kept out, and for how many seconds more: the longest time of any shard."""
    times: dict[str, float] = {}
    for status in found.reached.values():
        for each in status.evicted:
            times[each.worker_id] = max(times.get(each.worker_id, 0.0), each.remaining_seconds)
    return times


def print_statuses(found: Look) -> None:
    """Print each shard with its workers."""
    console = new_console()
    for address, answer in found.reached.items():
        console.print(_shard_summary(address, answer))
        console.print(_shard_workers(answer) if answer.workers else "no live workers", highlight=False)


def print_workers(found: Look) -> None:
    """Print the workers of all shards as one table, and who is kept out."""
    console = new_console()
    workers = found.workers()
    console.print(worker_table(workers) if workers else "no live workers", highlight=False)
    for name, seconds in evicted(found).items():
        console.print(cell(f"{name}: evicted, may come back in {seconds:.0f} s"))


def worker_table(workers: list[Worker], *, wide: bool = True) -> Table:
    """Return the table of workers over all shards; without incarnations and a few figures where it is to be narrow."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("worker", overflow="ellipsis", no_wrap=True, max_width=48 if wide else 24)
    if wide:
        table.add_column("incarnation", no_wrap=True)
    for name in ("step", "staleness", "pushes/s", *(["idle"] if wide else []), "pushed", "pulled", "lease"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True)
    for worker in workers:
        missing = ", ".join(map(str, worker.missing))
        table.add_row(
            cell(worker.worker_id),
            *([cell(worker.incarnation[:8])] if wide else []),
            f"{worker.step:,}",
            _staleness(worker.staleness),
            f"{worker.pushes_per_second:.2f}" if worker.pushes_per_second else "–",
            *([f"{worker.idle_seconds:.0f} s"] if wide else []),
            human_bytes(worker.push_bytes),
            human_bytes(worker.pull_bytes),
            f"{worker.lease_seconds:.0f} s",
            cell(f"not at shard {missing}" if missing else "", "yellow"),
        )
    return table


def _staleness(by_shard: dict[int, int]) -> str:
    """Write a worker's staleness at each shard, by index."""
    values = list(by_shard.values())
    if len(set(values)) == 1:
        return str(values[0])
    if len(values) > _MOST_STALENESS_SHOWN:
        return f"{min(values)}–{max(values)}"
    return " ".join(map(str, values))


def _shard_summary(address: str, answer: pb.GetStatusResponse) -> Table:
    down_mode = pb.DownMode.Name(answer.settings.down_mode).removeprefix("DOWN_MODE_").lower()
    table = Table.grid(padding=(0, 2))
    for name, value in (
        (address, f"run {answer.run_id or '–'}, {state_of(answer)}, {answer.method or 'no method yet'}"),
        ("shard", f"{answer.shard_index} of {answer.num_shards}, on {answer.device}, up {answer.uptime_seconds:.0f} s"),
        ("parameters", f"{answer.length:,} of {answer.parameters:,}"),
        ("version", f"{answer.version:,} after {answer.samples:,} samples, {answer.queued} waiting"),
        ("kept", kept(answer)),
        ("bytes", f"{human_bytes(answer.push_bytes)} pushed, {human_bytes(answer.pull_bytes)} pulled ({down_mode}), "
                  f"{human_bytes(answer.buffer_bytes)} of buffers"),
        ("saved", saved(answer)),
    ):  # fmt: skip
        table.add_row(cell(name, "bold"), cell(value))
    return table


def state_of(answer: pb.GetStatusResponse) -> str:
    """Return in a word or two where a shard is."""
    state = pb.RunState.Name(answer.run_state).removeprefix("RUN_STATE_").lower()
    if answer.draining:
        state += ", draining" if answer.calls_inside or answer.queued else ", drained"
    return state if answer.durable else f"{state}, not durable"


def saved(answer: pb.GetStatusResponse) -> str:
    """Return how much less than dense pushes and pulls the wire has carried."""
    share = saved_share(answer)
    if share is None:
        return "–"
    dense = answer.dense_push_bytes + answer.dense_pull_bytes
    return f"{human_bytes(saved_bytes(answer))} of {human_bytes(dense)} ({share:.1%})"


def kept(answer: pb.GetStatusResponse) -> str:
    """Return what a shard has on its disk."""
    if answer.durability in ("", "none"):
        return "nothing (no --data-dir)"
    journal = (
        f", {human_bytes(answer.journal_bytes)} of journal since the start" if answer.durability == "journal" else ""
    )
    name = f", checkpoint {answer.snapshot_checkpoint}" if answer.snapshot_checkpoint else ""
    if not answer.snapshot_age_seconds:
        return f"no snapshot yet{journal}"
    return f"snapshot of version {answer.snapshot_version:,} {answer.snapshot_age_seconds:.0f} s ago{name}{journal}"


def _shard_workers(answer: pb.GetStatusResponse) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("worker", no_wrap=True)
    for name in ("step", "stale", "pushed", "pulled", "reply", "density", "lease"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in answer.workers:
        mode = pb.ReplyMode.Name(worker.reply_mode).removeprefix("REPLY_MODE_").lower()
        table.add_row(
            cell(worker.worker_id),
            str(worker.last_step),
            str(worker.staleness),
            human_bytes(worker.push_bytes),
            human_bytes(worker.pull_bytes),
            "–" if mode == "unspecified" else mode,
            f"{worker.reply_density:.2%}",
            f"{worker.lease_remaining_seconds:.0f} s",
        )
    return table
