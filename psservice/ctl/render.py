"""Tables and lines for people, plain values for programs."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pscore.names import escaped
from pscore.units import human_bytes
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl.client import Outcome
from psservice.ctl.fleet import Fleet, Worker, losses_among, saved_bytes, saved_share
from psservice.observability.protojson import plain

_PIPED_COLUMNS = 160
_MOST_STALENESS_SHOWN = 4  # shards; of more, the smallest and the largest staleness are shown


def say(text: str, *, failed: bool = False) -> None:
    """Print a line, in which a server's words cannot control the terminal; failures are printed to stderr."""
    line = escaped(text)
    print(f"psservice: {line}" if failed else line, file=sys.stderr if failed else sys.stdout)


def say_errors(outcomes: Iterable[Outcome]) -> None:
    """Print the errors among these outcomes to stderr."""
    for each in outcomes:
        if each.error is not None:
            say(str(each.error), failed=True)


def cell(text: str, style: str = "") -> Text:
    """Return a server's text for a table: nothing in it is markup, or controls the terminal."""
    return Text(escaped(text), style)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to the caller; rich would end the process with a status of its own."""
        raise BrokenPipeError


def new_console() -> Console:
    """Return a console for stdout; in a file or a pipe, lines are as long as tables need."""
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=_PIPED_COLUMNS)


def outcome_plain(outcome: Outcome) -> dict[str, Any]:
    """Return an answer for JSON, or an error with the reason of a refusal that has one."""
    error = outcome.error
    if error is not None:
        return {"address": outcome.address, "error": str(error), "reason": error.reason.name if error.reason else None}
    return {"address": outcome.address, **plain(outcome.answer)}


def workers_plain(fleet: Fleet) -> dict[str, Any]:
    """Return the workers of all shards for JSON, and the shards without an answer."""
    return {
        "workers": [dataclasses.asdict(worker) for worker in fleet.workers()],
        "evicted": fleet.evicted(),
        "unreached": [outcome_plain(each) for each in fleet.unreached],
    }


class Column(NamedTuple):
    """One column of a table of objects; ``wide`` columns are left out of a narrow table."""

    name: str
    value: Callable[[Any], str | Text]
    is_text: bool = False
    wide: bool = False


def table_of(columns: Sequence[Column], items: Iterable[Any], *, wide: bool = True) -> Table:
    """Return a table with a row for each item; text is aligned to the left, figures to the right."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    chosen = [column for column in columns if wide or not column.wide]
    for column in chosen:
        justify = "left" if column.is_text else "right"
        table.add_column(column.name, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for item in items:
        table.add_row(*(column.value(item) for column in chosen))
    return table


_WORKER_COLUMNS = (
    Column("worker", lambda worker: cell(worker.worker_id), is_text=True),
    Column("incarnation", lambda worker: cell(worker.incarnation[:8]), is_text=True, wide=True),
    Column("step", lambda worker: f"{worker.step:,}"),
    Column("staleness", lambda worker: _staleness([*worker.staleness.values()])),
    Column("pushes/s", lambda worker: f"{worker.pushes_per_second:.2f}" if worker.pushes_per_second else "–"),
    Column("idle", lambda worker: f"{worker.idle_seconds:.0f} s", wide=True),
    Column("pushed", lambda worker: human_bytes(worker.push_bytes)),
    Column("pulled", lambda worker: human_bytes(worker.pull_bytes)),
    Column("lease", lambda worker: f"{worker.lease_remaining_seconds:.0f} s"),
    Column("", lambda worker: missing_cell(worker.missing_shards), is_text=True),
)
_SHARD_WORKER_COLUMNS = (
    Column("worker", lambda worker: cell(worker.worker_id), is_text=True),
    Column("step", lambda worker: str(worker.last_step)),
    Column("stale", lambda worker: str(worker.staleness)),
    Column("pushed", lambda worker: human_bytes(worker.push_bytes)),
    Column("pulled", lambda worker: human_bytes(worker.pull_bytes)),
    Column("reply", lambda worker: _word(pb.ReplyMode, worker.reply_mode).replace("unspecified", "–")),
    Column("density", lambda worker: f"{worker.reply_density:.2%}"),
    Column("lease", lambda worker: f"{worker.lease_remaining_seconds:.0f} s"),
)


def worker_table(workers: list[Worker], *, wide: bool = True) -> Table:
    """Return the table of workers over all shards."""
    table = table_of(_WORKER_COLUMNS, workers, wide=wide)
    table.columns[0].max_width = 48 if wide else 24
    return table


def missing_cell(indices: Sequence[int]) -> Text:
    """Return a cell that names missing shards."""
    return cell(f"not at shard {', '.join(map(str, indices))}" if indices else "", "yellow")


def evicted_lines(fleet: Fleet) -> list[Text]:
    """Return a line for each worker that is banned."""
    return [cell(f"{name}: evicted, may come back in {seconds:.0f} s") for name, seconds in fleet.evicted().items()]


def lost_lines(fleet: Fleet) -> list[Text]:
    """Return a line for each shard that has lost versions which another shard has seen."""
    return [
        cell(
            f"shard {index} has lost {lost:,} versions that others have seen: the shards are of different moments; "
            "see psservice checkpoint list, and go back with psservice restore --checkpoint",
            "bold red",
        )
        for index, lost in losses_among(fleet).items()
    ]


def release_lines(fleet: Fleet) -> list[Text]:
    """Return a line that names the releases of servers and workers, if they are of several."""
    found: dict[str, list[str]] = {}
    for status in fleet.reached.values():
        found.setdefault(status.server_version, []).append(f"shard {status.shard_index}")
    workers = {each.worker_id: each.release for status in fleet.reached.values() for each in status.workers}
    for release in sorted({release for release in workers.values() if release}):
        count = sum(each == release for each in workers.values())
        found.setdefault(release, []).append("1 worker" if count == 1 else f"{count:,} workers")
    if len(found) < 2:
        return []
    shown = "; ".join(f"{release}: {', '.join(who)}" for release, who in sorted(found.items()))
    return [cell(f"several releases at once: {shown}", "yellow")]


def _staleness(values: list[int]) -> str:
    """Write a worker's staleness at each shard, by index."""
    if len(set(values)) == 1 or len(values) > _MOST_STALENESS_SHOWN:
        return range_of(values)
    return " ".join(map(str, values))


def range_of(values: Sequence[int]) -> str:
    """Write the lowest and the highest of these numbers, or the number that all of them are."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}–{high}"


def print_plain(value: object, form: str, *, of_several: bool = False) -> None:
    """Print plain values as ``json`` or ``yaml``; one document of several is a line of JSON, or begins with ``---``."""
    if form == "yaml":
        print(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, explicit_start=of_several), end="", flush=True)
    else:
        print(json.dumps(value, indent=None if of_several else 2), flush=True)


def print_statuses(fleet: Fleet) -> None:
    """Print each shard with its workers."""
    console = new_console()
    for address, status in fleet.reached.items():
        console.print(_shard_summary(address, status))
        workers = table_of(_SHARD_WORKER_COLUMNS, status.workers) if status.workers else "no live workers"
        console.print(workers, highlight=False)
    for line in (*lost_lines(fleet), *release_lines(fleet)):
        console.print(line, soft_wrap=True)


def print_workers(fleet: Fleet) -> None:
    """Print the workers of all shards as one table, and the banned ones."""
    console = new_console()
    workers = fleet.workers()
    console.print(worker_table(workers) if workers else "no live workers", highlight=False)
    for line in evicted_lines(fleet):
        console.print(line)


def _shard_summary(address: str, status: pb.GetStatusResponse) -> Table:
    table = Table.grid(padding=(0, 2))
    if status.HasField("standby"):
        table.add_row(cell(address, "bold"), cell(f"run {status.run_id or '–'}, {_standby(status)}"))
        table.add_row(cell("shard", "bold"), cell(f"{status.shard_index} of {status.num_shards}"))
        return table
    for name, value in (
        (address, f"run {status.run_id or '–'}, {state_of(status)}, {status.method or 'no method yet'}"),
        ("shard", f"{status.shard_index} of {status.num_shards}, on {status.device}, up {status.uptime_seconds:.0f} s"),
        ("parameters", f"{status.length:,} of {status.parameters:,}"),
        ("version", f"{status.version:,} after {status.samples:,} samples, {status.queued} requests at work"),
        *([("relay", f"of {_relay(status)}")] if status.HasField("relay") else []),
        *([("readers", _readers(status))] if status.readers else []),
        *([("standby", _replication(status))] if status.HasField("replication") else []),
        ("kept", _kept(status)),
        ("bytes", f"{human_bytes(status.push_bytes)} pushed, {human_bytes(status.pull_bytes)} pulled "
                  f"({_word(pb.DownMode, status.settings.down_mode)}), {human_bytes(status.buffer_bytes)} of buffers"),
        ("saved", _saved(status)),
    ):  # fmt: skip
        table.add_row(cell(name, "bold"), cell(value))
    return table


def state_of(status: pb.GetStatusResponse) -> str:
    """Return a shard's state in a word or two."""
    if status.HasField("standby"):
        return "standing by"
    if status.replaced_by:
        return "replaced by its standby, and serves nobody: stop it"
    state = _word(pb.RunState, status.run_state)
    if status.draining:
        state += ", draining" if status.calls_inside else ", drained"
    return state if status.durable else f"{state}, not durable"


def _word(kind: Any, value: int) -> str:
    """Return an enum's value without the enum's name, which begins each."""
    prefix = kind.DESCRIPTOR.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(kind.Name(value)).removeprefix(prefix).lower()


def _saved(status: pb.GetStatusResponse) -> str:
    share = saved_share(status)
    if share is None:
        return "–"
    dense = status.dense_push_bytes + status.dense_pull_bytes
    return f"{human_bytes(saved_bytes(status))} of {human_bytes(dense)} ({share:.1%})"


def _readers(status: pb.GetStatusResponse) -> str:
    """Write who follows the model, and who is behind longest."""
    count = f"{len(status.readers)} reader" + ("s" if len(status.readers) > 1 else "")
    last = max(status.readers, key=lambda each: each.behind_seconds)
    late = ""
    if last.behind_seconds >= 1:
        held = f"version {last.version:,}" if last.version else "no version"
        late = f"; {last.reader} has {held}, and lacks the newest for {last.behind_seconds:.0f} s"
    return f"version {status.cut_version:,} for {count}{late}"


def _standby(status: pb.GetStatusResponse) -> str:
    """Write the primary of a standby, whether it answers, and how far the standby is behind it."""
    standby = status.standby
    text = f"stands by for {standby.primary}"
    if standby.lost_seconds:
        text += f", which has not answered for {standby.lost_seconds:.0f} s: {standby.error}"
    elif standby.error:
        text += f", and cannot follow it: {standby.error}"
    if not standby.has_model:
        return f"{text}; has no model yet"
    lacks = f"lacks {human_bytes(standby.behind_bytes)}" if standby.behind_bytes else "has everything that it knows of"
    return f"{text}; {lacks}" + (", and answers wait for it" if standby.acknowledged else "")


def _replication(status: pb.GetStatusResponse) -> str:
    """Write how far the standby of a shard is, and whether answers wait for it."""
    progress = status.replication
    waits = ", and answers wait for it" if progress.acknowledged else ""
    if not progress.standby:
        return "none has followed yet, and answers wait for one"
    if not progress.connected:
        return f"{progress.standby} is away for {progress.behind_seconds:.0f} s, lacks {_lack(progress)}{waits}"
    if not progress.behind_bytes and not progress.behind_versions:
        return f"{progress.standby} has everything{waits}"
    return f"{progress.standby} lacks {_lack(progress)}, for {progress.behind_seconds:.1f} s{waits}"


def _lack(progress: pb.ReplicationStatus) -> str:
    versions = f"{progress.behind_versions:,} version" + ("" if progress.behind_versions == 1 else "s")
    return f"{versions} ({human_bytes(progress.behind_bytes)} of the journal)"


def standby_lines(fleet: Fleet) -> list[Text]:
    """Return a line about each shard's standby, if it has one, and about each shard that is one."""
    return [
        cell(f"shard {status.shard_index} {_standby(status)}")
        if status.HasField("standby")
        else cell(f"standby of shard {status.shard_index}: {_replication(status)}")
        for status in fleet.reached.values()
        if status.HasField("standby") or status.HasField("replication")
    ]


def _relay(status: pb.GetStatusResponse) -> str:
    """Write a relay's source, whether it answers, and how far the shard is behind, as far as is known."""
    relay, text = status.relay, status.relay.source
    if relay.lost_seconds:
        text += f", which has not been followed for {relay.lost_seconds:.0f} s: {relay.error}"
    if not relay.source_version and not status.generation:
        return f"{text}; no version yet"
    lacking = relay.source_version - status.version
    if relay.behind_seconds and lacking > 0:
        count = f"{lacking:,} version" + ("s" if lacking > 1 else "")
        return f"{text}; {count} behind, for {relay.behind_seconds:.0f} s"
    if relay.behind_seconds:
        return f"{text}; lacks the cut of version {relay.source_version:,} for {relay.behind_seconds:.0f} s"
    known = "the newest version that is known of it" if relay.lost_seconds else "its newest version"
    return f"{text}; has {known}"


def relay_lines(fleet: Fleet) -> list[Text]:
    """Return a line about each shard's source, if it is one of a relay."""
    return [
        cell(f"shard {status.shard_index} relays {_relay(status)}")
        for status in fleet.reached.values()
        if status.HasField("relay")
    ]


def reader_lines(fleet: Fleet) -> list[Text]:
    """Return a line about the readers, if there are any."""
    return [cell(_readers(status)) for status in fleet.reached.values() if status.readers]


def _kept(status: pb.GetStatusResponse) -> str:
    """Write what a shard has on its disk."""
    if status.durability in ("", "none"):
        return "nothing (no --data-dir)"
    journal = f", {human_bytes(status.journal_bytes)} of journal since the start"
    journal = journal if status.durability == "journal" else ""
    if not status.snapshot_age_seconds:
        return f"no snapshot yet{journal}"
    name = f", checkpoint {status.snapshot_checkpoint}" if status.snapshot_checkpoint else ""
    return f"snapshot of version {status.snapshot_version:,} {status.snapshot_age_seconds:.0f} s ago{name}{journal}"
