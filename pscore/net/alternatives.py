"""Several servers of one shard, of which one serves: a primary and its standbys.

An address ``HOST:PORT/HOST:PORT`` names them, in any order. Which one serves is asked anew whenever the one before does
not answer.
"""

from collections.abc import Sequence

import grpc

from pscore.net.addresses import SEPARATOR
from pscore.net.channels import Security, open_channel
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub


def alternatives(address: str) -> tuple[str, ...]:
    """Return the ``HOST:PORT`` of each server that an address of :func:`pscore.net.addresses.expand` names."""
    return tuple(address.split(SEPARATOR))


def serves(status: pb.GetStatusResponse) -> bool:
    """Tell whether a server serves: it is no standby, and no standby has taken its place."""
    return not status.HasField("standby") and not status.replaced_by


def serving(address: str, security: Security, seconds: float) -> str:
    """Return the ``HOST:PORT`` of the server that serves, all asked at once; the first if none is known to.

    If two say that they serve, it is the one whose history has begun with the other's. Raises ``ChannelError`` as
    :func:`pscore.net.channels.open_channel` does.
    """
    servers = alternatives(address)
    if len(servers) == 1:
        return address
    statuses = {server: status for server, status in _ask(servers, security, seconds) if serves(status)}
    left_behind = {origin.generation for status in statuses.values() for origin in status.origins}
    newest = [server for server, status in statuses.items() if status.generation not in left_behind]
    return (newest or [*statuses] or [*servers])[0]


def _ask(servers: Sequence[str], security: Security, seconds: float) -> list[tuple[str, pb.GetStatusResponse]]:
    channels: list[grpc.Channel] = []
    found = []
    try:
        for server in servers:
            channels.append(open_channel(server, security, (("grpc.use_local_subchannel_pool", 1),)))
        calls = [
            ParameterServerServiceStub(channel).GetStatus.future(pb.GetStatusRequest(brief=True), timeout=seconds)
            for channel in channels
        ]
        for server, call in zip(servers, calls, strict=True):
            try:
                found.append((server, call.result()))
            except (grpc.RpcError, grpc.FutureCancelledError):
                continue
    finally:
        for channel in channels:
            channel.close()
    return found
