"""The model's way into a shard: a worker's upload, or a file or directory that the server was started with."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pscore.model.buffers import packed_bytes, unpack
from pscore.model.layout import ModelLayout
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import epoch, next_generation
from psservice.cluster.leases import Identity
from psservice.cluster.upload_grant import UploadTurn
from psservice.model.buffers import BufferAverage
from psservice.model.parameters import ModelShard
from psservice.model.wagma.replicas import make_shard
from psservice.recovery import init_source
from psservice.recovery.capture import Content
from psservice.shard.model_install import claim, install
from psservice.shard.state import ShardState
from psservice.shard.types import Loaded
from psservice.shard.upload import Upload

log = logging.getLogger(__name__)

MOST_FIRST_VERSION = 1 << 52
"""Highest version at which the count of an uploaded model begins: pushes then never reach the bound of versions."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What the server was started with, in a worker's layout: the whole model's values, and its buffers."""

    start: init_source.Start
    layout: ModelLayout
    flat: torch.Tensor
    buffers: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a worker has uploaded at the beginning of a training: where that began, and the model's digest."""

    generation: int
    version: int
    digest: bytes


class ModelEntry:
    """Decides which upload is taken, and installs models.

    Args:
        state: the shard.

    Attributes:
        turn: whose turn it is to upload; asked under ``state.join_lock``.
        start: what the server was started with (``--init``), until the first worker has brought a layout that fits.
    """

    def __init__(self, state: ShardState) -> None:
        """Begin with nothing; :meth:`read_start` comes when the shard has recovered what it has."""
        self._state = state
        self._idle_seconds = state.settings.stream_idle_seconds
        self.turn = UploadTurn(
            state.membership.is_live,
            lambda: state.membership.clock(),
            state.settings.lease_seconds,
            self._idle_seconds,
        )
        self.start: init_source.Start | None = None
        self._upload: Upload | None = None
        self._origin: _Origin | None = None
        self._lock = threading.Lock()  # of the upload's place

    def read_start(self) -> None:
        """Read what the server was started with; a shard with a past of its own goes on from there instead.

        Raises:
            ModelFileError, StorageError: it cannot be read.
        """
        settings = self._state.settings
        if settings.init and self._state.model is None:
            self.start = init_source.read(settings.init, settings.init_checkpoint)

    @property
    def upload_bytes(self) -> int:
        """What an unfinished upload occupies."""
        upload = self._upload
        return 0 if upload is None else upload.nbytes

    def open_upload(self, identity: Identity, generation: int, buffer_bytes: int) -> Upload:
        """Return the upload that a call goes on with: the one that has begun, or a new one in its place.

        Raises:
            Refusal: it would not be taken; ``BAD_REQUEST``, where the buffers are not as large as the model's.
        """
        state = self._state
        with self._lock:
            self._check_upload(identity, generation)
            if buffer_bytes != (expected := self._upload_buffer_bytes()):
                raise Rejected(
                    ErrorCode.BAD_REQUEST, f"{buffer_bytes} bytes of buffers declared, the model has {expected}"
                )
            upload, span = self._upload, state.span
            if upload is not None and (upload.identity, upload.generation, upload.span) == (identity, generation, span):
                return upload
            if upload is not None and epoch(generation) <= epoch(upload.generation) and self._moves(upload):
                raise Rejected(ErrorCode.STALE_GENERATION, "another worker uploads the model now")
            self._upload = Upload(identity, generation, span, buffer_bytes, lambda: state.membership.clock())
            return self._upload

    def began_as(self, loaded: Loaded) -> bool:
        """Tell whether the model that is here began as the one which a worker has loaded."""
        model, origin = self._state.model, self._origin
        return (
            model is not None
            and origin is not None
            and (model.generation, loaded.digest) == (origin.generation, origin.digest)
        )

    def takes(self, loaded: Loaded) -> bool:
        """Tell whether a model that a worker has loaded takes the place of the one that is here.

        It does where nobody has pushed to that one, which a worker has uploaded, or where the worker insists.
        """
        model, origin = self._state.model, self._origin
        if model is None or self.began_as(loaded):
            return False
        return loaded.replaces or (
            origin is not None and (model.generation, model.version) == (origin.generation, origin.version)
        )

    def _moves(self, upload: Upload) -> bool:
        membership = self._state.membership
        return membership.is_live(upload.identity) and membership.clock() - upload.moved < self._idle_seconds

    def forget_upload(self, identity: Identity | None = None) -> None:
        """Free the unfinished upload of a worker that has left, or one that nobody waits for: the shard has a model."""
        if identity is not None:
            self.turn.leave(identity)
        with self._lock:
            upload = self._upload
            if upload is None:
                return
            has_left = upload.identity == identity
            if has_left or (self._state.model is not None and not self._state.membership.is_live(upload.identity)):
                self._upload = None

    def _check_upload(self, identity: Identity, generation: int) -> None:
        """Refuse an upload that would not be taken; called before its bytes are received, and again at the end."""
        state = self._state
        state.membership.require(identity)
        if state.model is not None and epoch(generation) == epoch(state.model.generation):
            raise Rejected(ErrorCode.ALREADY_UPLOADED, "another worker has uploaded the model meanwhile")
        if state.is_coordinator:
            self.turn.require(identity, generation)
        if epoch(generation) <= (0 if state.model is None else epoch(state.model.generation)):
            raise Rejected(ErrorCode.STALE_GENERATION, f"generation {generation} is older than what is here")

    def _upload_buffer_bytes(self) -> int:
        """Bytes of buffers that an upload to this shard carries."""
        state = self._state
        if not state.is_coordinator or state.settings.buffers == "none" or state.layout is None:
            return 0
        return packed_bytes(state.layout.buffers)

    def finish_upload(self, upload: Upload, version: int, *, run_id: str, digest: bytes) -> int:
        """Install an uploaded model that is whole, and return its version.

        That is the one which the worker names; on the coordinator more, where the model before has come further; and
        less, where counting on from there would come to an end.
        """
        if self._state.is_coordinator and self._state.model is not None:  # a run's version does not go back
            version = max(version, self._state.model.version)
        version = min(version, MOST_FIRST_VERSION)
        try:
            self._finish_upload(upload, version, run_id, _Origin(upload.generation, version, digest))
        except BaseException:
            upload.reopen()
            raise
        with self._lock:
            if self._upload is upload:
                self._upload = None
        return version

    def _finish_upload(self, upload: Upload, version: int, run_id: str, origin: _Origin) -> None:
        state = self._state
        with state.join_lock:
            self._check_upload(upload.identity, upload.generation)
            state.run.require_upload(run_id or state.run.run_id)
            layout = state.layout
            assert layout is not None  # check_upload has found a member, who brought one
            claim(state)
        specs = layout.buffers if self._upload_buffer_bytes() else ()

        def make() -> Content:
            held = unpack(upload.buffers(), specs)
            average = BufferAverage(layout.buffers, held) if held else None
            model = self._model(layout, upload.values, upload.generation, version)
            run = state.run
            return Content(model, average, state.datasets, run.following(run_id), run.state_with_model, run.samples)

        def published() -> None:
            self._origin = origin if origin.digest else None
            self.turn.end()

        self._install(make, published)

    def fit_start(self, layout: ModelLayout) -> "Fitted | None":
        """Bring what the server was started with, if that is not installed yet, into a worker's layout.

        Raises:
            Refusal: ``FINGERPRINT_MISMATCH``, where it does not fit.
        """
        if self.start is None:
            return None
        with_buffers = self._state.settings.buffers != "none"
        return Fitted(self.start, layout, *init_source.fit(layout, self.start.tensors, with_buffers=with_buffers))

    def claim_start(self, fitted: "Fitted") -> None:
        """Claim the model's place; ``state.join_lock`` is held. :meth:`install_start` comes next, without it."""
        claim(self._state)
        self._state.layout, self.start = fitted.layout, None

    def install_start(self, fitted: "Fitted") -> None:
        """Install what the server was started with.

        Raises:
            Refusal: ``NOT_DURABLE``; the next worker's joining tries again.
        """
        state, start, layout = self._state, fitted.start, fitted.layout

        def make() -> Content:
            span = state.span
            average = BufferAverage(layout.buffers, fitted.buffers) if fitted.buffers and state.is_coordinator else None
            values = fitted.flat[span.start : span.end].clone()
            model = self._model(layout, values, next_generation(0), start.version)
            # How far another run had come, whatever its number of shards was.
            samples, datasets = state.run.samples, state.datasets
            if state.is_coordinator:
                samples, datasets = start.samples, start.datasets
            if average is not None:
                average.weight = start.buffer_weight
            if any(memory.pieces for memory in start.memories):
                same_model = start.layout is not None and start.layout.fingerprint == layout.fingerprint
                if not (same_model and model.inherit(start.memories)):
                    log.warning(
                        "the update rule begins anew: that of the --init run, or its order of tensors, is another"
                    )
            run = state.run
            return Content(model, average, datasets, run.run_id, run.state_with_model, samples)

        try:
            self._install(make, self.turn.end)
        except BaseException:
            self.start = start
            raise

    def _install(self, make: Callable[[], Content], published: Callable[[], None]) -> None:
        model = install(self._state, make, published).model
        log.info(
            "model installed",
            extra={"generation": model.generation, "version": model.version, "elements": model.span.length},
        )

    def _model(self, layout: ModelLayout, values: torch.Tensor, generation: int, version: int) -> ModelShard:
        state = self._state
        return make_shard(
            layout,
            state.span,
            values.to(state.device),
            generation=generation,
            version=version,
            settings=state.settings.shard,
            regime=state.regime,
        )
