"""Section *accuracy*: what the value types do to the quickstart's final accuracy, beside the spread of its seeds."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.harness.section import Plan, Section, Table

KEY, TITLE = "accuracy", "Accuracy by value type"

_QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.py"
_VALUE_TYPES = ("fp32", "bf16", "int8", "int4")
_SEEDS = (0, 1, 2)
_RUN_SECONDS = 180.0


def run(plan: Plan) -> Section:
    """Run the quickstart's DGS with each value type, both ways, and three seeds."""
    section = Section(KEY, TITLE)
    if plan.quick:
        section.notes.append("The quick benchmark leaves it out: twelve runs of the quickstart take minutes.")
        return section
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _VALUE_TYPES}
    for seed in _SEEDS:
        for value_type in _VALUE_TYPES:
            if not plan.has_time(20):
                section.notes.append(f"No time was left for {value_type}, seed {seed}.")
                continue
            plan.say(f"quickstart: {value_type}, seed {seed}")
            found[value_type].append(_quickstart(value_type, seed))
    rows = []
    for value_type, runs in found.items():
        if not runs:
            continue
        accuracies = [each["test_accuracy"] for each in runs]
        megabytes = fmean(each["bytes"] for each in runs) / 1e6
        rows.append(
            (
                value_type,
                ", ".join(f"{each:.2%}" for each in accuracies),
                f"{fmean(accuracies):.2%}",
                f"{megabytes:.1f}",
            )
        )
        section.figures[value_type] = {"test_accuracy": accuracies, "megabytes": megabytes}
    seeds = ", ".join(map(str, _SEEDS))
    heads = ("values, both ways", f"test accuracy, seeds {seeds}", "mean", "MB, all traffic")
    section.tables.append(Table("The quickstart with DGS, four workers, ten epochs of digits", heads, rows))
    section.notes.append(
        "Asynchronous training: a seed gives other numbers in another run. One test sample is 0.28 % (360 samples)."
    )
    return section


def _quickstart(value_type: str, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [sys.executable, str(_QUICKSTART), "--methods", "dgs", "--seed", str(seed), "--out", directory],
            env={**os.environ, "PSCLIENT_VALUE_TYPE": value_type, "PSSERVICE_DOWN_VALUE_TYPE": value_type},
            check=True,
            capture_output=True,
            timeout=_RUN_SECONDS,
        )
        result: dict[str, float] = json.loads((Path(directory) / "summary.json").read_text())["dgs"]
        return result
