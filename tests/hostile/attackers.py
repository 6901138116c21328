"""Floods by callers who mean no good, each in a process of its own, bounded in number and time.

``python -m tests.hostile.attackers KIND ADDRESS CA TOKEN SECONDS`` floods a server over TLS, on loopback only.
A worker's token is used where the attacker is one who has it; the others have none.
"""

import socket
import ssl
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc

from pscore.wire.protocol import NEWEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.packed import packed

SERVICE = "/sparseps.v1.ParameterServerService/"
HEALTH = "/grpc.health.v1.Health/"
_STREAMS = 64
_ENOUGH = 100_000


class Attack:
    """What an attacker has: a connection, perhaps a token, and an end."""

    def __init__(self, address: str, ca: Path, token: str, seconds: float) -> None:
        """Connect."""
        self.address, self.ca = address, ca
        self.end = time.monotonic() + seconds
        self.over = threading.Event()
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        credentials = grpc.ssl_channel_credentials(ca.read_bytes())
        self.channels = [grpc.secure_channel(address, credentials, options) for _ in range(8)]
        self.metadata = (("authorization", f"Bearer {token}"),)

    def silent(self) -> Iterator[bytes]:
        """Send nothing until the end."""
        self.over.wait()
        yield from ()

    def open_streams(self, path: str, count: int, *, known: bool) -> None:
        """Open streams that never send a message, over several connections, until the end; open again what is cut."""
        metadata = self.metadata if known else ()
        calls: list[grpc.Future] = []
        while time.monotonic() < self.end:
            calls = [call for call in calls if not call.done()]
            while len(calls) < count:
                channel = self.channels[len(calls) % len(self.channels)]
                calls.append(channel.stream_unary(path).future(self.silent(), timeout=60, metadata=metadata))
            time.sleep(0.1)
        self.over.set()

    def calls(self, path: str, body: bytes, *, known: bool, threads: int = 4) -> int:
        """Make one call after another with the same body; return how many."""
        made = [0] * threads

        def work(number: int) -> None:
            call = self.channels[number % len(self.channels)].unary_unary(path)
            while time.monotonic() < self.end and made[number] < _ENOUGH // threads:
                with suppress(grpc.RpcError):
                    call(body, timeout=10, metadata=self.metadata if known else ())
                made[number] += 1

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(made)


def silent_health_checks(attack: Attack) -> None:
    """Health checks of nobody, without their message."""
    attack.open_streams(HEALTH + "Check", _STREAMS, known=False)


def silent_health_watches(attack: Attack) -> None:
    """The same, to be told of changes."""
    attack.open_streams(HEALTH + "Watch", _STREAMS, known=False)


def silent_calls_of_nobody(attack: Attack) -> None:
    """Unary calls without a token and without their message."""
    attack.open_streams(SERVICE + "GetStatus", _STREAMS, known=False)


def silent_calls_of_a_worker(attack: Attack) -> None:
    """Unary calls with a token and without their message, more than may be silent at once."""
    attack.open_streams(SERVICE + "GetStatus", 10 * _STREAMS, known=True)


def empty_pushes(attack: Attack) -> None:
    """A worker's pushes that send nothing."""
    attack.open_streams(SERVICE + "PushSparse", _STREAMS, known=True)


def unread_downloads(attack: Attack) -> None:
    """A hundred models that are asked for and not read."""
    calls = []
    for number in range(100):
        download = attack.channels[number % 2].unary_stream(SERVICE + "DownloadModel")
        calls.append(download(b"", timeout=60, metadata=attack.metadata))
    time.sleep(max(0.0, attack.end - time.monotonic()))
    for call in calls:
        call.cancel()


def no_protobuf(attack: Attack) -> None:
    """Ten bytes that are no message."""
    attack.calls(SERVICE + "GetStatus", b"\xff" * 10, known=False)


def no_protobuf_of_a_worker(attack: Attack) -> None:
    """The same, from one who is let in."""
    attack.calls(SERVICE + "Join", b"\xff" * 10, known=True)


def joins_with_many_tensors(attack: Attack) -> None:
    """Joins with a tensor more than a million, four at a time."""
    tensors = [pb.TensorSpec(name=f"{i:x}", shape=[1], data_type=1) for i in range(1 << 16)]
    pieces = [pb.ModelLayout(parameters=tensors)] * 17
    attack.calls(SERVICE + "Join", join_of(layout=packed(*pieces)).SerializeToString(), known=True)


def joins_with_many_settings(attack: Attack) -> None:
    """Joins with a hundred and fifty thousand settings."""
    request = join_of(method_settings={f"{i:x}": "" for i in range(150_000)})
    attack.calls(SERVICE + "Join", request.SerializeToString(), known=True)


def rapid_reset(attack: Attack) -> None:
    """HTTP/2 streams of nobody that are opened and reset at once, as fast as the server reads."""
    host, _, port = attack.address.rpartition(":")
    context = ssl.create_default_context(cafile=str(attack.ca))
    context.set_alpn_protocols(["h2"])
    headers = _headers(attack.address)
    while time.monotonic() < attack.end:
        try:
            with (
                socket.create_connection((host, int(port)), timeout=5) as plain,
                context.wrap_socket(plain, server_hostname=host) as line,
            ):
                line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
                threading.Thread(target=_drain, args=(line,), daemon=True).start()
                for first in range(1, 2 * _ENOUGH, 200):
                    line.sendall(
                        b"".join(
                            _frame(1, 4, stream, headers) + _frame(3, 0, stream, struct.pack(">I", 8))
                            for stream in range(first, first + 200, 2)
                        )
                    )
                    if time.monotonic() > attack.end:
                        return
        except OSError:
            continue


def join_of(**fields: object) -> pb.JoinRequest:
    """Return a request to join that is refused at last."""
    identity = pb.WorkerIdentity(worker_id="mallory", incarnation=str(uuid.uuid4()))
    return pb.JoinRequest(identity=identity, protocol_version=NEWEST_PROTOCOL, method="dgs", num_shards=1, **fields)  # type: ignore[arg-type]


FLOODS: dict[str, Callable[[Attack], None]] = {
    flood.__name__: flood
    for flood in (
        silent_health_checks,
        silent_health_watches,
        silent_calls_of_nobody,
        silent_calls_of_a_worker,
        empty_pushes,
        unread_downloads,
        no_protobuf,
        no_protobuf_of_a_worker,
        joins_with_many_tensors,
        joins_with_many_settings,
        rapid_reset,
    )
}


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _headers(authority: str) -> bytes:
    """Write the headers of a call in HPACK, literally."""

    def text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    return (
        b"\x83\x87"  # POST, https
        + b"\x04"
        + text(SERVICE + "GetStatus")
        + b"\x01"
        + text(authority)
        + b"\x0f\x10"
        + text("application/grpc")
        + b"\x00"
        + text("te")
        + text("trailers")
    )


def _drain(line: ssl.SSLSocket) -> None:
    with suppress(OSError, ValueError):
        while line.recv(1 << 16):
            pass


def main() -> None:
    """Flood."""
    kind, address, ca, token, seconds = sys.argv[1:]
    if not address.startswith(("127.0.0.1:", "localhost:")):
        raise SystemExit("floods stay on loopback")
    attack = Attack(address, Path(ca), token, float(seconds))
    print("begun", flush=True)
    FLOODS[kind](attack)


if __name__ == "__main__":
    main()
