"""What chaos found: tables on the terminal, every figure as JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from verify.plan import Result, Trial

_FIGURES = (
    ("sent", "sent"),
    ("acknowledged", "acknowl."),
    ("applied", "applied"),
    ("repeated", "repeats"),
    ("lost", "lost"),
    ("duplicated", "twice"),
    ("in_doubt", "in doubt"),
    ("refused", "refused"),
    ("compared", "models compared"),
    ("topk_replies", "top-k replies"),
    ("different", "different"),
)

_FEED_FIGURES = (
    ("begun", "begun"),
    ("acknowledged", "acknowl."),
    ("in_doubt", "in doubt"),
    ("versions", "versions checked"),
    ("claims", "claims"),
    ("looks", "reads"),
    ("downloads", "downloads"),
    ("restores", "taken back"),
    ("nobodys", "nobody's"),
    ("mixed", "mixed"),
    ("renamed", "two models"),
    ("lost", "lost"),
    ("went_back", "back"),
    ("late", "late"),
)

_CUT_FIGURES = (
    ("cuts", "cuts"),
    ("sent", "sent"),
    ("acknowledged", "acknowl."),
    ("repeated", "repeats"),
    ("gone", "gone"),
    ("lost", "lost"),
    ("duplicated", "twice"),
    ("compared", "models"),
    ("different", "different"),
    ("checkpoints", "checkpoints"),
    ("checkpoints_lost", "lost"),
    ("histories", "histories"),
    ("refused", "refused"),
)


def show(console: Console, results: Sequence[Result], notes: Sequence[str]) -> None:
    """Print the tables, and everything that is wrong."""
    table = Table(title="Every push accounted for, shard by shard", title_justify="left", box=box.SIMPLE)
    table.add_column("campaign")
    for title in ("kills", *(title for _, title in _FIGURES), "bit-identical", "seconds"):
        table.add_column(title, justify="right")
    pushes = [result for result in results if not result.feeds and not result.cuts]
    for result in pushes:
        figures = [f"{result.total(name):,}" for name, _ in _FIGURES]
        identical = bool(result.verdicts) and all(verdict.bit_identical for verdict in result.verdicts)
        kills = str(result.faults["servers killed"])
        table.add_row(result.name, kills, *figures, "yes" if identical else "NO", f"{result.seconds:.0f}")
    if pushes:
        console.print(table)
    if feeds := [result for result in results if result.feeds]:
        console.print(_table_of_feeds(feeds))
    if cuts := [result for result in results if result.cuts]:
        console.print(_table_of_cuts(cuts))
    done = Table(title="What was done to it", title_justify="left", box=box.SIMPLE)
    done.add_column("")
    done.add_column("times", justify="right")
    for what, count in faults(results).items():
        done.add_row(what, f"{count:,}")
    console.print(done)
    trials = [trial for result in results for trial in result.trials]
    if trials:
        console.print(_table_of_trials(trials))
    for note in notes:
        console.print(f"- {note}", markup=False, highlight=False, style="dim")
    for wrong in problems(results):
        console.print(f"WRONG: {wrong}", markup=False, highlight=False, style="red")


def _table_of_feeds(results: Sequence[Result]) -> Table:
    table = Table(title="Every publication accounted for, feed by feed", title_justify="left", box=box.SIMPLE)
    table.add_column("campaign")
    for title in ("kills", *(title for _, title in _FEED_FIGURES), "good", "seconds"):
        table.add_column(title, justify="right")
    for result in results:
        figures = [f"{feed_total(result, name):,}" for name, _ in _FEED_FIGURES]
        kills = str(result.faults["servers killed"])
        table.add_row(result.name, kills, *figures, "yes" if result.good else "NO", f"{result.seconds:.0f}")
    return table


def _table_of_cuts(results: Sequence[Result]) -> Table:
    table = Table(title="Every push accounted for behind every power cut", title_justify="left", box=box.SIMPLE)
    table.add_column("campaign", no_wrap=True)
    for title in (*(title for _, title in _CUT_FIGURES), "oldest gone", "good", "seconds"):
        table.add_column(title, justify="right")
    for result in results:
        figures = [f"{cut_total(result, name):,}" for name, _ in _CUT_FIGURES]
        oldest = max(verdict.gone_seconds for verdict in result.cuts)
        table.add_row(result.name, *figures, f"{oldest:.2f} s", "yes" if result.good else "NO", f"{result.seconds:.0f}")
    return table


def cut_total(result: Result, what: str) -> int:
    """Sum a figure of a result's verdicts on power cuts."""
    return sum(int(getattr(verdict, what)) for verdict in result.cuts)


def feed_total(result: Result, what: str) -> int:
    """Sum a figure of a result's verdicts on feeds."""
    return sum(int(getattr(feed, what)) for feed in result.feeds)


def _table_of_trials(trials: Sequence[Trial]) -> Table:
    table = Table(title="One bit flipped while the server was down", title_justify="left", box=box.SIMPLE)
    for title in ("where", "--recover strict", "--recover last-good"):
        table.add_column(title)
    for trial in trials:
        table.add_row(trial.place, trial.strict, trial.last_good)
    return table


def faults(results: Sequence[Result]) -> dict[str, int]:
    """Sum what was done, servers first, then the network, then calls that were made again."""
    done: Counter[str] = Counter()
    for result in results:
        done += result.faults
        done += Counter({f"connections: {kind}": count for kind, count in sorted(result.network.items())})
        done += Counter({f"calls made again: {why}": count for why, count in sorted(result.troubles.items())})
    return dict(sorted(done.items(), key=lambda item: (":" in item[0], item[0])))


def problems(results: Sequence[Result]) -> list[str]:
    """Say everything that is wrong."""
    found = []
    for result in results:
        found += [f"{result.name}: {failure}" for failure in result.failures]
        if result.generations != 1:
            found.append(f"{result.name}: a shard began {result.generations - 1} new histories")
        for shard, verdict in enumerate(result.verdicts):
            found += [f"{result.name}, shard {shard}: {note}" for note in verdict.notes]
        found += [f"{result.name}: {note}" for feed in result.feeds for note in feed.notes]
        found += [f"{result.name}: {note}" for cuts in result.cuts for note in cuts.notes]
        if not result.good and not found:
            found.append(f"{result.name}: the accounts do not agree")
    return found


def write(path: Path, facts: dict[str, Any], results: Sequence[Result], notes: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    total = {name: sum(result.total(name) for result in results) for name, _ in _FIGURES}
    found = {
        **facts,
        "good": all(result.good for result in results),
        "totals": total,
        "feeds": {name: sum(feed_total(result, name) for result in results) for name, _ in _FEED_FIGURES},
        "cuts": {name: sum(cut_total(result, name) for result in results) for name, _ in _CUT_FIGURES},
        "faults": faults(results),
        "problems": problems(results),
        "notes": list(notes),
        "campaigns": [result.as_plain() for result in results],
    }
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
