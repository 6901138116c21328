"""``python -m verify``: break everything, account for every push, print the table, write ``runs/chaos/chaos.json``."""

import argparse
import shutil
import sys
import time
import urllib.error
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import grpc
from rich.console import Console

from benchmarks.harness import machine
from benchmarks.harness.progress import Progress
from verify import report
from verify.backups import Backups
from verify.campaign import Campaign
from verify.client.caller import LeaseLostError, RefusedError, StuckError
from verify.client.replica import BrokenReplyError
from verify.cluster import release_before
from verify.cluster.forked import forked_processes
from verify.cluster.release_before import NoReleaseBeforeError
from verify.cluster.servers import StartFailedError, end_on_sigterm
from verify.failpoint.bit_flips import Flips
from verify.failpoint.broken_disk import BrokenDisk
from verify.failpoint.descriptors import NoDescriptors
from verify.failpoint.disk import Disk
from verify.failpoint.full_disk import FullDisk
from verify.failpoint.kills import Kills
from verify.feeds import Feeds
from verify.forgetful import filesystem
from verify.forgetful.disk import NoForgetfulDiskError
from verify.plan import Plan, Result
from verify.power_cuts import PowerCuts
from verify.releases import Releases
from verify.standbys import Standbys
from verify.traffic.survivor import SurvivorFailedError
from verify.traffic.team import TrainerFailedError
from verify.training import Training

_KINDS = ((2, "interval", "topk"), (1, "always", "auto"), (1, "interval", "exact"), (2, "always", "exact"))
_FEWEST_KILLS = 3
"""Of a campaign; with fewer in all there are fewer campaigns."""
_SCENARIOS = (
    "kills",
    "disk",
    "fsync",
    "descriptors",
    "flips",
    "training",
    "backups",
    "standbys",
    "releases",
    "feeds",
    "power-cuts",
)
_TRAINING_SHARE, _MOST_TRAINERS = 12, 4  # a trainer costs seconds of a core to start
_FLIP_WORKERS = 2
_LOST_SHARE = 4  # of the kills; a disk is lost for each shard, and a standby takes seconds to start
_CHANGED_SHARE = 6  # of the kills; an update takes a start of a server, and one of a trainer besides
_FEEDS, _FOLLOWERS = (("octets", 2, 0.5), ("halves", 2, 0.3), ("octets", 1, 0.2)), 4
"""Layouts of feeds, their shards, and their shares of the faults."""
_FSYNCS = ("always", "interval", "never")
_CUT_WORKERS = 3
_SKIPPED = 77
_NARROWEST = 160
_BROKEN = (
    NoReleaseBeforeError,
    StartFailedError,
    TrainerFailedError,
    SurvivorFailedError,
    NoForgetfulDiskError,
    RefusedError,
    StuckError,
    LeaseLostError,
    BrokenReplyError,
    grpc.RpcError,
    urllib.error.URLError,
)
_NOTES = (
    "a push counts once a shard; repeats: answers to pushes that were answered before, on a connection of their own",
    "models compared: replicas and downloads at the version they claimed, against the reference's, bit for bit",
    "readers: what a module or a directory held, at the versions that it claimed, against the reference's, bit for bit",
    "top-k replies: each entry against the reference's model less the replica, bit for bit, and the replica with it",
    "psclient: pushes of all lives against the servers' versions; each replica against the model after the last pull",
    "lost disks: all shards of a machine at once, with answers that wait for the standby (--replicate ack); pushes are "
    "counted as for psclient",
    f"two releases: this one, and the wheel of commit {release_before.commit()[:8]}; shards and trainers change from "
    "one to the other and back, and pushes are counted as for psclient",
    "backups: no push is counted, since those behind a copy or a backup are gone with it; each replica against "
    "the model after the last pull",
    "feeds: what followers held, and what fresh reads of the shards had, against the models that publishers had "
    "written down before they published them, bit for bit",
    "clocks: the wall clock of the servers' own code is moved by up to ten years, at starts and while they run "
    "(failpoint/skewed_clock.py); the system's clock is not touched, and the monotonic one, which leases use, "
    "has no steps",
    "power cuts: a disk in memory, mounted through FUSE, forgets what was not synced; the system's own disks and their "
    "caches are not put to the test",
    "power cuts, gone: acknowledged within the period of --fsync interval before the cut, or at any time with --fsync "
    "never; checkpoints, lost: named ones that were acknowledged; histories: new ones; refused: starts that named what "
    "is damaged, and went on with --recover last-good",
)


class _Scenario(Protocol):
    """One line of the table, or several of its kind."""

    result: Result

    def run(self) -> Result:
        """Run it to its end."""


_Begin = Callable[[Path, Callable[[str], None]], _Scenario]
"""Makes a scenario in a directory, which is not there yet, with something that shows how far it is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every campaign; 0 where every promise was kept, 77 where nothing of it can run here."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    end_on_sigterm()  # as Ctrl-C does: what was started is stopped, what was mounted is unmounted
    facts = machine.describe("verify", given) | {"seed": options.seed}
    directory: Path = options.output / "work"
    shutil.rmtree(directory, ignore_errors=True)
    results: list[Result] = []
    notes = list(_NOTES)
    started = time.monotonic()
    with ExitStack() as stack:
        scenarios = _scenarios(options, directory, stack, notes)
        if not scenarios:
            print(notes[-1])
            return _SKIPPED
        stack.enter_context(forked_processes())  # no earlier: forks share the mounts that are there at the first
        progress = stack.enter_context(Progress(len(scenarios)))
        for number, (name, begin) in enumerate(scenarios):
            progress.section(name)
            results.append(_run(begin(directory / f"campaign-{number}", progress.say)))
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


def _run(scenario: _Scenario) -> Result:
    """Run one scenario; where it cannot be brought to its end, that is its result."""
    try:
        return scenario.run()
    except _BROKEN as error:
        scenario.result.failures.append(f"{type(error).__name__}: {error}")
        return scenario.result


def _scenarios(
    options: argparse.Namespace, directory: Path, stack: ExitStack, notes: list[str]
) -> list[tuple[str, _Begin]]:
    """Return what is asked for, by name; what has to be taken down is left to the stack."""
    found: list[tuple[str, _Begin]] = []

    def add(plan: Plan, make: Callable[[Plan, Path, Callable[[str], None]], _Scenario]) -> None:
        found.append((plan.name, lambda where, say: make(plan, where, say)))

    if "kills" in options.only:
        for plan in _plans(options):
            plan = replace(plan, readers=options.readers)
            add(plan, lambda plan, where, say: Campaign(plan, where, say, Kills()))
    if "disk" in options.only:
        disk = stack.enter_context(Disk(directory / "disk"))
        full = FullDisk(disk, options.rounds)
        notes.append(full.note)
        plan = _plan(options, "full disk", 1, "interval", 3, "auto")
        add(plan, lambda plan, where, say: Campaign(plan, where, say, full, disk.path / "data"))
    if "fsync" in options.only:
        for fsync in ("interval", "always"):
            plan = _plan(options, f"broken disk, fsync {fsync}", 1, fsync, 2, "exact")
            add(plan, lambda plan, where, say: Campaign(plan, where, say, BrokenDisk(options.rounds)))
    if "descriptors" in options.only:
        plan = _plan(options, "no descriptors", 1, "always", 2, "topk")
        add(plan, lambda plan, where, say: Campaign(plan, where, say, NoDescriptors(options.rounds)))
    if "flips" in options.only:
        plan = replace(_plan(options, "flipped bits", 1, "interval", 2, "exact"), workers=_FLIP_WORKERS)
        add(plan, lambda plan, where, say: Flips(plan, where, say, options.flips))
    if "training" in options.only:
        for shards, down_mode in ((2, "exact"), (1, "topk")):
            name = f"psclient, {shards} shard{'s' if shards > 1 else ''}, {down_mode}"
            plan = _plan(options, name, shards, "interval", max(1, options.kills // _TRAINING_SHARE), down_mode)
            add(replace(plan, workers=min(options.workers, _MOST_TRAINERS)), Training)
    if "backups" in options.only:
        for down_mode in ("exact", "topk"):
            plan = _plan(options, f"backups, 2 shards, {down_mode}", 2, "interval", 2 * options.rounds, down_mode)
            add(replace(plan, workers=min(options.workers, _MOST_TRAINERS)), Backups)
    if "standbys" in options.only:
        for shards in (1, 2):
            name = f"lost disks, {shards} shard{'s' if shards > 1 else ''}"
            plan = _plan(options, name, shards, "interval", max(1, options.kills // (_LOST_SHARE * shards)))
            add(replace(plan, workers=min(options.workers, _MOST_TRAINERS)), Standbys)
    if "releases" in options.only:
        try:
            release_before.require_history()
        except NoReleaseBeforeError as error:
            notes.append(f"two releases: SKIPPED: {error}")
        else:
            changes = max(2, options.kills // _CHANGED_SHARE)
            plan = _plan(options, "two releases, 2 shards", 2, "interval", changes)
            add(replace(plan, workers=min(options.workers, _MOST_TRAINERS)), Releases)
    if "feeds" in options.only:
        for layout, shards, share in _FEEDS:
            name = f"feed, {shards} shard{'s' if shards > 1 else ''}, {layout}"
            plan = _plan(options, name, shards, "always" if shards == 1 else "interval", 0)
            add(
                replace(plan, readers=_FOLLOWERS, faults=round(options.faults * share)),
                lambda plan, where, say, layout=layout: Feeds(plan, where, say, layout),  # type: ignore[misc]
            )
    if "power-cuts" in options.only:
        if why := filesystem.why_not():
            notes.append(f"power cuts: SKIPPED, since {why}")
        else:
            for number, fsync in enumerate(_FSYNCS):
                cuts = options.cuts * (number + 1) // len(_FSYNCS) - options.cuts * number // len(_FSYNCS)
                plan = _plan(options, f"power cuts, fsync {fsync}", 1, fsync, 0)
                add(replace(plan, cuts=cuts, workers=_CUT_WORKERS, size=options.size), PowerCuts)
    return found


def _plans(options: argparse.Namespace) -> list[Plan]:
    """Share the kills out among the kinds of servers."""
    kinds = _KINDS[: max(1, min(len(_KINDS), options.kills // _FEWEST_KILLS))]
    return [
        _plan(
            options,
            f"{shards} shard{'s' if shards > 1 else ''}, fsync {fsync}, {down_mode}",
            shards,
            fsync,
            max(shards, options.kills * (number + 1) // len(kinds) - options.kills * number // len(kinds)),
            down_mode,
        )
        for number, (shards, fsync, down_mode) in enumerate(kinds)
    ]


def _plan(
    options: argparse.Namespace, name: str, shards: int, fsync: str, kills: int, down_mode: str = "exact"
) -> Plan:
    return Plan(
        name,
        shards,
        fsync,
        kills,
        options.workers,
        size=options.size,
        pause=options.pause,
        seed=options.seed,
        down_mode=down_mode,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verify", description="Break everything and count what is lost.")
    parser.add_argument("--kills", type=int, default=50, help="servers killed in the campaigns of kills, all together")
    parser.add_argument("--workers", type=int, default=8, help="that push meanwhile")
    parser.add_argument("--readers", type=int, default=4, help="that follow the model in the campaigns of kills")
    parser.add_argument("--size", type=int, default=40_000, help="elements of the model")
    parser.add_argument("--pause", type=float, default=0.01, help="mean seconds between two pushes of a worker")
    parser.add_argument(
        "--rounds", type=int, default=2, help="in which room, and descriptors, are used up; half of the restores"
    )
    parser.add_argument("--faults", type=int, default=60, help="of servers, in the campaigns of feeds, all together")
    parser.add_argument("--cuts", type=int, default=60, help="of the power, over the modes of fsync, all together")
    parser.add_argument("--flips", type=int, default=0, help="bits flipped; 0 for one in every place")
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
