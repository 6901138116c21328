"""``python -m chaos``: break everything, account for every push, print the table, write ``runs/chaos/chaos.json``."""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from rich.console import Console

from benchmarks import machine
from benchmarks.progress import Progress
from chaos import report
from chaos.campaign import Campaign, Plan, Result
from chaos.disk import Disk
from chaos.fulldisk import FullDisk
from chaos.pusher import LeaseLostError, RefusedError, StuckError
from chaos.servers import StartFailedError, end_on_sigterm
from chaos.team import TrainerFailedError
from chaos.training import Training

_KINDS = ((2, "interval"), (1, "always"), (1, "interval"), (2, "always"))
_FEWEST_KILLS = 3
"""Of a campaign; with fewer in all there are fewer campaigns."""
_SCENARIOS = ("kills", "disk", "training")
_TRAINING = "psclient, 2 shards"
_TRAINING_SHARE, _MOST_TRAINERS = 8, 4  # a trainer costs seconds of a core to start
_NARROWEST = 160
_BROKEN = (StartFailedError, TrainerFailedError, RefusedError, StuckError, LeaseLostError, grpc.RpcError)
_NOTES = (
    "a push counts once a shard; repeats: answers to pushes that were answered before, on a connection of their own",
    "models compared: replicas and downloads at the version they claimed, against the reference's, bit for bit",
    "psclient: pushes of all lives against the servers' versions; each replica against the model after the last pull",
    "clocks: the wall clock of the servers' own code is moved by up to ten years, at starts and while they run "
    "(chaos/skewed.py); the system's clock is not touched, and the monotonic one, which leases use, has no steps",
    "a power cut is not simulated: the kernel lives through every kill, so --fsync always is exercised, not proved",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every campaign; 0 where every promise was kept."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    end_on_sigterm()  # as Ctrl-C does: what was started is stopped, what was mounted is unmounted
    facts = machine.describe(given) | {"command": " ".join(["python -m chaos", *given]), "seed": options.seed}
    directory: Path = options.output / "work"
    shutil.rmtree(directory, ignore_errors=True)
    plans = _plans(options) if "kills" in options.only else []
    results: list[Result] = []
    notes = list(_NOTES)
    started = time.monotonic()
    with Progress(len(plans) + len({"disk", "training"} & {*options.only})) as progress:
        for number, plan in enumerate(plans):
            progress.section(plan.name)
            results.append(_run(Campaign(plan, directory / f"campaign-{number}", progress.say)))
        if "disk" in options.only:
            progress.section("full disk")
            plan = _plan(options, "full disk", 1, "interval", 3)
            with Disk(directory / "disk") as disk:
                campaign = FullDisk(plan, directory / "full-disk", progress.say, disk.path / "data")
                campaign.disk = disk
                results.append(_run(campaign))
            notes.append(f"full disk: {disk.kind}")
        if "training" in options.only:
            progress.section(_TRAINING)
            kills = max(1, options.kills // _TRAINING_SHARE)
            plan = _plan(options, _TRAINING, 2, "interval", kills, workers=min(options.workers, _MOST_TRAINERS))
            results.append(_run(Training(plan, directory / "training", progress.say)))
    facts["seconds"] = time.monotonic() - started
    console = Console()
    if not console.is_terminal:
        console = Console(width=_NARROWEST)
    report.show(console, results, notes)
    report.write(options.output / "chaos.json", facts, results, notes)
    good = all(result.good for result in results)
    if good and not options.keep:
        shutil.rmtree(directory)
    where = "" if good and not options.keep else f"; books and logs: {directory}"
    console.print(f"\n{facts['seconds']:.0f} s; written: {options.output / 'chaos.json'}{where}", highlight=False)
    return 0 if good else 1


def _run(scenario: Campaign | Training) -> Result:
    """Run one campaign; where it cannot be brought to its end, that is its result."""
    try:
        return scenario.run()
    except _BROKEN as error:
        scenario.result.failures.append(f"{type(error).__name__}: {error}")
        return scenario.result


def _plans(options: argparse.Namespace) -> list[Plan]:
    """Share the kills out among the kinds of servers."""
    kinds = _KINDS[: max(1, min(len(_KINDS), options.kills // _FEWEST_KILLS))]
    return [
        _plan(
            options,
            f"{shards} shard{'s' if shards > 1 else ''}, fsync {fsync}",
            shards,
            fsync,
            max(shards, options.kills * (number + 1) // len(kinds) - options.kills * number // len(kinds)),
        )
        for number, (shards, fsync) in enumerate(kinds)
    ]


def _plan(options: argparse.Namespace, name: str, shards: int, fsync: str, kills: int, workers: int = 0) -> Plan:
    return Plan(
        name,
        shards,
        fsync,
        kills,
        workers or options.workers,
        size=options.size,
        pause=options.pause,
        seed=options.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chaos", description="Break everything and count what is lost.")
    parser.add_argument("--kills", type=int, default=50, help="servers killed in the campaigns of kills, all together")
    parser.add_argument("--workers", type=int, default=8, help="that push meanwhile")
    parser.add_argument("--size", type=int, default=40_000, help="elements of the model")
    parser.add_argument("--pause", type=float, default=0.01, help="mean seconds between two pushes of a worker")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=_SCENARIOS,
        default=list(_SCENARIOS),
        metavar="SCENARIO",
        help=", ".join(_SCENARIOS),
    )
    parser.add_argument("--output", type=Path, default=Path("runs/chaos"), help="where the figures go")
    parser.add_argument("--keep", action="store_true", help="keep books, logs and data of a good run too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
