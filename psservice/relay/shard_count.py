"""How many shards a relay has: as many as its source, or as it had before if the source is away."""

import json
import logging
import os
import re
import sys
import threading
import traceback
from pathlib import Path

from psservice.settings import ServerSettings

log = logging.getLogger(__name__)

_FIND_SECONDS = 10.0
_AGAIN_SECONDS = 5.0
_SHARD = re.compile(r"shard-0-of-([1-9][0-9]{0,5})")


def with_shards(settings: ServerSettings) -> ServerSettings:
    """Return a relay's settings with the number of shards; waits for a source that is away, if nothing is here."""
    if not settings.relay_of or settings.shards > 1 or settings.num_shards > 1:
        return settings
    while not (count := _ask(settings) or _kept(settings.data_dir)):
        threading.Event().wait(_AGAIN_SECONDS)
    return settings.model_copy(update={"shards": count})


def _ask(settings: ServerSettings) -> int:
    """Ask the source in a process of its own, because this one is to be forked; 0 if it does not answer."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        _answer(settings, write_end)
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    told = json.loads(text) if text else {"error": "the question has failed"}
    if "error" in told:
        log.warning("the source does not answer", extra={"source": settings.relay_of, "error": told["error"]})
    return int(told.get("shards", 0))


def _answer(settings: ServerSettings, write_end: int) -> None:
    """Write the source's answer, and end this process."""
    import grpc

    from pscore.net.channels import ChannelError, explain, open_channel
    from pscore.wire.v1 import parameter_server_pb2 as pb
    from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
    from psservice.relay.source import SourceError, addresses_of

    address = settings.relay_of
    try:
        addresses, security = addresses_of(settings, _FIND_SECONDS)
        address = addresses[0]
        with open_channel(address, security) as channel:
            stub = ParameterServerServiceStub(channel)
            status = stub.GetStatus(pb.GetStatusRequest(brief=True), timeout=_FIND_SECONDS)
        told: dict[str, object] = {"shards": status.num_shards}
    except (SourceError, ChannelError) as error:
        told = {"error": str(error)}
    except grpc.RpcError as error:
        told = {"error": explain(error, address)}
    except BaseException:
        traceback.print_exc()
        told = {"error": "the question has failed"}
    os.write(write_end, json.dumps(told).encode())
    sys.stderr.flush()
    os._exit(0)  # whatever the parent's frames would do is the parent's


def _kept(data_dir: Path | None) -> int:
    """Return how many shards a data directory is of; 0 if it is of none."""
    if data_dir is None or not data_dir.is_dir():
        return 0
    found = [(path.stat().st_mtime, _SHARD.fullmatch(path.name)) for path in data_dir.iterdir()]
    return max(((newest, int(match[1])) for newest, match in found if match is not None), default=(0.0, 0))[1]
