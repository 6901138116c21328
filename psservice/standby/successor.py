"""Tells the server whose place a standby has taken that it is replaced, however late it comes back."""

import logging
import socket
import threading

from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.relay.source import SourceError
from psservice.shard.shard import Shard
from psservice.standby.primary import Primary

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 5.0


class SuccessorThread:
    """Tells the former primary of the history that has begun here, until it has heard, or :meth:`close`."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._primary = Primary(shard.settings, f"{socket.gethostname()} {shard.settings.listen}")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="successor", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                self._primary.tell(self._history())
            except (SourceError, Rejected) as error:
                log.debug("the former primary has not heard yet", extra={"error": str(error)})
                self._closing.wait(_PAUSE_SECONDS)
                continue
            except Exception as error:  # whatever it was, it is tried again
                log.exception("the former primary cannot be told", exc_info=error)
                self._closing.wait(_PAUSE_SECONDS)
                continue
            log.warning("the former primary serves no more", extra={"primary": self._primary.address})
            return

    def _history(self) -> pb.ShardHistory:
        shard = self._shard
        model = shard.require_model(None)
        return pb.ShardHistory(
            shard_index=shard.settings.shard_index,
            generation=model.generation,
            version=model.version,
            origins=shard.state.histories.origins,
        )

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._primary.close()
        self._thread.join()
