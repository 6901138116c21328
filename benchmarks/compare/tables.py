"""The results as tables: numbers as a reader wants them."""

from collections.abc import Sequence

from benchmarks.campaign.methods import METHODS, SUBJECT
from benchmarks.campaign.report import count_words, difference_words, metric_words, score_words
from benchmarks.campaign.tasks import TASKS, Task
from benchmarks.compare.results import Entry, Pairing
from benchmarks.compare.straggler import SLOWNESS, STEP_SECONDS, WORKERS, Effect, title_of
from benchmarks.harness.section import Table

_HEADS = (
    "method",
    "workers",
    "metric",
    "rate",
    "momentum",
    "up, MB",
    "down, MB",
    "versions",
    "staleness, mean",
    "p99",
    "seconds",
)
_LEAST_SHARE = 0.9


def quality(entries: Sequence[Entry]) -> list[Table]:
    """Return one table a task: what each method reached, and with what."""
    found = []
    for task in TASKS.values():
        rows = [_row(task, entry) for entry in entries if entry.task == task.key]
        if rows:
            heads = tuple(metric_words(task) if head == "metric" else head for head in _HEADS)
            found.append(Table(f"{task.title}: the server's model after the same number of samples", heads, rows))
    return found


def differences(pairings: Sequence[Pairing]) -> list[Table]:
    """Return one table a task: the subject against each rival, seed by seed."""
    subject = METHODS[SUBJECT].title
    found = []
    for task in TASKS.values():
        here = [pairing for pairing in pairings if pairing.task == task.key]
        counts = sorted({pairing.workers for pairing in here})
        cells = {(pairing.rival, pairing.workers): difference_words(task, pairing.difference) for pairing in here}
        rows = [
            (METHODS[rival].title, *(cells.get((rival, count), "–") for count in counts))
            for rival in METHODS
            if any(pairing.rival == rival for pairing in here)
        ]
        if rows:
            heads = ("rival", *(f"{count} worker{'s' if count > 1 else ''}" for count in counts))
            title = f"{task.title}: by how much {subject} is better, {metric_words(task)}, ± one paired standard error"
            found.append(Table(title, heads, rows))
    return found


def verdicts(pairings: Sequence[Pairing]) -> list[str]:
    """Say, for each number of workers, where the subject is worse than a rival by more than one standard error."""
    subject = METHODS[SUBJECT].title
    said = []
    for workers in sorted({pairing.workers for pairing in pairings}):
        worse = [
            f"{METHODS[pairing.rival].title} ({TASKS[pairing.task].title})"
            for pairing in pairings
            if pairing.workers == workers and pairing.difference.verdict == "worse"
        ]
        where = f"worse than {', '.join(worse)}" if worse else "not worse than any rival"
        said.append(f"With {count_words(workers)}, {subject} is {where}, by more than one paired standard error.")
    return said


def stragglers(effects: Sequence[Effect]) -> list[Table]:
    """Return the table of the slow worker, or none."""
    if not effects:
        return []
    rows = [
        (
            title_of(effect),
            f"{effect.alone:.1f}",
            f"{effect.beside_slow:.1f}",
            f"{effect.share:.0%}",
            "yes" if effect.share > _LEAST_SHARE else "no",
        )
        for effect in effects
    ]
    title = (
        f"{WORKERS} workers with steps of {STEP_SECONDS * 1e3:.0f} ms, one of them {SLOWNESS} times slower: "
        "steps a second of the others"
    )
    return [Table(title, ("method", "all alike", "one slow", "left", "above 90 %"), rows)]


def _row(task: Task, entry: Entry) -> tuple[str, ...]:
    served = METHODS[entry.method].kind != "single"
    return (
        METHODS[entry.method].title,
        f"{entry.workers}",
        score_words(task, entry.scores) + (f" ({entry.diverged} diverged)" if entry.diverged else ""),
        f"{entry.choice.rate:.2g}",
        f"{entry.choice.momentum:g}",
        f"{entry.up_bytes / 1e6:.1f}" if served else "–",
        f"{entry.down_bytes / 1e6:.1f}" if served else "–",
        f"{entry.versions:.0f}",
        f"{entry.mean_staleness:.1f}" if served else "–",
        f"{entry.p99_staleness:.0f}" if served else "–",
        f"{entry.seconds:.1f}",
    )
