"""podman with images, volumes and networks of its own, apart from the machine's."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tools.container_test.machine import TestFailedError

_CONFIGURATION = """
[containers]
default_ulimits = ["nofile=8192:8192", "nproc=8192:8192"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
network_config_dir = "{networks}"
"""
_NOISE = "healthchecks: dial unix /run/systemd"  # no systemd, so no timer; the test calls the health check itself


class Podman:
    """Runs podman commands.

    Args:
        work: folder that keeps images, volumes and networks.
    """

    def __init__(self, work: Path) -> None:
        networks, configuration = work / "networks", work / "containers.conf"
        networks.mkdir(exist_ok=True)
        configuration.write_text(_CONFIGURATION.format(networks=networks))
        shared_memory = Path("/dev/shm/tmp")
        shared_memory.mkdir(exist_ok=True)
        self._environment = {**os.environ, "CONTAINERS_CONF": str(configuration), "TMPDIR": str(shared_memory)}
        self._command = ["podman", "--root", str(work / "storage"), "--runroot", "/run/container-test"]

    def run(self, *arguments: str, seconds: float = 120, stdin: str = "") -> str:
        """Run a command to its end; return what it has printed.

        Raises:
            TestFailedError: it fails or takes too long; with the end of what it has said.
        """
        answer = self.attempt(*arguments, seconds=seconds, stdin=stdin)
        if answer.returncode != 0:
            raise TestFailedError(
                f"podman {' '.join(arguments[:3])} … ended with status {answer.returncode}:\n"
                + "\n".join((answer.stdout + _quiet(answer.stderr)).splitlines()[-40:])
            )
        return answer.stdout

    def attempt(self, *arguments: str, seconds: float = 120, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """As :meth:`run`, and leave it to the caller what a status means."""
        try:
            return subprocess.run(
                [*self._command, *arguments],
                capture_output=True,
                text=True,
                timeout=seconds,
                input=stdin,
                env=self._environment,
            )
        except subprocess.TimeoutExpired as error:
            said = b"".join(part for part in (error.stdout, error.stderr) if isinstance(part, bytes))
            raise TestFailedError(
                f"podman {' '.join(arguments[:3])} … took more than {seconds:.0f} s:\n{said.decode()[-3000:]}"
            ) from None

    def inspect(self, name: str, kind: str = "container") -> dict[str, Any]:
        """Return what podman knows of a container, an image or a pod."""
        found = json.loads(self.run("inspect", "--type", kind, name))
        first: dict[str, Any] = found[0] if isinstance(found, list) else found
        return first

    def logs(self, container: str, lines: int = 30) -> str:
        """Return the end of a container's log, both streams."""
        answer = self.attempt("logs", "--tail", str(lines), container)
        return answer.stdout + answer.stderr


def _quiet(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if _NOISE not in line)
