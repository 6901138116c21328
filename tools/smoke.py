"""Runs the smallest form of every target of the Makefile: ``make smoke``, which CI runs.

A form takes up to thirty seconds on two quiet cores. What cannot run on a machine says why with the exit status 77, and
counts as skipped. Results go to ``runs/smoke``. ``make smoke ARGS="compare scale"`` runs some.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "smoke"
SKIPPED = 77
MOST_SECONDS = 240.0
"""After which a form is killed: eight times what it may take, as CI's machine has other work too."""

_OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS", "QUICK")
"""What the make that runs this hands down; the forms have variables of their own."""

FORMS: dict[str, tuple[str, ...]] = {
    "help": (),
    "venv": (),
    "quickstart": (f"ARGS=--quick --methods dgs --out {OUT}/quickstart",),
    "fuzz": (f"ARGS=--seconds 5 --codec rice --output {OUT}/fuzz",),
    "fuzz-service": ("ARGS=--inputs 500",),
    "simulate": ("ARGS=--histories 60",),
    "chaos": (f"ARGS=--only kills power-cuts --kills 2 --cuts 3 --workers 2 --readers 1 --output {OUT}/chaos",),
    "soak": (f"ARGS=--minutes 0.1 --workers 2 --hidden 64 --output {OUT}/soak",),
    "format": ("SOURCES=tools",),
    "stubs": (),
    "references": (),
    "bench": ("QUICK=1", f"ARGS=--only wire --output {OUT}/bench"),
    "gpu": ("ARGS=--plan",),
    "scale": (f"ARGS=--smoke --output {OUT}/scale",),
    "compare": (f"ARGS=--smoke --output {OUT}/compare",),
    "evidence": (f"ARGS=--smoke --output {OUT}/evidence",),
    "rivals": (f"ARGS=--smoke --output {OUT}/rivals",),
    "wheel": (f"ARGS=--output {OUT}/wheel",),
    "release-check": (f"ARGS=--contents --output {OUT}/release",),
    "clean": ("--dry-run",),
}
"""What is added to ``make TARGET``."""

WHOLE = {
    "smoke": "this",
    "lint": "CI runs it whole",
    "docs": "CI runs it whole",
    "examples": "CI runs it with QUICK=1",
    "container-test": "CI runs it whole, as root and with podman",
    "test": "CI runs it whole",
}
"""Targets without a form of their own, and why."""


def targets() -> list[str]:
    """Return the targets that ``make help`` lists."""
    return re.findall(r"^([a-z-]+):.* ## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def command(target: str, variables: Sequence[str] = ()) -> list[str]:
    """Return the command of a target's smallest form."""
    return ["make", "--no-print-directory", target, *FORMS[target], *variables]


def run(target: str, variables: Sequence[str]) -> tuple[str, str]:
    """Run a form; return ``passed``, ``skipped`` or ``FAILED``, and what it wrote."""
    process = subprocess.Popen(
        command(target, variables),
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in _OF_MAKE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "FAILED", process.communicate()[0] + f"\nnot done after {MOST_SECONDS:.0f} s"
    if re.search(rf"\bError {SKIPPED}\b", output):  # make has a status of its own
        return "skipped", output
    return "FAILED" if process.returncode else "passed", output


def main() -> int:
    """Run the chosen forms; return 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="make smoke", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: every one that has a form")
    options = parser.parse_args()
    unknown = sorted(set(options.targets) - FORMS.keys())
    if unknown:
        parser.error(f"no form of {', '.join(unknown)}")
    OUT.mkdir(parents=True, exist_ok=True)
    variables = [f"{name}={os.environ[name]}" for name in ("VENV", "PYTHON") if name in os.environ]
    failed = []
    for target in options.targets or FORMS:
        started = time.monotonic()
        ended, output = run(target, variables)
        (OUT / f"{target}.log").write_text(output, encoding="utf-8")
        print(f"{target:14} {ended} after {time.monotonic() - started:.0f} s", flush=True)
        if ended == "skipped":
            print("".join(f"  {line}\n" for line in output.splitlines()[-2:-1]), end="")
        if ended == "FAILED":
            failed.append(target)
            print("".join(f"  {line}\n" for line in output.splitlines()[-30:]), end="", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all passed or skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
