"""Servers killed at random points, some of them while they write a snapshot, and stopped for a moment."""

from verify.campaign import SNAPSHOT_SECONDS, Campaign
from verify.cluster.waiting import await_unfinished
from verify.failpoint.restarts import stall

_UP_SECONDS = 0.0, 4.0
_LOAD_FIRST_SHARE = 0.8
_IN_RECOVERY_SHARE, _RECOVERY_SECONDS = 0.2, 3.0
_STALL_SHARE, _STALL_SECONDS = 0.15, (0.0, 1.0)
_BOTH_SHARE = 0.25
_SNAPSHOT_SHARE, _SNAPSHOT_PATIENCE = 0.35, 2 * SNAPSHOT_SECONDS + 1
_WRITING_SECONDS = 0.015
"""About what a snapshot of such a model takes: some kills come at its rename, and some right behind it."""


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
                stall(campaign.servers, campaign.result, chosen[0], rng.uniform(*_STALL_SECONDS))
            campaign.kill(chosen, again if done + len(chosen) < most else None)

    def _kill_in_snapshot(self, campaign: Campaign, shard: int) -> None:
        """Kill a server soon after it has begun to write a snapshot; :meth:`Campaign.kill` then starts it again."""
        folder = campaign.servers.folder(shard) / "snapshots"
        begun = await_unfinished(folder, _SNAPSHOT_PATIENCE)
        if begun is None:
            return
        campaign.pause(0.0, _WRITING_SECONDS)
        campaign.servers.kill(shard)
        half = begun.exists()
        campaign.result.faults["of these, in the middle of a snapshot" if half else "of these, just after one"] += 1
