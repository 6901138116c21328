"""The real client under the same misfortunes: versions count its pushes, and every replica is the server's model."""

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client import wire
from verify.client.caller import Caller
from verify.cluster.servers import Servers
from verify.failpoint.network import Network
from verify.failpoint.restarts import kill_and_start
from verify.failpoint.torment import Torment
from verify.plan import Plan, Result
from verify.traffic.team import Team, Trainer, TrainerFailedError
from verify.validate.verdict import Verdict

LEASE_SECONDS, ANSWER_SECONDS = 3.0, 150.0
_HIDDEN = 64
_DOWN_DENSITY = 0.1
_CALL_SECONDS = 30.0
_UP_SECONDS = 1.0, 4.0
_MISFORTUNE_SECONDS = 1.5
_MOST_UNSEEN = 2
"""Pushes of a killed life that may have been applied and not reported by it: with overlap, two are on their way."""


class Training:
    """Trainers, servers that are killed, and accounts at the end; campaigns with trainers are kinds of it."""

    def __init__(self, plan: Plan, directory: Path, say: Callable[[str], None]) -> None:
        self.plan, self.directory, self.say = plan, directory, say
        self.result = Result(plan.name)
        self._rng = random.Random(f"{plan.seed} {plan.name}")

    def run(self) -> Result:
        started, plan = time.monotonic(), self.plan
        self.directory.mkdir(parents=True)
        with ExitStack() as stack:
            servers = stack.enter_context(self.servers(self.directory, down_density=_DOWN_DENSITY))
            network = stack.enter_context(Network(servers.ports, self._rng.getrandbits(32)))
            team = Team(",".join(network.addresses), self.directory, plan.workers, hidden=_HIDDEN, pause=plan.pause)
            stack.callback(team.close)
            with self.trained_by(team):
                seed = self._rng.getrandbits(32)
                torment = Torment(team, network, servers, seed=seed, period=_MISFORTUNE_SECONDS, lease=LEASE_SECONDS)
                with torment:
                    self._kill_servers(servers)
                self.result.faults += torment.counts
                self._account(servers, team)
            servers.stop()
        self.result.network = network.counts
        return self.finished(started, servers)

    # Shared by the campaigns with trainers

    def servers(self, directory: Path, **settings: object) -> Servers:
        """Return the servers of a machine, not started, as the plan has them, with more settings."""
        usual = {
            "fsync": self.plan.fsync,
            "down_mode": self.plan.down_mode,
            "down_dense_below": 0,
            "lease_seconds": LEASE_SECONDS,
            "snapshot_seconds": 3,
            "keep_snapshots": 2,
        }
        return Servers(self.plan.shards, directory / "data", directory, **usual | settings)

    @contextmanager
    def trained_by(self, team: Team, first_seconds: float = ANSWER_SECONDS) -> Iterator[None]:
        """Run a block once every trainer has made its first step; one that fails ends the block, and is noted.

        Raises:
            TrainerFailedError: one has made no first step.
        """
        for trainer in team.living:
            trainer.answer("ms", first_seconds)
        try:
            yield
        except TrainerFailedError as error:
            self.result.failures.append(f"{error}; see {self.directory / 'trainers.log'}")

    def finished(self, started: float, *machines: Servers) -> Result:
        """Note what servers logged as errors, and the seconds since ``started``; return the result."""
        for servers in machines:
            self.result.failures += [f"server log: {line}" for line in servers.errors()[:5]]
        self.result.seconds = time.monotonic() - started
        return self.result

    def settled(self, servers: Servers, team: Team) -> tuple[list[wire.Download], int]:
        """Let all flush, then all pull, and leave; return the models, and how many replicas are not the servers'."""
        self.say("everybody flushes, pulls and leaves")
        for word, key in (("flush", "flushed"), ("pull", "pulled")):
            for trainer in team.living:
                trainer.ask(word)
            for trainer in team.living:
                trainer.answer(key, ANSWER_SECONDS)
        downloads = [wire.download(address, _CALL_SECONDS) for address in servers.addresses]
        model = wire.digest(np.concatenate([found.values for found in downloads]))
        different = sum(trainer.answer("pulled", 1.0)["digest"] != model for trainer in team.living)
        for trainer in team.living:
            if trainer.end(ANSWER_SECONDS):
                self.result.failures.append(f"{trainer.name} ended with status {trainer.process.returncode}")
        return downloads, different

    def _kill_servers(self, servers: Servers) -> None:
        for number in range(self.plan.kills):
            self.say(f"{number} of {self.plan.kills} kills")
            threading.Event().wait(self._rng.uniform(*_UP_SECONDS))
            kill_and_start(servers, self.result, [self._rng.randrange(self.plan.shards)])
        threading.Event().wait(_UP_SECONDS[1])

    def _account(self, servers: Servers, team: Team) -> None:
        """Once all have settled, replicas must be the model, and versions the sum of all steps."""
        downloads, different = self.settled(servers, team)
        agreed = team.living[0].agreed
        flushed = [trainer.answer("flushed", 1.0) for trainer in team.living]
        for shard, found in enumerate(downloads):
            verdict = Verdict(applied=found.version, compared=len(team), different=different)
            verdict.refused = sum(said["refused"] for said in flushed)
            verdict.sent = verdict.acknowledged = sum(said["flushed"] for said in flushed)
            for dead in team.dead:
                self._count_dead(verdict, dead, servers, shard, found.layout, agreed)
            verdict.lost += max(0, verdict.acknowledged - verdict.applied)
            verdict.duplicated += max(0, verdict.applied - verdict.acknowledged)
            if verdict.different:
                verdict.say(f"{verdict.different} of {len(team)} replicas are not the server's model")
            if verdict.acknowledged != verdict.applied:
                verdict.say(f"{verdict.acknowledged} pushes were acknowledged, the server is at {verdict.applied}")
            self.result.verdicts.append(verdict)

    def _count_dead(
        self,
        verdict: Verdict,
        dead: Trainer,
        servers: Servers,
        shard: int,
        layout: pb.PackedLayout,
        agreed: dict[str, dict[str, str]],
    ) -> None:
        """Ask a shard for the last step of a killed life, and compare with what that life had been answered."""
        request = pb.JoinRequest(
            identity=pb.WorkerIdentity(worker_id=dead.name, incarnation=str(uuid.uuid4())),
            protocol_version=3,
            method=str(agreed["method"]),
            method_settings=agreed["settings"],
            layout=layout,
            shard_index=shard,
            num_shards=servers.shards,
        )
        caller = Caller([servers.addresses[shard]], 0, self._rng, lambda why: None)
        joined = caller.insist(0, lambda line, timeout: line.stub.Join(request, timeout=timeout))
        request.identity.run_id = joined.run_id
        caller.leave(0, request.identity)
        caller.close()
        verdict.sent += joined.last_step
        verdict.acknowledged += joined.last_step
        answered = dead.steps - dead.overlap  # with overlap a step is over when its push is sent
        if not answered <= joined.last_step <= dead.steps + _MOST_UNSEEN:
            verdict.lost += 1
            verdict.say(f"{dead.name} was answered {answered} steps, the server has {joined.last_step}")
