"""Whoever watches the health port in numbers does not keep probes from their answer."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psclient.rpc.local_server import LocalServer
from psservice.cli.main import main

WATCHES, CHANNELS = 300, 4


def test_probes_are_answered_beside_hundreds_of_watches():
    with LocalServer(health_listen="127.0.0.1:0") as server:
        address = server.health_addresses[0]
        channels = [grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(CHANNELS)]
        request = health_pb2.HealthCheckRequest()
        watches = [
            health_pb2_grpc.HealthStub(channels[i % CHANNELS]).Watch(request, timeout=60) for i in range(WATCHES)
        ]
        assert all(next(watch).status == health_pb2.HealthCheckResponse.SERVING for watch in watches)
        for _ in range(3):
            assert main(["health", address, "--timeout", "10"]) == 0
        for channel in channels:
            channel.close()
