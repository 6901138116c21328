"""The proxy's process, and how the director talks to it."""

import json
import subprocess
import sys
from types import TracebackType

_END_SECONDS = 10.0


class Network:
    """A proxy before every shard; a context manager."""

    def __init__(self, ports: list[int], seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verify.failpoint.proxy", f"--seed={seed}", "--ports", *map(str, ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.addresses = [f"127.0.0.1:{port}" for port in json.loads(self._process.stdout.readline())]
        self.counts: dict[str, int] = {}

    def tell(self, command: str) -> None:
        """Say ``rough``, ``calm`` or ``cut``."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> "Network":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, and keep its counts."""
        try:
            said, _ = self._process.communicate(timeout=_END_SECONDS)
            self.counts = json.loads(said or "{}")
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
