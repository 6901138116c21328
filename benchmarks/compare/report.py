"""The results: every run as JSON, the tables, and what they do not say."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.campaign.comparison import Comparison
from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.tasks import TASKS
from benchmarks.campaign.worker import LARGEST_NORM
from benchmarks.compare import tables
from benchmarks.compare.plan import Plan
from benchmarks.compare.results import entries, pairings
from benchmarks.compare.straggler import Effect
from benchmarks.harness.section import Table


def figures(plan: Plan, campaign: Comparison, effects: Sequence[Effect]) -> dict[str, Any]:
    """Return everything that was measured, as JSON has it."""
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
                | {"server": {count: METHODS[key].server(count) for count in plan.workers}}
                for key in plan.methods
            },
        },
        "choices": [
            {"task": task, "method": entrant.method, "tuned_at_workers": workers, **choice._asdict()}
            for (task, workers, _, entrant), choice in campaign.choices.items()
        ],
        "summary": [_plain(entry) for entry in entries(campaign.counted)],
        "pairs": [_plain(pairing) for pairing in pairings(campaign.counted)],
        "slow_worker": [{**asdict(effect), "share": effect.share} for effect in effects],
        "failures": campaign.failures,
        "runs": [run.plain() for run in campaign.counted],
        "search_runs": [run.plain() for run in campaign.searched],
    }


def all_tables(campaign: Comparison, effects: Sequence[Effect]) -> list[Table]:
    gathered = entries(campaign.counted)
    return [
        *tables.quality(gathered),
        *tables.differences(pairings(campaign.counted)),
        *tables.stragglers(effects),
    ]


def notes(plan: Plan, campaign: Comparison) -> list[str]:
    """Say what the tables do not."""
    seeds = ", ".join(map(str, plan.seeds))
    tuned = ", ".join(map(str, plan.tuned_at))
    momentum = "rate and momentum" if plan.momenta > 1 else "rate"
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
        *tables.verdicts(pairings(campaign.counted)),
        *(TASKS[key].source() for key in plan.tasks),
        *(f"FAILED: {failure}" for failure in campaign.failures),
    ]


def _plain(entry: Any) -> dict[str, Any]:
    """Return a dataclass as JSON has it, named tuples as objects."""
    return {
        name: value._asdict() if hasattr(value, "_asdict") else value
        for name in entry.__slots__
        for value in (getattr(entry, name),)
    }
