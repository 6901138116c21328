"""Section *base*: this checkout against another one, in turn, as often as is asked; medians, their range, and ratios.

Each row is a figure of a probe: a program of ``benchmarks/probes`` in a process of its own, which finds psclient,
psservice, pscore and the load generators of the checkout that it measures. Nothing is written into that checkout.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from benchmarks.harness.section import Plan, Section, Table
from benchmarks.harness.timing import Stat

KEY, TITLE = "base", "This checkout against another one"

_ROOT = Path(__file__).resolve().parents[1]
_PROBES = _ROOT / "benchmarks" / "probes"
_WORDS = 3000
"""Characters of a failure that are shown."""
_PROBE_SECONDS = 400.0


class ProbeError(Exception):
    """A probe failed, or took too long; the message is the end of what it wrote."""


class Checkout:
    """A directory with psclient, psservice, pscore and benchmarks; a context manager.

    Args:
        root: the directory; the default is this checkout.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        if not (root / "psservice").is_dir():
            raise ProbeError(f"{root} has no folder psservice: give --base the root of a checkout")
        self.root = root.resolve()
        self._caches = tempfile.TemporaryDirectory()

    def warm_up(self) -> None:
        """Compile the loops, so that no probe competes with a compiler."""
        self.execute(["-c", "from pscore.warmup import warm_up; warm_up(); print('{}')"], _PROBE_SECONDS)

    def probe(self, name: str, arguments: dict[str, Any]) -> dict[str, float]:
        """Run a probe and return its figures; raises :class:`ProbeError`."""
        return self.execute([str(_PROBES / f"{name}.py"), json.dumps(arguments)], _PROBE_SECONDS)

    def execute(self, command: Sequence[str], seconds: float) -> dict[str, float]:
        """Run Python with this checkout's modules; return the JSON object of its last line."""
        here = Path(self._caches.name)
        apart = {"PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(here / "numba"), "PYTHONPATH": str(self.root)}
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=here,
            env={**os.environ, **apart},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise ProbeError(f"not done after {seconds:.0f} s") from None
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise ProbeError(errors.strip()[-_WORDS:] or f"status {process.returncode}")
        found: dict[str, float] = json.loads(output.splitlines()[-1])
        return found

    def __enter__(self) -> "Checkout":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the caches."""
        self._caches.cleanup()


class Measurement(NamedTuple):
    """A probe, its arguments, and what its figures are called."""

    probe: str
    arguments: dict[str, Any]
    rows: dict[str, str]


def measurements(*, quick: bool) -> list[Measurement]:
    """Return what is measured."""
    calls = {"size": 100_000, "seconds": 1.0 if quick else 3.0}
    steps, warmup = (8, 12) if quick else (20, 20)
    small = {"layout": "small", "steps": steps, "warmup": 20, "one_thread": True}
    large = {"layout": "resnet18" if quick else "resnet50", "steps": steps, "warmup": warmup}
    job = {"steps": 30 if quick else 100}
    found = [
        Measurement("calls", {**calls, "workers": 1}, {"cpu_ms": "server CPU of a push and an exact pull, ms"}),
        Measurement("calls", {**calls, "workers": 8}, {"rate": "8 workers: pushes with pulls a second"}),
        Measurement(
            "steps",
            small,
            {
                "wall_ms": "step(), 62 tensors, 177 k elements: wall, ms",
                "thread_cpu_ms": "– the same: CPU of its thread, ms",
                "cpu_ms": "– the same: CPU of worker and server, ms",
            },
        ),
        Measurement(
            "training",
            {**job, "gradients_given": True},
            {
                "dgs_rate": "DGS 1 %, 38 tensors, gradients given: steps over gloo's",
                "asgd_rate": "ASGD, 38 tensors, gradients given: steps over gloo's",
                "asgd_cpu": "– its server's CPU over gloo's",
            },
        ),
    ]
    if not quick:
        found += [
            Measurement("steps", large, {"wall_copies": "step(), ResNet-50, settled: wall, copies of the model"}),
            Measurement(
                "calls",
                {**calls, "size": 8000, "workers": 180},
                {"cpu_ms": "180 workers, 8 k parameters: server CPU of a push and a pull, ms"},
            ),
            Measurement(
                "rounds",
                {"size": 10_000, "workers": 4, "rounds": 200},
                {
                    "wait_ms": "a round's last push to the others' answers, ms",
                    "wait_pushes": "– the same over a push that closes no round",
                },
            ),
            Measurement("bulk", {"size": 100_000_000}, {"upload": "first upload, MB/s", "download": "download, MB/s"}),
        ]
    return found


def run(plan: Plan) -> Section:
    """Run every probe with the base and with this checkout in turn; a probe that fails is a note."""
    section = Section(KEY, TITLE)
    chosen = measurements(quick=plan.quick)
    if plan.base is None:
        section.notes.append("No base was given: --base DIR.")
        return section
    pairs: list[list[tuple[dict[str, float], dict[str, float]]]] = [[] for _ in chosen]
    with Checkout(plan.base) as base, Checkout() as here:
        for checkout in (base, here):
            plan.say(f"compiling loops of {checkout.root}")
            checkout.warm_up()
        for turn in range(plan.times):
            for number, each in enumerate(chosen):
                plan.say(f"{turn + 1} of {plan.times}: {next(iter(each.rows.values()))}")
                order = (base, here) if turn % 2 == 0 else (here, base)
                try:
                    found = {checkout.root: checkout.probe(each.probe, each.arguments) for checkout in order}
                except ProbeError as error:
                    section.notes.append(f"{each.probe} {each.arguments} failed: {error}")
                else:
                    pairs[number].append((found[base.root], found[here.root]))
    rows = [line for each, seen in zip(chosen, pairs, strict=True) for line in lines(each, seen)]
    heads = ("what", "base", "here", "here over base", "pairs")
    section.tables.append(Table("Medians of the pairs, with the lowest and the highest", heads, rows))
    section.figures = {
        f"{each.probe} {each.arguments}": {"base": [pair[0] for pair in seen], "here": [pair[1] for pair in seen]}
        for each, seen in zip(chosen, pairs, strict=True)
    }
    section.notes += [
        f"Base: {plan.base}. Both run in turn, every second time in the other order; each pair has a ratio. "
        "Where other programs use the machine, read CPU times and ratios.",
        "A copy of the model is made on one thread into memory that has been touched.",
    ]
    return section


def lines(each: Measurement, pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> list[tuple[str, ...]]:
    """Return a row a figure; empty cells where no pair has it."""
    found = []
    for figure, text in each.rows.items():
        both = [(before[figure], after[figure]) for before, after in pairs if figure in before and figure in after]
        cells = ("", "", "", "0")
        if both:
            ratio = Stat.of([after / before for before, after in both])
            cells = (*(_number(Stat.of(values)) for values in zip(*both, strict=True)), ratio.ratio(), str(len(both)))
        found.append((text, *cells))
    return found


def _number(stat: Stat) -> str:
    return f"{stat.median:.3g} ({stat.low:.3g}–{stat.high:.3g})"
