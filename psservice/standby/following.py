"""A standby's thread: takes parts from its primary, and knows when it may serve in that one's place."""

import logging
import math
import threading
from collections.abc import Callable
from typing import Protocol

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.relay.source import SourceError
from psservice.settings import ServerSettings
from psservice.standby.primary import ReplicaAnswer
from psservice.storage.environment import Environment
from psservice.storage.files import StorageError
from psservice.storage.journal import Position
from psservice.storage.parts import HeldPart
from psservice.storage.replica import Replica

log = logging.getLogger(__name__)

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0
_COMPLAINT_SECONDS = 60.0
_AHEAD = (
    "the primary came back without a part of what is here, and is not followed any more: have this standby serve "
    "(psservice promote), or start it with an empty --data-dir if that part is not wanted"
)


class ReplicaSource(Protocol):
    """The question of a standby to its primary; :class:`psservice.standby.primary.Primary` asks over the network."""

    def ask(self, held: HeldPart) -> ReplicaAnswer:
        """Return the next part; raises :class:`SourceError`, and :class:`Rejected` as the shard does."""

    def close(self) -> None:
        """Break off every question."""


class Following:
    """Follows one shard. One thread calls :meth:`follow_once`; any may read the state.

    Attributes:
        is_acknowledged: whether the primary's answers waited for the standby when it last answered.
        newest: the end of the primary's journal, as it last told.
    """

    def __init__(
        self, settings: ServerSettings, environment: Environment, replica: Replica, primary: ReplicaSource
    ) -> None:
        self._settings, self._clock = settings, environment.monotonic
        self._replica, self._primary = replica, primary
        self._answered_at = self._clock()
        self._error, self._is_lost = "it has not answered yet", True
        self._complained_at = -math.inf
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_acknowledged = False
        self.newest = Position()

    def start(self, on_segment: Callable[[], None]) -> None:
        """Follow in a thread of its own; ``on_segment`` is called there whenever another segment has begun."""
        self._thread = threading.Thread(target=self._work, args=(on_segment,), name="standby", daemon=True)
        self._thread.start()

    def _work(self, on_segment: Callable[[], None]) -> None:
        pause, segment = _SHORTEST_PAUSE_SECONDS, 0
        while not self._closing.is_set():
            if self.follow_once():
                pause = _SHORTEST_PAUSE_SECONDS
            else:
                self._closing.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if segment != self._replica.segment:
                segment = self._replica.segment
                on_segment()

    def follow_once(self) -> bool:
        """Ask once, and write the answer down; tell whether that has succeeded."""
        if self._replica.is_ahead:
            self._complain(_AHEAD, is_lost=True)
            return False
        try:
            answer = self._primary.ask(self._replica.held)
            self._take(answer)
            self._replica.sync_in_time()
        except SourceError as error:
            self._complain(str(error), is_lost=True)
            return False
        except (Rejected, StorageError) as error:
            if isinstance(error, Rejected) and error.reason is ErrorCode.STANDBY_AHEAD:
                self._stop_following(error)
            else:
                self._complain(str(error))
            return False
        except Exception as error:  # whatever it was, the thread lives on and asks again
            self._complain(repr(error))
            log.exception("the primary cannot be followed", exc_info=error)
            return False
        if self._error:
            log.info("the primary is followed", extra={"primary": self._settings.standby_of})
        self._answered_at, self._is_lost = self._clock(), False
        self._error, self._complained_at = "", -math.inf
        return True

    def _take(self, answer: ReplicaAnswer) -> None:
        header = answer.header
        if header.manifest_bytes:
            snapshot = self._replica.take_snapshot(
                header.manifest_bytes, header.tensors_bytes, answer.data, continues=header.continues
            )
            log.info("snapshot received", extra={"version": snapshot.manifest.version, "path": str(snapshot.path)})
        elif header.journal_bytes:
            self._replica.append(Position(header.segment, header.offset), b"".join(answer.data))
        self.newest = Position(header.newest_segment, header.newest_offset)
        self.is_acknowledged = header.acknowledged

    def _stop_following(self, refusal: Rejected) -> None:
        """Note for ever that the primary has lost a part that is here: its files must not take the place of these."""
        log.error("the primary has lost a part of what is here", extra={"error": refusal.detail})
        try:
            self._replica.note_ahead()
        except StorageError as error:
            log.error("a later start would follow again, and be refused", extra={"error": str(error)})
        self._complain(_AHEAD, is_lost=True)

    def _complain(self, why: str, *, is_lost: bool = False) -> None:
        """Note a failure; ``is_lost``: the primary does not answer, and has not refused."""
        if self._closing.is_set():
            return
        if not is_lost:
            self._answered_at = self._clock()
        self._error, self._is_lost = why, is_lost
        if self._clock() - self._complained_at >= _COMPLAINT_SECONDS:
            self._complained_at = self._clock()
            log.warning("the primary cannot be followed", extra={"primary": self._settings.standby_of, "error": why})

    @property
    def lost_seconds(self) -> float:
        """How long the primary has not answered; 0 while it does."""
        return self._clock() - self._answered_at if self._is_lost else 0.0

    def is_due(self) -> bool:
        """Tell whether the standby is to serve by itself: nothing that was acknowledged can be missing then."""
        after = self._settings.promote_after_seconds
        return bool(after) and self.is_acknowledged and self.has_model and self.lost_seconds >= after

    @property
    def has_model(self) -> bool:
        """Whether there is a snapshot here."""
        return self._replica.newest is not None

    def require_promotable(self, *, force: bool) -> None:
        """Raise :class:`Rejected` (``BAD_REQUEST``) if the standby must not serve now."""
        if not self.has_model:
            raise Rejected(ErrorCode.BAD_REQUEST, f"the standby has no model yet: {self._error or 'it is on its way'}")
        if not self._is_lost and not force:
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"{self._settings.standby_of} answers: stop it first (psservice drain --stop), or have the standby "
                "take its place while it runs (psservice promote --force)",
            )

    def status(self) -> pb.StandbyStatus:
        """Return how far the standby is."""
        held = self._replica.held.position
        offset = held.offset if held.segment == self.newest.segment else 0
        return pb.StandbyStatus(
            primary=self._settings.standby_of,
            lost_seconds=self.lost_seconds,
            error=self._error,
            acknowledged=self.is_acknowledged,
            behind_bytes=max(0, self.newest.offset - offset),
            has_model=self.has_model,
        )

    def close(self) -> None:
        """End the thread, which writes nothing any more."""
        self._closing.set()
        self._primary.close()
        if self._thread is not None:
            self._thread.join()
