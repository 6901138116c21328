"""Servers killed at random points, some of them while they write a snapshot, and stopped for a moment."""

import os
import signal
import time
from pathlib import Path

from verify.campaign import SNAPSHOT_SECONDS, Campaign

_UP_SECONDS = 0.0, 4.0
_LOAD_FIRST_SHARE = 0.8
_IN_RECOVERY_SHARE, _RECOVERY_SECONDS = 0.2, 3.0
_STALL_SHARE, _STALL_SECONDS = 0.15, 1.0
_BOTH_SHARE = 0.25
_SNAPSHOT_SHARE, _SNAPSHOT_PATIENCE = 0.35, 2 * SNAPSHOT_SECONDS + 1
_WRITING_SECONDS = 0.015
"""About what a snapshot of such a model takes: some kills come at its rename, and some right behind it."""
_LOOK_SECONDS = 0.0005


class Kills:
    """Kills as many as the plan says, but for those at the end of the campaign."""

    expected_errors: tuple[str, ...] = ()

    def strike(self, campaign: Campaign) -> None:
        """Kill and start, again and again."""
        plan, rng, result = campaign.plan, campaign.rng, campaign.result
        most = plan.kills - plan.shards
        while (done := result.faults["servers killed"]) < most:
            campaign.say(f"{done} of {plan.kills} kills")
            if rng.random() < _LOAD_FIRST_SHARE:
                for shard in range(plan.shards):
                    campaign.await_load(shard)
            campaign.pause(*_UP_SECONDS)
            both = plan.shards > 1 and rng.random() < _BOTH_SHARE and done + plan.shards <= most
            chosen = range(plan.shards) if both else [rng.randrange(plan.shards)]
            again = rng.uniform(0.0, _RECOVERY_SECONDS) if rng.random() < _IN_RECOVERY_SHARE else None
            if rng.random() < _SNAPSHOT_SHARE:
                self._kill_in_snapshot(campaign, chosen[0])
                again = None
            elif rng.random() < _STALL_SHARE:
                self._stall(campaign, chosen[0])
            campaign.kill(chosen, again if done + len(chosen) < most else None)

    def _kill_in_snapshot(self, campaign: Campaign, shard: int) -> None:
        """Kill a server soon after it has begun to write a snapshot; :meth:`Campaign.kill` then starts it again."""
        folder = campaign.servers.folder(shard) / "snapshots"
        begun = await_snapshot(folder, _SNAPSHOT_PATIENCE)
        if begun is None:
            return
        campaign.pause(0.0, _WRITING_SECONDS)
        campaign.servers.kill(shard)
        half = begun.exists()
        campaign.result.faults["of these, in the middle of a snapshot" if half else "of these, just after one"] += 1

    def _stall(self, campaign: Campaign, shard: int) -> None:
        """Let a server stand still for a moment."""
        campaign.result.faults["servers stopped"] += 1
        os.kill(campaign.servers.pid(shard), signal.SIGSTOP)
        campaign.pause(0.0, _STALL_SECONDS)
        os.kill(campaign.servers.pid(shard), signal.SIGCONT)


def await_snapshot(folder: Path, seconds: float) -> Path | None:
    """Wait until a snapshot is being written; return its temporary directory, or ``None`` where none is for so long."""
    old, end = _unfinished(folder), time.monotonic() + seconds
    while time.monotonic() < end:
        if new := _unfinished(folder) - old:
            return folder / new.pop()
        time.sleep(_LOOK_SECONDS)
    return None


def _unfinished(folder: Path) -> set[str]:
    return {entry.name for entry in os.scandir(folder) if entry.name.endswith(".tmp")}
