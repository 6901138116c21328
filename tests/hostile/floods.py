"""A server with TLS and tokens under a flood, and an honest worker beside it: what it sees, what the server takes.

``python -m tests.hostile.floods`` measures every flood and prints a table.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np
import psutil
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psclient.rpc.local_server import LocalServer
from tests.hostile.attackers import FLOODS
from tests.system.raw import RawWorker

TOKEN, OTHER_TOKEN = "honest-token", "mallorys-token"
SIZE = 100_000
_ENTRIES = 1_000
_LONGEST_SECONDS = 30.0


class HonestWorker(RawWorker):
    """Pushes 1 % of a small model over TLS, one push after another."""

    def __init__(self, address: str, ca: bytes) -> None:
        """Join and upload."""
        credentials = grpc.composite_channel_credentials(
            grpc.ssl_channel_credentials(ca), grpc.access_token_call_credentials(TOKEN)
        )
        channel = grpc.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)])
        super().__init__(address, "honest", SIZE, channel)
        self._index = list(range(0, SIZE, SIZE // _ENTRIES))
        self._values = [1e-6] * len(self._index)
        self.join()

    def push_for(self, seconds: float, least: int = 1) -> list[float]:
        """Push for a time; return how long each push took, seconds."""
        took: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(took) < least:
            before = time.monotonic()
            try:
                self.push(self._index, self._values)
            except grpc.RpcError as error:  # a call whose first bytes come late may be cut, and a worker calls again
                if error.code() is not grpc.StatusCode.CANCELLED:
                    raise
            else:
                took.append(time.monotonic() - before)
        return took


@dataclass
class Scene:
    """A running server, its files and an honest worker."""

    server: LocalServer
    worker: HonestWorker
    ca: Path

    @property
    def process(self) -> psutil.Process:
        """The server's."""
        return psutil.Process(self.server.processes[0].pid)

    def memory_bytes(self) -> int:
        """What the server holds now."""
        return int(self.process.memory_info().rss)

    @contextmanager
    def flood(self, kind: str, seconds: float) -> Iterator[None]:
        """Attack from another process for the length of the body; ``seconds`` at most."""
        words = [kind, self.server.addresses[0], str(self.ca), OTHER_TOKEN, str(seconds)]
        attacker = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.attackers", *words], stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"begun\n"
            yield
        finally:
            attacker.kill()
            attacker.wait()
            attacker.stdout.close()

    def is_serving(self) -> bool:
        """Ask the health port, as a probe does."""
        with grpc.insecure_channel(self.server.health_addresses[0]) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_LONGEST_SECONDS
            )
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def stop(self) -> float:
        """Send SIGTERM; return how long the server took to end with status 0, seconds."""
        process = self.server.processes[0]
        before = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(_LONGEST_SECONDS) == 0
        return time.monotonic() - before


@contextmanager
def scene(directory: Path, **settings: object) -> Iterator[Scene]:
    """Start a server with TLS and tokens, and an honest worker that has trained a little."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(directory / "server.key")
    (directory / "server.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(directory / "ca.pem")
    (directory / "tokens").write_text(f"worker {TOKEN}\nworker {OTHER_TOKEN}\n")
    options = {
        "tls_cert": directory / "server.pem",
        "tls_key": directory / "server.key",
        "tokens": directory / "tokens",
        "health_listen": "127.0.0.1:0",
        "log_level": "warning",
        "lease_seconds": 300,
    }
    with LocalServer(**options | settings) as server:
        worker = HonestWorker(server.addresses[0], (directory / "ca.pem").read_bytes())
        try:
            worker.push_for(0.5, least=20)
            yield Scene(server, worker, directory / "ca.pem")
        finally:
            worker.channel.close()


def main() -> None:
    """Measure every flood."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.floods", description=__doc__)
    parser.add_argument("floods", nargs="*", default=list(FLOODS), metavar="FLOOD")
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    print("| flood | p50 alone, ms | p50 under it | p99 alone | p99 under it | ratio | memory, MiB | SIGTERM, s |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in arguments.floods:
        with TemporaryDirectory() as directory, scene(Path(directory)) as on:
            alone = on.worker.push_for(arguments.seconds)
            before = on.memory_bytes()
            with on.flood(kind, arguments.seconds + 30):
                time.sleep(0.5)  # its streams are open, or its first calls made
                under = on.worker.push_for(arguments.seconds)
                memory = on.memory_bytes() - before
                stopped = on.stop()
            figures = [1e3 * float(np.percentile(took, q)) for q in (50, 99) for took in (alone, under)]
            words = " | ".join(f"{figure:.1f}" for figure in figures)
            print(
                f"| {kind} | {words} | {figures[3] / figures[2]:.1f} | {memory / 2**20:.0f} | {stopped:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
