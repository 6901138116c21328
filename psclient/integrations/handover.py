"""Patches that an engine installs itself, in a thread of its own, when it is told which version to have."""

import threading
import time
from collections.abc import Callable, Sequence

from psclient.errors import FollowerNotReadyError
from psclient.executor import is_cancelled
from psclient.reader.follower import Follower
from psclient.reader.patch_sink import Patch
from psclient.reader.sink import CutDeclinedError
from pscore.reader.cut import Cut

_POLL_SECONDS = 0.1
_COMMIT_SECONDS = 60.0  # that an engine waits longer for a version that the follower is about to commit


class Handover:
    """A receiver of patches for an engine that changes its model at safe points alone.

    The follower's thread stages a version ahead of time, and keeps it until the engine wants one. :meth:`bring`, which
    the engine calls in its own thread at such a point, installs the version that is wanted. If another one is staged,
    the follower drops it, and fetches the one that is wanted as one difference.

    Args:
        check: called in the follower's thread with a version and its patches before it is staged; raises if the engine
            cannot take them, which leaves the engine as it is. A ``ConfigurationError`` ends the follower.
        install: applies patches to the engine, in the thread that calls :meth:`bring`. If it raises, the engine counts
            as poisoned until all of the model was installed.
    """

    def __init__(
        self, check: Callable[[Cut, Sequence[Patch]], None], install: Callable[[Sequence[Patch]], None]
    ) -> None:
        self._check, self._install = check, install
        self._changed, self._is_bringing = threading.Condition(), False
        self._patches: Sequence[Patch] = ()
        self._staged: Cut | None = None
        self._wanted = ""  # weight version that the engine waits for
        self._is_promised = False  # the follower commits the staged version: bring waits for that
        self._is_due = False  # the staged version is to be installed now
        self._outcome: BaseException | None = None  # of the last installation
        self._refusal: tuple[Cut, Exception] | None = None  # of the version that came last
        self._held: Cut | None = None

    @property
    def held(self) -> Cut | None:
        """The version that the engine has; ``None`` before the first one, and while it may have a mixture."""
        return self._held

    # In the follower's thread

    def stage(self, cut: Cut, patches: Sequence[Patch]) -> None:
        """Keep the patches of a version until the engine wants one.

        Raises what ``check`` raises; :class:`CutDeclinedError` if the engine wants another version; and
        ``InterruptedError`` if the follower is closed.
        """
        try:
            self._check(cut, patches)
        except Exception as error:
            with self._changed:
                self._refusal = cut, error
            raise
        with self._changed:
            self._staged, self._patches, self._refusal = cut, patches, None
            self._changed.notify_all()
            while not self._wanted or is_past(cut.weight_version, self._wanted):
                self._wait()
            if self._held is not None and cut.weight_version != self._wanted:
                raise CutDeclinedError(cut.version)
            self._is_promised = True

    def commit(self, cut: Cut) -> None:
        """Have the engine's thread install the staged patches, and wait for that; raises if it has failed."""
        with self._changed:
            self._is_due = True
            self._changed.notify_all()
            while self._is_due:
                self._wait()
            if self._outcome is not None:
                raise RuntimeError(f"the engine could not install version {cut.version}: {self._outcome!r}")

    def abort(self) -> None:
        """Drop what is staged."""
        with self._changed:
            self._staged, self._patches, self._is_promised, self._is_due = None, (), False, False

    def _wait(self) -> None:
        if is_cancelled():
            raise InterruptedError("the follower is closed")
        self._changed.wait(_POLL_SECONDS)

    # In the engine's thread

    def bring(self, follower: Follower, wanted: str, seconds: float) -> Cut:
        """Install the version of this name (:attr:`Cut.weight_version`), and return it.

        An engine without a whole version first gets the one that is staged, whichever that is. One thread at a time
        installs versions; others wait for it.

        Raises:
            FollowerNotReadyError: the version does not come in ``seconds``, or the feed is past it.
            Exception: the error of ``install``. The engine may then have a mixture.
        """
        end = time.monotonic() + seconds
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_bringing, max(0.0, seconds)):
                raise FollowerNotReadyError(
                    f"weight version {wanted} is not here: another thread waits for a version, or installs one. Update "
                    "the engine from one thread at a time"
                )
            self._is_bringing, self._refusal = True, None  # the version is tried again
        try:
            while (patches := self._due(follower, wanted, end)) is not None:
                self._apply(patches)
            assert self._held is not None
            return self._held
        finally:
            with self._changed:
                self._wanted, self._is_bringing = "", False
                self._changed.notify_all()

    def _due(self, follower: Follower, wanted: str, end: float) -> Sequence[Patch] | None:
        """Wait for a version to install, and return its patches; ``None``: the engine has the one that is wanted."""
        with self._changed:
            while True:
                if self._held is not None and self._held.weight_version == wanted:
                    return None
                self._require_not_past(wanted)
                if self._is_due:
                    return self._patches
                left = end - time.monotonic() + (_COMMIT_SECONDS if self._is_promised else 0.0)
                refusal = self._refusal_of(wanted)
                if follower.is_over or refusal is not None or left <= 0:
                    over = "the follower is closed" if follower.is_over else ""
                    why = refusal or follower.error or over or "it has not come in the time that the engine waits"
                    raise FollowerNotReadyError(f"weight version {wanted} is not here: {why}") from refusal
                self._wanted = wanted
                self._changed.notify_all()
                self._changed.wait(min(left, _POLL_SECONDS))

    def _refusal_of(self, wanted: str) -> Exception | None:
        """Return why the version cannot be taken; a refusal of one before it says nothing of it."""
        if self._refusal is None or is_past(wanted, self._refusal[0].weight_version):
            return None
        return self._refusal[1]

    def _require_not_past(self, wanted: str) -> None:
        for cut in (self._held, self._staged):
            if cut is not None and is_past(cut.weight_version, wanted):
                raise FollowerNotReadyError(
                    f"weight version {wanted} is over: the engine can have {cut.weight_version}. Update every engine "
                    "before the next version is published, or ask for that one"
                )

    def _apply(self, patches: Sequence[Patch]) -> None:
        """Install the staged patches, and tell the follower's thread how that went."""
        cut, self._held, outcome = self._staged, None, None
        try:
            self._install(patches)
            self._held = cut
        except BaseException as error:
            outcome = error
            raise
        finally:
            with self._changed:
                self._staged, self._patches, self._outcome = None, (), outcome
                self._is_promised = self._is_due = False
                self._changed.notify_all()


def is_past(one: str, other: str) -> bool:
    """Tell whether the first of two weight versions is a later one of the same run and generation."""
    (history, _, mine), (other_history, _, theirs) = one.rpartition("/"), other.rpartition("/")
    return history == other_history and mine.isdecimal() and theirs.isdecimal() and int(mine) > int(theirs)
