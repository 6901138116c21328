"""What befalls the servers of a feed: kills, stalls, a broken disk, and an operator who takes them back."""

import errno
import json
import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from verify.cluster.waiting import until
from verify.failpoint import failed_syncs
from verify.failpoint.draws import drawn
from verify.failpoint.restarts import kill_and_start, stall
from verify.model.publications import Restore
from verify.validate import server_readings

if TYPE_CHECKING:
    from verify.feeds import Feeds

EXPECTED_ERRORS = (
    os.strerror(errno.EIO),
    os.strerror(errno.ENOSPC),
    "this shard lacks a version of the feed",  # which is said, and mended by the next publication
)
_UP_SECONDS = 0.0, 0.6
_LOAD_FIRST_SHARE, _LOAD_SECONDS = 0.5, 5.0
_LOOK_SHARE = 0.5
_IN_RECOVERY_SHARE, _RECOVERY_SECONDS = 0.15, 1.5
_STALL_SECONDS = 0.1, 1.2
_LIVENESS_SECONDS = 8.0
_MOST_BACK, _COMMAND_SECONDS = 6, 200.0
_KILL_IN_RESTORE_SHARE, _CHECKPOINT_SHARE, _IN_RESTORE_SECONDS = 0.3, 0.4, (0.5, 2.0)


class FeedServersFaults:
    """Draws as many faults as the plan says.

    Args:
        feeds: the campaign.
        rng: draws.
    """

    def __init__(self, feeds: "Feeds", rng: random.Random) -> None:
        self._feeds, self._rng = feeds, rng
        self._servers, self._faults, self._shards = feeds.servers, feeds.result.faults, feeds.plan.shards

    def strike(self) -> None:
        """Do them, one by one; every server serves again when this returns."""
        ways = drawn(
            [(6, self._kill_servers), (2, self._stall_server), (1, self._break_disk), (3, self._restore)], self._rng
        )
        for number in range(self._feeds.plan.faults):
            self._feeds.say(f"{number} of {self._feeds.plan.faults} faults of servers")
            if self._rng.random() < _LOAD_FIRST_SHARE:
                self._feeds.await_publications(1, _LOAD_SECONDS)
            self._feeds.pause(*_UP_SECONDS)
            next(ways)()
            if self._rng.random() < _LOOK_SHARE:
                self._feeds.look()

    def _kill_servers(self) -> None:
        chosen = self._rng.choice([[shard] for shard in range(self._shards)] + [[*range(self._shards)]])
        again = self._rng.uniform(0.0, _RECOVERY_SECONDS) if self._rng.random() < _IN_RECOVERY_SHARE else None
        kill_and_start(self._servers, self._feeds.result, chosen, again)

    def _stall_server(self) -> None:
        shard = self._rng.randrange(self._shards)
        stall(self._servers, self._feeds.result, shard, self._rng.uniform(*_STALL_SECONDS))

    def _break_disk(self) -> None:
        """Let each ``fsync`` of a shard fail until the shard asks for a restart, and restart it."""
        shard = self._rng.randrange(self._shards)
        failed_syncs.set_error(self._servers.syncs[shard], self._rng.choice((errno.EIO, errno.ENOSPC)))
        health = self._servers.told[shard]["health"]
        until(lambda: server_readings.wants_restart(health), _LIVENESS_SECONDS)
        self._faults["fsync failed"] += 1
        failed_syncs.set_error(self._servers.syncs[shard], 0)
        kill_and_start(self._servers, self._feeds.result, [shard])

    # The operator

    def _restore(self) -> None:
        """Go back to an older version or checkpoint; now and then a shard is killed meanwhile."""
        before = server_readings.status(self._servers.addresses[0])
        target = self._target(before.version)
        restore = Restore(time.monotonic(), before.generation, target[0] == "--version")
        self._feeds.restores.append(restore)
        command = [sys.executable, "-m", "psservice", "restore", *self._servers.addresses, "--output=json", *target]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self._rng.random() < _KILL_IN_RESTORE_SHARE:
            self._feeds.pause(*_IN_RESTORE_SECONDS)
            chosen = [self._rng.randrange(self._shards)]
            kill_and_start(self._servers, self._feeds.result, chosen)
            self._faults["of these, at a restore"] += 1
        said, complaint = process.communicate(timeout=_COMMAND_SECONDS)
        restore.ended = time.monotonic()
        self._feeds.note(f"restore {' '.join(target)} at version {before.version}: {said} {complaint}")
        if process.returncode:
            self._faults["restores that were refused, or failed"] += 1
        else:
            answers = json.loads(said)
            restore.version, restore.generation = int(answers[0]["version"]), int(answers[0]["generation"])
            self._faults["feeds taken back"] += 1
        self._feeds.look()

    def _target(self, version: int) -> list[str]:
        checkpoints = self._checkpoints() if self._rng.random() < _CHECKPOINT_SHARE else []
        if checkpoints:
            return ["--checkpoint", self._rng.choice(checkpoints)]
        return ["--version", str(max(0, version - self._rng.randrange(_MOST_BACK)))]

    def _checkpoints(self) -> list[str]:
        command = [sys.executable, "-m", "psservice", "checkpoint", "list", *self._servers.addresses, "--output=json"]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_COMMAND_SECONDS).stdout
        rows = json.loads(said)["checkpoints"]
        whole = [row for row in rows if row["checkpoint"] and len(row["versions"]) == self._shards]
        return [row["checkpoint"] for row in whole]
