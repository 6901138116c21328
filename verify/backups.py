"""Shards that are restored: one from an older copy, each from a copy of another moment, or all from one backup.

Copies are made while the servers run, in any order of their files; backups by ``psservice checkpoint export``. Pushes
that came behind either are gone with it, so none are counted here. What must hold all the same: each restored shard
begins a history of its own, the servers name a shard that was taken back alone and none after a backup, and every
replica is the servers' model in the end.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client import wire
from verify.cluster.servers import Servers
from verify.plan import Result
from verify.traffic.team import Team
from verify.training import Training
from verify.validate import server_readings
from verify.validate.verdict import Verdict

_SHARDS = 2
_HIDDEN = 64
_CALL_SECONDS, _NAMED_SECONDS = 30.0, 30.0
_COMMAND_SECONDS = 120.0
_SNAPSHOT_SECONDS = 1.0
_APART_SECONDS = 1.0, 2.0  # long enough for a snapshot of its own
_POLL_SECONDS = 0.1


class Backups(Training):
    """Runs the plan's kills: the odd ones restore one shard, the even ones both, from copies of two moments.

    Behind each, all shards lose their disks and are restored from a backup.
    """

    def run(self) -> Result:
        started, plan = time.monotonic(), self.plan
        self.directory.mkdir(parents=True)
        with ExitStack() as stack:
            servers = stack.enter_context(
                self.servers(self.directory, keep_snapshots=4, snapshot_seconds=_SNAPSHOT_SECONDS)
            )
            team = Team(",".join(servers.addresses), self.directory, plan.workers, hidden=_HIDDEN, pause=plan.pause)
            stack.callback(team.close)
            with self.trained_by(team):
                for number in range(plan.kills):
                    self.say(f"{number} of {plan.kills} restores")
                    self._restore_copies(servers, number)
                    self._restore_backup(servers, number)
                self._compare(servers, team)
            servers.stop()
        return self.finished(started, servers)

    def _restore_copies(self, servers: Servers, number: int) -> None:
        self._pause()
        old = self._copy(servers, f"{number}-old")
        self._pause()
        new = self._copy(servers, f"{number}-new")
        if number % 2:
            self._pause()
        before = _generations(servers)
        older = self._rng.randrange(_SHARDS)
        sources = {older: old} if number % 2 else {older: old, 1 - older: new}
        began = time.monotonic()
        for shard in range(_SHARDS):
            servers.kill(shard)
        for shard, source in sources.items():
            shutil.rmtree(servers.folder(shard))
            shutil.copytree(source / servers.folder(shard).name, servers.folder(shard))
        self._start(servers, began)
        self.result.faults["shards restored from a copy"] += len(sources)
        for shard in sources:
            if _generations(servers)[shard] == before[shard]:
                self.result.failures.append(f"restore {number}: shard {shard} goes on with its history from a copy")
        if not self._is_named(servers, older):
            self.result.failures.append(f"restore {number}: nobody says that shard {older} has lost versions")
        self._pause()
        for address in servers.addresses:  # as the operator does who accepts the mixture
            with closing(wire.Line(address)) as line:
                version = server_readings.status(address).version
                line.stub.RestoreModel(pb.RestoreModelRequest(version=version), timeout=_CALL_SECONDS)

    def _restore_backup(self, servers: Servers, number: int) -> None:
        """Export a checkpoint while everybody trains; then lose all disks, and import it."""
        self._pause()
        store = str(self.directory / "store")
        exported = self._command("export", "new", *servers.addresses, "--to", store, "--keep", "2")
        if exported is None:
            return
        self._pause()
        before, began = _generations(servers), time.monotonic()
        for shard in range(_SHARDS):
            servers.kill(shard)
            shutil.rmtree(servers.folder(shard))
        if (
            self._command("import", exported["checkpoint"], "--from", store, "--data-dir", str(servers.data_dir))
            is None
        ):
            return
        self._start(servers, began)
        self.result.faults["shards restored from a backup"] += _SHARDS
        statuses = [server_readings.status(address) for address in servers.addresses]
        for shard, status in enumerate(statuses):
            found = (status.run_id, status.version >= exported["shards"][shard]["version"])
            if found != (exported["run_id"], True) or status.generation == before[shard]:
                self.result.failures.append(f"restore {number}: shard {shard} is not that of the backup: {found}")
        self._pause()
        for address in servers.addresses:
            if any(each.lost_versions for each in server_readings.status(address).known_shards):
                self.result.failures.append(f"restore {number}: {address} takes shards of one backup for a mixture")

    def _command(self, *words: str) -> Any:
        """Run ``psservice checkpoint``; return what it prints, or ``None`` after a failure, which is noted."""
        command = [sys.executable, "-m", "psservice", "checkpoint", *words, "--output=json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
        if done.returncode:
            self.result.failures.append(f"checkpoint {words[0]} ended with {done.returncode}: {done.stderr}")
            return None
        return json.loads(done.stdout)

    def _start(self, servers: Servers, began: float) -> None:
        for shard in range(_SHARDS):
            servers.start(shard)
        for shard in range(_SHARDS):
            servers.await_ready(shard)
        self.result.recovery_seconds.append(time.monotonic() - began)
        self.result.faults["servers killed"] += _SHARDS

    def _copy(self, servers: Servers, name: str) -> Path:
        """Copy all shards, each in another order of its files, while they serve."""
        target = self.directory / name
        for shard in range(_SHARDS):
            source = servers.folder(shard)
            for part in self._rng.sample(("journal", "lock", "snapshots"), 3):
                to = target / source.name / part
                to.parent.mkdir(parents=True, exist_ok=True)
                self._copy_part(source / part, to)
        return target

    def _copy_part(self, source: Path, to: Path) -> None:
        """Copy a file or a folder; a file that the server removes meanwhile makes the folder be copied again."""
        if source.is_file():
            shutil.copy2(source, to)
            return
        while True:
            try:
                shutil.copytree(source, to)
                return
            except (shutil.Error, FileNotFoundError):
                shutil.rmtree(to, ignore_errors=True)
                self.result.faults["copies begun again"] += 1

    def _is_named(self, servers: Servers, older: int) -> bool:
        """Wait until the other shard names the one that was taken back."""
        end = time.monotonic() + _NAMED_SECONDS
        while time.monotonic() < end:
            known = server_readings.status(servers.addresses[1 - older]).known_shards
            if any(each.shard_index == older and each.lost_versions for each in known):
                return True
            threading.Event().wait(_POLL_SECONDS)
        return False

    def _compare(self, servers: Servers, team: Team) -> None:
        """Once all have settled, replicas must be the model."""
        _, different = self.settled(servers, team)
        verdict = Verdict(compared=len(team), different=different)
        if verdict.different:
            verdict.say(f"{verdict.different} of {len(team)} replicas are not the servers' model")
        self.result.verdicts.append(verdict)

    def _pause(self) -> None:
        threading.Event().wait(self._rng.uniform(*_APART_SECONDS))


def _generations(servers: Servers) -> list[int]:
    return [server_readings.status(address).generation for address in servers.addresses]
