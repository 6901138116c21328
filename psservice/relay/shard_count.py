"""How many shards a relay has: as many as its source, or as it had before if the source is away."""

import json
import logging
import math
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from psservice.settings import ServerSettings

log = logging.getLogger(__name__)

_FIND_SECONDS = 10.0
_AGAIN_SECONDS, _COMPLAINT_SECONDS = 5.0, 60.0
_SHARD = re.compile(r"shard-0-of-([1-9][0-9]{0,5})")


def with_shards(settings: ServerSettings) -> ServerSettings:
    """Return a relay's settings with the number of shards; waits for a source that is away, if nothing is here."""
    if not settings.source or settings.shards > 1 or settings.num_shards > 1:
        return settings
    complained_at, complaint = -math.inf, ""
    while True:
        told = _ask(settings)
        error = str(told.get("error", ""))
        count = int(told.get("shards", 0)) or _kept(settings.data_dir)
        if count:
            return settings.model_copy(update={"shards": count})
        if error and (error != complaint or time.monotonic() >= complained_at + _COMPLAINT_SECONDS):
            complained_at, complaint = time.monotonic(), error
            log.warning(
                "the source does not answer, so it is not known how many shards the relay has; if the source is a "
                "relay that waits for this one, give --of another server",
                extra={"source": settings.source, "error": error},
            )
        threading.Event().wait(_AGAIN_SECONDS)


def _ask(settings: ServerSettings) -> dict[str, Any]:
    """Ask the source in a process of its own, because this one is to be forked; return its ``shards``, or ``error``."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        _answer(settings, write_end)
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    told: dict[str, Any] = json.loads(text) if text else {"error": "the question has failed"}
    return told


def _answer(settings: ServerSettings, write_end: int) -> None:
    """Write the source's answer, and end this process."""
    import grpc

    from pscore.net.addresses import MOST_SHARDS
    from pscore.net.channels import ChannelError, explain, open_channel
    from pscore.wire.v1 import parameter_server_pb2 as pb
    from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
    from psservice.relay.source import SourceError, addresses_of

    address = settings.source
    try:
        addresses, security = addresses_of(settings, _FIND_SECONDS)
        address = addresses[0]
        with open_channel(address, security) as channel:
            stub = ParameterServerServiceStub(channel)
            count = stub.GetStatus(pb.GetStatusRequest(brief=True), timeout=_FIND_SECONDS).num_shards
        if not 0 < count <= MOST_SHARDS:
            raise SourceError(
                f"{address} says that it has {count} shards; a relay has 1 to {MOST_SHARDS}: correct --of"
            )
        told: dict[str, object] = {"shards": count}
    except (SourceError, ChannelError) as error:
        told = {"error": str(error)}
    except grpc.RpcError as error:
        told = {"error": str(SourceError(explain(error, address)))}
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
