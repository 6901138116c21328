"""Run the steps of :mod:`benchmarks.gpu.plan`, and write runs/gpu/report.md with what each printed beside it.

The machine may have no network: wheels in .wheels are installed into .site first. Without a GPU the exit status is 77.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.plan import STEPS, Step

ROOT = Path(__file__).parents[2]
OUT, SITE, WHEELS = ROOT / "runs" / "gpu", ROOT / ".site", ROOT / ".wheels"
NO_GPU = 77
_TAIL_LINES = 40  # of what a step printed, in the report
_PIP = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile")
_VERSIONS = """
import platform, torch, triton
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)
print(torch.cuda.get_device_name(), "CUDA", torch.version.cuda, *torch.cuda.get_device_capability())
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every step has passed, 1 if one has not, 77 without a GPU."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="some of the steps")
    options = parser.parse_args(arguments)
    steps = [step for step in STEPS if options.only is None or step.name in options.only]
    if options.plan:
        for step in steps:
            print(f"{step.name}, {step.minutes:g} minutes at most: {step.shows}\n  {_shown(step)}")
        print(f"{sum(step.minutes for step in steps):g} minutes at most in all; written: runs/gpu/report.md")
        return 0
    environment = _environment()
    versions = subprocess.run([sys.executable, "-c", _VERSIONS], env=environment, capture_output=True, text=True)
    if versions.returncode:
        print(f"no GPU that torch and Triton can use: {versions.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return NO_GPU
    print(versions.stdout, end="")
    report = [f"# `make gpu`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "", versions.stdout]
    status = 0
    OUT.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {step.name}: {step.shows}", flush=True)
        ended, seconds = _run(step, environment)
        status = status or int(ended != "passed")
        print(f"  {ended} after {seconds:.0f} s", flush=True)
        lines = (OUT / f"{step.name}.log").read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        report += [f"## {step.name}: {ended}, {seconds:.0f} s", "", f"{step.shows}.", "", "```", *lines, "```", ""]
        (OUT / "report.md").write_text("\n".join(report))  # after each step: the machine may be taken away
    print("written: runs/gpu/report.md")
    return status


def _environment() -> dict[str, str]:
    """Return the environment of the steps; with what .wheels has, installed into .site."""
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if wheels and not SITE.is_dir():
        subprocess.run([sys.executable, *_PIP, "--target", str(SITE), *wheels], check=True)
    caches = {name: str(OUT / "cache" / name.lower()) for name in ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")}
    paths = [str(ROOT), *([str(SITE)] if SITE.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _run(step: Step, environment: dict[str, str]) -> tuple[str, float]:
    """Run a step, whose output goes to a file beside the report; return how it ended, and its seconds."""
    started = time.monotonic()
    with (OUT / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(step.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            status = process.wait(60 * step.minutes)
            ended = "passed" if status == 0 else f"FAILED with status {status}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"ENDED after its {step.minutes:g} minutes"
    return ended, time.monotonic() - started


def _shown(step: Step) -> str:
    return " ".join(["python3", *step.command[1:]])


if __name__ == "__main__":
    sys.exit(main())
