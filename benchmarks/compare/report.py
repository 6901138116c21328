"""The results written down: every run as JSON, the tables as Markdown, and into the guide page where that is asked."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compare import tables
from benchmarks.compare.campaign import Campaign
from benchmarks.compare.methods import METHODS
from benchmarks.compare.results import entries, pairings
from benchmarks.compare.straggler import Effect
from benchmarks.compare.tasks import TASKS
from benchmarks.compare.worker import LARGEST_NORM
from benchmarks.harness.machine import sentences
from benchmarks.harness.section import Table


def figures(campaign: Campaign, effects: Sequence[Effect]) -> dict[str, Any]:
    """Return everything that was measured, as JSON has it."""
    plan = campaign.plan
    return {
        "settings": asdict(plan)
        | {
            "clip_norm": LARGEST_NORM,
            "tasks": {
                key: {"title": TASKS[key].title, "metric": TASKS[key].metric, "batch_size": TASKS[key].batch_size}
                | {"rates": TASKS[key].rates, "data": TASKS[key].source()}
                for key in plan.tasks
            },
            "methods": {
                key: {"title": METHODS[key].title, "kind": METHODS[key].kind, "momenta": METHODS[key].momenta}
                | {"server": {count: METHODS[key].server(count) for count in plan.workers_of(METHODS[key])}}
                for key in plan.methods
            },
        },
        "choices": [
            {"task": task, "method": method, "tuned_at_workers": workers, **choice._asdict()}
            for (task, method, workers), choice in campaign.choices.items()
        ],
        "summary": [_plain(entry) for entry in entries(campaign.runs)],
        "pairs": [_plain(pairing) for pairing in pairings(campaign.runs)],
        "slow_worker": [{**asdict(effect), "share": effect.share} for effect in effects],
        "failures": campaign.failures,
        "runs": [run.plain() for run in campaign.runs],
        "search_runs": [run.plain() for run in campaign.searched],
    }


def all_tables(campaign: Campaign, effects: Sequence[Effect]) -> list[Table]:
    gathered = entries(campaign.runs)
    return [
        *tables.quality(gathered),
        *tables.differences(pairings(campaign.runs)),
        *tables.stragglers(effects),
    ]


def notes(campaign: Campaign) -> list[str]:
    """Say what the tables do not."""
    plan = campaign.plan
    seeds = ", ".join(map(str, plan.seeds))
    tuned = ", ".join(map(str, plan.tuned_at))
    momentum = "rate and momentum" if plan.momenta else "rate"
    return [
        f"Every run has {plan.samples:,} samples, shared out among its workers. Seeds {seeds}: a seed gives every "
        "method the same weights to begin with and every worker the same batches. ± is the standard deviation over "
        "the seeds; a rival is better or worse beyond one paired standard error.",
        f"The search for {momentum} is the same for every method: runs of {plan.search_samples:,} samples with another "
        f"seed, judged by the loss on data that are neither trained on nor tested with, at {tuned} workers; other "
        "numbers of workers use the settings of the next number above. Rates are effective: lr / (1 − momentum).",
        f"Sparse methods send {plan.density:.1%} of each large tensor, small ones whole. Bytes are messages of "
        "pushes and pulls of all workers; the first upload and downloads of the model are left out.",
        "Staleness counts the pushes of others between a worker's replica and its push; seconds are those of training "
        "on this machine, all processes on its cores, and say little about a cluster.",
        *tables.verdicts(pairings(campaign.runs)),
        *(TASKS[key].source() for key in plan.tasks),
        *(f"FAILED: {failure}" for failure in campaign.failures),
    ]


def markdown(facts: dict[str, Any], found: Sequence[Table], said: Sequence[str]) -> str:
    lines = []
    for table in found:
        lines += [f"**{table.title}**", "", _line(table.columns)]
        lines += [_line(("---", *["---:"] * (len(table.columns) - 1)))]
        lines += [*map(_line, table.rows), ""]
    lines += [*(f"* {note}" for note in said), *(f"* {sentence}" for sentence in sentences(facts))]
    return "\n".join(lines) + "\n"


def write(directory: Path, facts: dict[str, Any], measured: dict[str, Any], text: str) -> list[Path]:
    """Write ``compare.json`` and ``compare.md``; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = {
        "compare.json": json.dumps({**facts, **measured}, indent=1, ensure_ascii=False) + "\n",
        "compare.md": f"# Methods compared\n\n{text}",
    }
    for name, content in texts.items():
        (directory / name).write_text(content, encoding="utf-8")
    return [directory / name for name in texts]


def _plain(entry: Any) -> dict[str, Any]:
    """Return a dataclass as JSON has it, named tuples as objects."""
    return {
        name: value._asdict() if hasattr(value, "_asdict") else value
        for name in entry.__slots__
        for value in (getattr(entry, name),)
    }


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
