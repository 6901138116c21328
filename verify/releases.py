"""Two neighbouring releases at once: shards and trainers are updated and taken back while all of them train.

A shard that changes ends by SIGTERM or by SIGKILL, so each release goes on from snapshots and journals of the other.
"""

import os
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file

import psclient
from verify.cluster import release_before
from verify.cluster.servers import Servers
from verify.plan import Result
from verify.traffic.team import Team
from verify.training import Training
from verify.validate import server_readings

_HIDDEN = 16  # so small that few loops are compiled
_FIRST_SECONDS = 400.0  # of a busy machine, to compile a few loops of the release before
_END_SECONDS = 60.0
_UP_SECONDS = 1.0, 3.0
_READ_SECONDS = 120.0


class Releases(Training):
    """Changes the release of a shard as often as the plan says, of trainers besides, and accounts as ``Training``."""

    def run(self) -> Result:
        started, plan = time.monotonic(), self.plan
        self.directory.mkdir(parents=True)
        self.say("building the release before this one")
        packages = release_before.install(self.directory)
        with ExitStack() as stack:
            servers = self.servers(self.directory)
            servers.packages = packages
            stack.enter_context(servers)
            team = Team(",".join(servers.addresses), self.directory, 0, hidden=_HIDDEN, pause=plan.pause)
            stack.callback(team.close)
            for number in range(plan.workers):
                team.packages = packages if number % 2 == 0 else None
                team.add(overlap=number % 4 > 1)
            with self.trained_by(team, _FIRST_SECONDS):
                self._require_old(servers, packages)
                self._change_releases(servers, team, packages)
                self._account(servers, team)
                self._read(servers, packages)
            servers.stop()
        return self.finished(started, servers)

    def _require_old(self, servers: Servers, packages: Path) -> None:
        """Fail unless the servers run the code of the release before, and not this one's."""
        for shard in range(self.plan.shards):
            maps = Path(f"/proc/{servers.pid(shard)}/environ").read_bytes().split(b"\0")
            if not any(line.startswith(b"PYTHONPATH=" + os.fsencode(packages)) for line in maps):
                self.result.failures.append(f"shard {shard} does not run the release before this one")

    def _change_releases(self, servers: Servers, team: Team, packages: Path) -> None:
        is_old = [True] * self.plan.shards
        for number in range(self.plan.kills):
            self.say(f"{number} of {self.plan.kills} changes of a release")
            threading.Event().wait(self._rng.uniform(*_UP_SECONDS))
            shard = (self.plan.shards - 1 - number) % self.plan.shards  # shard 0 last, as a StatefulSet does
            is_old[shard] = not is_old[shard]
            self._change(servers, shard, packages if is_old[shard] else None)
            self.result.faults["shards taken back" if is_old[shard] else "shards updated"] += 1
            if number % 2:
                team.packages = packages if is_old[shard] else None
                team.kill(self._rng.randrange(len(team)))
                self.result.faults["trainers killed and begun anew"] += 1
        threading.Event().wait(_UP_SECONDS[1])

    def _read(self, servers: Servers, packages: Path) -> None:
        """Read the model with readers of both releases; both must have the servers' bits."""
        server = ",".join(servers.addresses)
        found = []
        for name, chosen in (("this", None), ("before", packages)):
            out = self.directory / f"read-by-{name}"
            words = [*release_before.python(chosen), "-m", "psclient", "follow", server, "--out", str(out), "--once"]
            environment = release_before.environment(chosen)
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, timeout=_READ_SECONDS, check=False
            )
            if done.returncode:
                self.result.failures.append(f"a reader of {name} release ended with {done.returncode}: {done.stderr}")
                return
            found.append({key: part for file in out.glob("*.safetensors") for key, part in load_file(file).items()})
            self.result.faults["models read"] += 1
        held = psclient.download(servers.addresses)
        for read in found:
            if held.keys() != read.keys() or any(not torch.equal(held[key], read[key]) for key in held):
                self.result.failures.append("a reader of one of the releases has another model than the servers")

    def _change(self, servers: Servers, shard: int, packages: Path | None) -> None:
        """End a shard and start it again in another release."""
        before = server_readings.status(servers.addresses[shard])
        if self._rng.random() < 0.5:
            servers.kill(shard)
            self.result.faults["of these, by SIGKILL"] += 1
        elif (status := servers.terminate(shard, _END_SECONDS)) != 0:
            self.result.failures.append(f"shard {shard} ended with status {status} after SIGTERM")
        began = time.monotonic()
        servers.packages = packages
        servers.start(shard)
        servers.await_ready(shard)
        self.result.recovery_seconds.append(time.monotonic() - began)
        after = server_readings.status(servers.addresses[shard])
        if (after.generation, after.run_id) != (before.generation, before.run_id) or after.version < before.version:
            self.result.failures.append(
                f"shard {shard} was at version {before.version} of {before.run_id} ({before.generation:x}), and in "
                f"another release at {after.version} of {after.run_id} ({after.generation:x})"
            )
