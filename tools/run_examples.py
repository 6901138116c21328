"""``make examples``: run each example as a user does, on small data in the real formats, and break the long ones once.

A training script is killed (``SIGKILL``, its server and its workers with it, all at once) after its first test, and run
again with ``--resume``. Its figure, its saved model and where it went on are checked. Results go to ``runs/examples``.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from psclient.errors import SparsepsError
from tools import run_loops
from tools.run_loops import LOOPS, ExampleFailedError, Loop, kill_with_children, start

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
RUN_NOTEBOOK = """
import os, sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.execute(notebook, cwd=os.path.dirname(sys.argv[1]), timeout=3600, kernel_name="python3")
"""
POLL_SECONDS = 0.1
SLOWEST_SECONDS = 3600.0
"""Of one command: it then hangs. A busy machine may take several times what a quiet one does."""


@dataclass(frozen=True)
class Example:
    """One command.

    Attributes:
        name: of its folder and its log.
        command: a script and its options; a training script's without ``--out``.
        figure: of ``metrics.jsonl`` that says whether it has learned; empty for a script without.
        least: the figure must be at least this.
        most: and at most this.
        evaluate: the options with which the script tests its saved model; empty where it has no ``--evaluate``.
        loop: how it is run and broken, where it is one of ``examples/loops``.
    """

    name: str
    command: tuple[str, ...]
    figure: str = ""
    least: float = 0.0
    most: float = float("inf")
    evaluate: tuple[str, ...] = ()
    loop: Loop | None = None


@dataclass
class Result:
    """What an example did.

    Attributes:
        name: of the example.
        seconds: in all.
        killed_at: version of the server's model at the last report before the kill; 0 where it was not killed.
        resumed_at: version at the first report after it.
        figure: what was asked for, in words.
        failure: what went wrong; empty if nothing.
        skipped: why it was not run; empty if it was.
    """

    name: str
    seconds: float = 0.0
    killed_at: int = 0
    resumed_at: int = 0
    figure: str = ""
    failure: str = ""
    skipped: str = ""


def examples(data: Path, quick: bool) -> list[Example]:
    """Return what is run; ``quick`` is as little as shows that it works."""
    cifar = data / "cifar10"
    model = ("--loaders", "0", "--batch-size", "32", "--density", "0.05", "--workers", "2")
    small = ("--warmup-epochs", "1", "--lr", "0.03", *model)  # half the rate learns too late for the short form
    cifar_options = (str(cifar), "--md5s", str(cifar / "md5sums.txt"), "--model", "shufflenet_v2_x0_5")
    images = ("--image-size", "64", "--batch-size", "6" if quick else "16", "--loaders", "1")
    imagenet = (str(data / "imagenet"), "--model", "shufflenet_v2_x0_5", *images)
    learning = ("--lr", "0.05", "--momentum", "0.5", "--density", "0.05", "--warmup-epochs", "1")
    once = ("--epochs", "1") if quick else ()
    text = ("--text-bytes", "200000" if quick else "2000000", "--layers", "2", "--batch-size", "8")
    return [
        Example("quickstart", ("quickstart.py", "--out", str(data / "quickstart"), *(["--quick"] if quick else []))),
        Example("rollouts", ("rollouts.py", "--out", str(data / "rollouts"), *(["--quick"] if quick else []))),
        Example(
            "recommender",
            (
                *("recommender.py", "--out", str(data / "recommender")),
                *(["--quick", "--least", "0.6"] if quick else ["--least", "0.7"]),
            ),
        ),
        Example("fsdp", ("fsdp.py", *(["--quick"] if quick else []))),
        Example("server_rmsprop", ("server_rmsprop.py", "--epochs", "2" if quick else "6")),
        Example(
            "cifar10",
            ("cifar10.py", *cifar_options, *small, "--epochs", "10" if quick else "12"),
            "accuracy",
            least=0.25 if quick else 0.8,
            evaluate=cifar_options,
        ),
        Example(
            "imagenet",
            ("imagenet.py", *imagenet, *learning, "--workers", "2", "--epochs", "2" if quick else "30"),
            "accuracy",
            least=0.0 if quick else 0.5,
            evaluate=imagenet,
        ),
        Example(
            "language_model",
            ("language_model.py", *text, "--workers", "2", "--epochs", "1" if quick else "3", "--evaluate-every", "80"),
            "perplexity",
            most=20.0 if quick else 8.0,
            evaluate=text,
        ),
        Example("before", ("loops/before.py", *once, "--checkpoint", str(data / "before.pt"))),
        Example("after", ("loops/after.py", *once, "--server", "local", "--checkpoint", str(data / "after.pt"))),
        *(
            Example(
                loop.name,
                (f"loops/{loop.command[0]}", *loop.command[1:]),
                loop=replace(loop, short=quick or loop.short),
            )
            for loop in LOOPS
            if not (quick and loop.short)
        ),
        Example("notebook", ("quickstart.ipynb",)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen examples; return 0 if all did what they should."""
    parser = argparse.ArgumentParser(prog="python -m tools.run_examples", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the shortest form: under ten minutes on two cores")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="some of them")
    parser.add_argument("--out", type=Path, default=Path("runs/examples"), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    options.out = options.out.resolve()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background ignores it, and so would the scripts
    chosen = examples(options.out / "data", options.quick)
    if options.quick:
        os.environ.setdefault("QUICKSTART_EPOCHS", "1")  # of the notebook
    unknown = {*options.only} - {example.name for example in chosen}
    if unknown:
        parser.error(f"--only: choose from {', '.join(example.name for example in chosen)}")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    make_data(options.out, options.quick)
    console = Console()
    results = []
    for example in chosen:
        if options.only and example.name not in options.only:
            continue
        console.print(f"{example.name}: {' '.join(example.command)}", highlight=False, soft_wrap=True)
        results.append(run(example, options.out))
        if results[-1].failure:
            console.print(f"  FAILED: {results[-1].failure}", highlight=False, soft_wrap=True)
    _report(results, options.out, console)
    return 1 if any(result.failure for result in results) else 0


def make_data(out: Path, quick: bool) -> None:
    """Write the small data; an ImageNet of a hundred images a class is enough to learn from."""
    images = ("--imagenet-per-class", "24" if quick else "100")
    _run([str(EXAMPLES / "support" / "smalldata.py"), str(out / "data"), *images], out / "data.log")


def run(example: Example, out: Path) -> Result:
    """Run one example, with a kill in the middle if it can go on after one."""
    result, started = Result(example.name), time.monotonic()
    if example.loop and example.loop.missing:
        result.skipped = f"skipped: {', '.join(example.loop.missing)} not installed"
        return result
    log = out / f"{example.name}.log"
    script = [str(EXAMPLES / example.command[0]), *example.command[1:]]
    if example.command[0].endswith(".ipynb"):
        script = ["-c", RUN_NOTEBOOK, *script]
    try:
        if example.loop:
            run_loops.run(example.loop, out / example.name)
        elif not example.figure:
            _run(script, log)
        else:
            _train(example, [*script, "--out", str(out / example.name)], out / example.name, log, result)
    except (ExampleFailedError, SparsepsError, subprocess.SubprocessError) as error:
        result.failure = str(error)
    result.seconds = time.monotonic() - started
    return result


def _train(example: Example, command: list[str], folder: Path, log: Path, result: Result) -> None:
    with log.open("a") as stream:
        process = start(command, stream)
        try:
            before = _await_first_test(process, folder, log)
        finally:
            kill_with_children(process)
    result.killed_at = before[-1]["version"]
    _run([*command, "--resume"], log)
    after = _lines(folder)[len(before) :]
    if not after:
        raise ExampleFailedError(f"the resumed run has reported nothing; see {log}")
    result.resumed_at = after[0]["version"]
    if result.resumed_at < result.killed_at:
        raise ExampleFailedError(f"killed at version {result.killed_at}, and resumed at {result.resumed_at}")
    value = next(line[example.figure] for line in reversed(after) if line["kind"] == "test")
    result.figure = f"{example.figure} {value:.4g}"
    if not example.least <= value <= example.most:
        raise ExampleFailedError(f"{result.figure} is not from {example.least} to {example.most}; see {log}")
    if example.evaluate:
        saved = folder / "model.safetensors"
        _run([command[0], *example.evaluate, "--evaluate", str(saved), "--out", str(folder)], log)


def _run(command: Sequence[str], log: Path) -> None:
    """Run a command to its end; raises where it fails or hangs."""
    with log.open("a") as stream:
        process = start(command, stream)
        try:
            status = process.wait(SLOWEST_SECONDS)
        except subprocess.TimeoutExpired:
            raise ExampleFailedError(f"no end after {SLOWEST_SECONDS:.0f} s; see {log}") from None
        finally:
            kill_with_children(process)
    if status:
        raise ExampleFailedError(f"ended with status {status}; see {log}")


def _await_first_test(process: "subprocess.Popen[bytes]", folder: Path, log: Path) -> list[dict[str, Any]]:
    """Wait until a model that has been trained was tested; return what was reported by then."""
    deadline = time.monotonic() + SLOWEST_SECONDS
    while time.monotonic() < deadline:
        found = _lines(folder)
        if any(line["kind"] == "test" and line["epoch"] > 0 for line in found):
            return found
        if process.poll() is not None:
            raise ExampleFailedError(f"ended with status {process.returncode} before its first test; see {log}")
        time.sleep(POLL_SECONDS)
    raise ExampleFailedError(f"no test after {SLOWEST_SECONDS:.0f} s; see {log}")


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _report(results: Sequence[Result], out: Path, console: Console) -> None:
    table = Table(title="examples")
    for name in ("example", "seconds", "killed at", "resumed at", "figure", ""):
        table.add_column(name, justify="right" if name in ("seconds", "killed at", "resumed at") else "left")
    for result in results:
        versions = [str(v) if v else "–" for v in (result.killed_at, result.resumed_at)]
        table.add_row(
            result.name,
            f"{result.seconds:.0f}",
            *versions,
            result.figure,
            "FAILED" if result.failure else result.skipped or "ok",
        )
    console.print(table)
    path = out / "summary.json"
    path.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    seconds = sum(result.seconds for result in results)
    console.print(f"{seconds:.0f} s; logs, runs and {path.name} are in {out}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
