"""The stage that runs the pods of the overlay: training, a killed server, and a clean end."""

import functools
import os
import re
import signal
import sys
import time
from pathlib import Path

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl.client import OperateError, call
from tools.container_test import image, manifests
from tools.container_test.machine import FAILED, TestFailedError, say, settle_in, wait_until
from tools.container_test.manifests import PlayedPod
from tools.container_test.podman import Podman

_NETWORK = "sparseps"
_PORT = 50051
_READY_SECONDS = 300.0
_TRAINING_SECONDS = 600.0
_STOP_SECONDS = 120
_KILL_AT_VERSION = 60  # of 440: both workers are well on their way


class Pods:
    """The pods of a plan, while they run."""

    def __init__(self, podman: Podman, plan: manifests.Plan) -> None:
        self._podman = podman
        self._plan = plan
        self._addresses: dict[str, str] = {}

    def start_servers(self) -> None:
        """Start every shard and wait until each says that it serves."""
        self._podman.run("network", "create", _NETWORK)
        for pod in self._plan.servers:
            self._play(pod, image.SERVER)
        for pod in self._plan.servers:
            wait_until(functools.partial(self.healthy, pod), _READY_SECONDS, f"{pod.name} serves")
            self._check_confinement(pod)
        say(f"{len(self._plan.servers)} shards serve, and their health checks say so")

    def start_workers(self) -> None:
        for pod in self._plan.workers:
            self._play(pod, image.QUICKSTART)
        say(f"{len(self._plan.workers)} workers are started")

    def kill_one(self) -> None:
        """Kill the first shard in the middle of the training; it comes back with all that it has acknowledged."""
        victim = self._plan.servers[0]
        wait_until(
            lambda: self._version(victim) >= _KILL_AT_VERSION or not self._training(),
            _TRAINING_SECONDS,
            f"{victim.name} reaches version {_KILL_AT_VERSION}",
        )
        version, pid = self._version(victim), self._pid(victim)
        os.kill(pid, signal.SIGKILL)
        say(f"{victim.name} is killed at version {version}")
        started = time.monotonic()
        wait_until(
            lambda: self._pid(victim) not in (0, pid) and self.healthy(victim), _READY_SECONDS, f"{victim.name} is back"
        )
        found = self._version(victim)
        if found < version:
            raise TestFailedError(f"{victim.name} had version {version} and came back with {found}")
        if not self._training():
            raise TestFailedError("the training was over before the killed server was back: nothing was shown")
        say(f"{victim.name} is back after {time.monotonic() - started:.0f} s with version {found}")

    def await_end(self) -> None:
        """Wait until every worker has ended well; worker 0 has tested the model."""
        wait_until(lambda: not self._training(), _TRAINING_SECONDS, "all workers end")
        for pod in self._plan.workers:
            status = self._podman.inspect(pod.container_name)["State"]["ExitCode"]
            if status != 0:
                raise TestFailedError(f"{pod.name} ended with status {status}")
        judge = self._plan.workers[0]
        verdict = re.search(r"test accuracy .* target reached", self._podman.logs(judge.container_name))
        if verdict is None:
            raise TestFailedError(f"{judge.name} has not tested the model")
        say(f"all workers ended with status 0; {verdict[0]}")

    def stop_servers(self) -> None:
        """Send SIGTERM to every shard; each ends with status 0 by itself."""
        for pod in self._plan.servers:
            started = time.monotonic()
            self._podman.run("stop", "--time", str(_STOP_SECONDS), pod.container_name, seconds=_STOP_SECONDS + 60)
            status = self._podman.inspect(pod.container_name)["State"]["ExitCode"]
            if status != 0:
                raise TestFailedError(f"{pod.name} ended with status {status} after SIGTERM")
            say(f"{pod.name} ended with status 0, {time.monotonic() - started:.1f} s after SIGTERM")

    def healthy(self, pod: PlayedPod) -> bool:
        """Tell what the image's health check says in the pod."""
        answer = self._podman.attempt("exec", pod.container_name, *self._health_check(pod))
        return answer.returncode == 0

    def tell_all(self) -> None:
        """Print the end of every log, for the reader of a failure."""
        for pod in (*self._plan.servers, *self._plan.workers):
            print(f"---- {pod.name}\n{self._podman.logs(pod.container_name)}", file=sys.stderr)

    def _play(self, pod: PlayedPod, built: str) -> None:
        self._podman.run("tag", built, pod.image)
        network = f"{_NETWORK}:{','.join(f'alias={alias}' for alias in pod.aliases)}".rstrip(":")
        self._podman.run("kube", "play", "--network", network, "-", stdin=pod.text, seconds=300)

    def _health_check(self, pod: PlayedPod) -> list[str]:
        test = self._podman.inspect(pod.image, "image")["Healthcheck"]["Test"]
        if test[:1] != ["CMD"]:
            raise TestFailedError(f"the health check of {pod.image} is {test}, not a program of its own")
        return list(test[1:])

    def _check_confinement(self, pod: PlayedPod) -> None:
        """See that the manifest's security context has arrived."""
        found = self._podman.inspect(pod.container_name)
        if not found["HostConfig"]["ReadonlyRootfs"]:
            raise TestFailedError(f"{pod.name}: the root can be written")
        held = self._podman.run(
            "exec", pod.container_name, "grep", "-E", "^Cap(Prm|Eff|Bnd)|^NoNewPrivs", "/proc/1/status"
        )
        if {int(line.split()[1], 16) for line in held.splitlines() if line.startswith("Cap")} != {0}:
            raise TestFailedError(f"{pod.name} has capabilities:\n{held}")
        if "NoNewPrivs:\t1" not in held:
            raise TestFailedError(f"{pod.name} may gain privileges:\n{held}")

    def _training(self) -> bool:
        """Tell whether any worker still runs; one that failed is an error at once."""
        states = [self._podman.inspect(pod.container_name)["State"] for pod in self._plan.workers]
        for pod, state in zip(self._plan.workers, states, strict=True):
            if state["Status"] == "exited" and state["ExitCode"] != 0:
                raise TestFailedError(f"{pod.name} ended with status {state['ExitCode']}")
        return any(state["Status"] != "exited" for state in states)

    def _pid(self, pod: PlayedPod) -> int:
        return int(self._podman.inspect(pod.container_name)["State"]["Pid"])

    def _version(self, pod: PlayedPod) -> int:
        """Return the version of a shard; 0 while it has none, or does not answer."""
        if pod.name not in self._addresses:  # it belongs to the pod, whatever becomes of its container
            infra = self._podman.inspect(pod.name, "pod")["InfraContainerID"]
            address = self._podman.inspect(infra)["NetworkSettings"]["Networks"][_NETWORK]["IPAddress"]
            self._addresses[pod.name] = f"{address}:{_PORT}"
        try:
            return int(call(self._addresses[pod.name], "GetStatus", pb.GetStatusRequest(), 10.0).version)
        except OperateError:
            return 0


def main(work: Path, overlay: Path) -> int:
    settle_in()
    pods: Pods | None = None
    try:
        plan = manifests.plan(manifests.kustomize(overlay))
        pods = Pods(Podman(work), plan)
        pods.start_servers()
        pods.start_workers()
        pods.kill_one()
        pods.await_end()
        pods.stop_servers()
    except TestFailedError as error:
        if pods is not None:
            pods.tell_all()
        print(f"container test FAILED: {error}", file=sys.stderr, flush=True)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
