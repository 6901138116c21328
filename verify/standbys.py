"""Lost machines: the disks of all shards are gone, and their standbys serve; then new ones stand by for these.

Answers wait for the standbys (``--replicate ack``): every push that a trainer was answered must be in the model, once.
"""

import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

from verify.cluster.servers import Servers
from verify.plan import Result
from verify.traffic.team import Team
from verify.training import Training
from verify.validate import server_readings

_HIDDEN = 64
_COMMAND_SECONDS, _FOLLOW_SECONDS = 120.0, 60.0
_UP_SECONDS = 0.5, 3.0
_POLL_SECONDS = 0.1


class Standbys(Training):
    """Loses the disks of all shards, as often as the plan says, and accounts as :class:`Training` does."""

    def run(self) -> Result:
        started, plan = time.monotonic(), self.plan
        self.directory.mkdir(parents=True)
        with ExitStack() as stack:
            primary, standby = stack.enter_context(self._machine("one")), self._machine("two")
            stack.callback(standby.close)
            for shard in range(plan.shards):
                self._stand_by(standby, primary, shard)
            pairs = zip(primary.addresses, standby.addresses, strict=True)
            team = Team(
                ",".join(f"{one}/{other}" for one, other in pairs),
                self.directory,
                plan.workers,
                hidden=_HIDDEN,
                pause=plan.pause,
            )
            stack.callback(team.close)
            with self.trained_by(team):
                for number in range(plan.kills):
                    self.say(f"{number} of {plan.kills} lost machines")
                    self._lose(primary, standby)
                    primary, standby = standby, primary
                self._account(primary, team)
            result = self.finished(started, primary, standby)  # what is said while they end is no fault
            primary.stop()
            standby.stop()
        return result

    def _machine(self, name: str) -> Servers:
        directory = self.directory / name
        directory.mkdir()
        return self.servers(directory, replicate="ack")

    def _stand_by(self, standby: Servers, primary: Servers, shard: int) -> None:
        standby.start(shard, standby_of=",".join(primary.addresses))
        standby.await_ready(shard)

    def _lose(self, primary: Servers, standby: Servers) -> None:
        """Lose a machine with its disks, have the other one serve, and begin a standby anew in its place."""
        self._await_followed(primary)
        threading.Event().wait(self._rng.uniform(*_UP_SECONDS))
        began = time.monotonic()
        for shard in range(self.plan.shards):
            primary.kill(shard)
            shutil.rmtree(primary.folder(shard))
        self.result.faults["disks lost"] += self.plan.shards
        command = [sys.executable, "-m", "psservice", "promote", *standby.addresses]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
        if done.returncode:
            self.result.failures.append(f"promote ended with {done.returncode}: {done.stderr}")
        self.result.recovery_seconds.append(time.monotonic() - began)
        for shard in range(self.plan.shards):
            self._stand_by(primary, standby, shard)

    def _await_followed(self, primary: Servers) -> None:
        """Wait until every shard's standby has had everything at least once."""
        end = time.monotonic() + _FOLLOW_SECONDS
        for address in primary.addresses:
            while True:
                found = server_readings.status(address)
                if found.replication.connected and found.replication.behind_seconds < 1.0 and found.generation:
                    break
                if time.monotonic() > end:
                    self.result.failures.append(f"the standby of {address} does not follow: {found.replication}")
                    return
                threading.Event().wait(_POLL_SECONDS)
