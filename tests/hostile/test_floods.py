"""Floods by callers who mean no good: an honest worker trains on, memory stays flat, probes and SIGTERM are heeded.

How much slower the worker gets is measured by ``python -m tests.hostile.floods``; no verdict here depends on that.
"""

from contextlib import suppress

import grpc
import pytest

from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.hostile.attackers import FLOODS, SERVICE
from tests.hostile.floods import TOKEN, scene
from tests.system.tools import wait_until
from tests.tiers import long_but

SHORT = ("empty_pushes", "unread_downloads", "rapid_reset")
PUSHES = 40
MEMORY_BYTES = 64 << 20
STOP_SECONDS = 10.0  # a quiet machine takes 1 to 3
SECONDS = 60.0


@pytest.mark.parametrize("kind", long_but(SHORT, FLOODS))
def test_an_honest_worker_trains_on_under_a_flood_and_the_server_ends_when_it_is_told(kind, tmp_path):
    with scene(tmp_path, rpc_threads=4) as on:
        before = on.memory_bytes()
        with on.flood(kind, SECONDS):
            assert len(on.worker.push_for(1.0, least=PUSHES)) >= PUSHES
            on.worker.stub.RenewLease(pb.RenewLeaseRequest(identity=on.worker.identity), timeout=SECONDS)
            assert on.worker.stub.GetStatus(pb.GetStatusRequest(), timeout=SECONDS).version >= PUSHES
            assert on.is_serving()
            # A hundred models on their way are held once by the server and once by gRPC, and freed when they are sent.
            wait_until(lambda: on.memory_bytes() - before < MEMORY_BYTES, SECONDS)
            assert on.stop() < STOP_SECONDS


@pytest.mark.long
@pytest.mark.parametrize("token", long_but([None], [None, TOKEN]))
def test_bodies_that_are_no_protobuf_leave_nothing_behind(token, tmp_path):
    with scene(tmp_path) as on:
        credentials = grpc.ssl_channel_credentials(on.ca.read_bytes())
        metadata = [("authorization", f"Bearer {token}")] if token else []
        with grpc.secure_channel(on.server.addresses[0], credentials) as channel:
            call = channel.unary_unary(SERVICE + "GetStatus")

            def send(count):
                for _ in range(count // 50):
                    for failed in [call.future(b"\xff" * 10, metadata=metadata, timeout=SECONDS) for _ in range(50)]:
                        with suppress(grpc.RpcError):
                            failed.result()

            send(100)
            before = on.memory_bytes()
            send(600)
            assert on.memory_bytes() - before < 6 << 20  # they would be 11 MB if each left 19 KB
        on.worker.push_for(0.0, least=1)


def test_a_message_that_grpc_has_compressed_is_not_taken(tmp_path):
    with scene(tmp_path) as on:
        with pytest.raises(grpc.RpcError) as refused:
            on.worker.stub.GetStatus(pb.GetStatusRequest(), timeout=SECONDS, compression=grpc.Compression.Gzip)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        on.worker.push_for(0.0, least=1)
