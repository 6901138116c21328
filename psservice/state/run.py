"""The run: its id, the settings that its workers agree on, and its end."""

import secrets
from collections.abc import Mapping
from enum import Enum

from pscore.names import shown
from pscore.wire.errors import ErrorCode, Rejected

MOST_COUNT = (1 << 63) - 1
"""Where sums end that are kept: what a snapshot's manifest and any client's signed integer can carry."""


def added(count: int, more: int) -> int:
    """Return a sum that ends at :data:`MOST_COUNT`, live and in a replay alike."""
    return min(count + more, MOST_COUNT)


class RunState(Enum):
    """Where a run is."""

    EMPTY = "empty"
    TRAINING = "training"
    FINISHED = "finished"


class Run:
    """One training run as one shard sees it; an end of 0 is none.

    Without ``run_id`` the coordinator, shard 0, draws one. Another shard learns it from shard 0, and adopts that of a
    model that is uploaded to it.
    """

    def __init__(self, run_id: str, *, coordinator: bool = True, end_versions: int = 0, end_samples: int = 0) -> None:
        self._adopts = not run_id and not coordinator
        self.run_id = run_id or (secrets.token_hex(4) if coordinator else "")
        self.end_versions, self.end_samples = end_versions, end_samples
        self.has_end = bool(end_versions or end_samples)
        self.state = RunState.EMPTY
        self.samples = 0
        self.method = ""
        self.method_settings: dict[str, str] = {}

    @property
    def is_finished(self) -> bool:
        """Whether it is over."""
        return self.state is RunState.FINISHED

    @property
    def state_with_model(self) -> RunState:
        """Its state once there is a model; a finished run stays finished."""
        return RunState.TRAINING if self.state is RunState.EMPTY else self.state

    def require_id(self, run_id: str, *, may_be_empty: bool = False) -> None:
        """Raise :class:`Rejected` (``RUN_MISMATCH``) if a caller names another run than one that is known here."""
        if (may_be_empty and not run_id) or (self._adopts and not self.run_id):
            return
        if run_id != self.run_id:
            raise Rejected(
                ErrorCode.RUN_MISMATCH,
                f"the caller belongs to run {shown(run_id)!r}, this server to {shown(self.run_id)!r}",
            )

    def require_upload(self, run_id: str) -> None:
        """Raise :class:`Rejected` (``RUN_MISMATCH``) if an upload names a run that this shard may not adopt."""
        if not self._adopts:
            self.require_id(run_id)

    def adopted(self, run_id: str) -> str:
        """Return the run's id once a model has brought ``run_id``."""
        return run_id if self._adopts and run_id else self.run_id

    def agree(self, method: str, settings: Mapping[str, str]) -> None:
        """Adopt a worker's method as the run's."""
        self.method, self.method_settings = method, dict(settings)

    def require_method(self, method: str, settings: Mapping[str, str]) -> None:
        """Raise :class:`Rejected` (``SETTINGS_MISMATCH``) if a worker trains otherwise than the run."""
        if method != self.method:
            raise Rejected(
                ErrorCode.SETTINGS_MISMATCH,
                f"the worker trains with {shown(method)!r}, the run with {shown(self.method)!r}",
                setting="method",
            )
        for name in sorted({*settings, *self.method_settings}):
            mine, theirs = self.method_settings.get(name, "unset"), settings.get(name, "unset")
            if mine != theirs:
                raise Rejected(
                    ErrorCode.SETTINGS_MISMATCH,
                    f"the worker has {shown(name)} = {shown(theirs)}, the run {shown(name)} = {shown(mine)}",
                    setting=shown(name),
                )

    def require_open(self) -> None:
        """Raise :class:`Rejected` (``RUN_FINISHED``) if the run is over."""
        if self.is_finished:
            raise Rejected(ErrorCode.RUN_FINISHED, f"run {self.run_id!r} is over")

    def is_over(self, version: int) -> bool:
        """Tell whether the counts have reached the run's end."""
        return bool(
            (self.end_versions and version >= self.end_versions)
            or (self.end_samples and self.samples >= self.end_samples)
        )
