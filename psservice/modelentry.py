"""The model's way into a shard: a worker's upload, or a file or directory that the server was started with."""

import logging

import torch

from pscore.buffers import packed_bytes, unpack
from pscore.generation import epoch, next_generation
from pscore.layout import ModelLayout
from pscore.reasons import Reason, Refusal
from pscore.segment import Segment
from psservice import modelstart
from psservice.bounds import MOST_FIRST_VERSION
from psservice.buffers import BufferAverage
from psservice.membership import Identity
from psservice.shard.grouped import make_shard
from psservice.shard.model import ModelShard
from psservice.shardstate import ShardState
from psservice.uploadturn import UploadTurn

log = logging.getLogger(__name__)


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
        self.turn = UploadTurn(state.membership.is_live)
        self.start: modelstart.Start | None = None

    def read_start(self) -> None:
        """Read what the server was started with; a shard with a past of its own goes on from there instead.

        Raises:
            ModelFileError, StorageError: it cannot be read.
        """
        settings = self._state.settings
        if settings.init and self._state.model is None:
            self.start = modelstart.read(settings.init, settings.init_checkpoint)

    def check_upload(self, identity: Identity, generation: int) -> None:
        """Refuse an upload that would not be taken; called before its bytes are received, and again at the end."""
        state = self._state
        state.membership.require(identity)
        if state.model is not None and epoch(generation) == epoch(state.model.generation):
            raise Refusal(Reason.ALREADY_UPLOADED, "another worker has uploaded the model meanwhile")
        if state.is_coordinator:
            self.turn.require(identity, generation)
        if epoch(generation) <= (0 if state.model is None else epoch(state.model.generation)):
            raise Refusal(Reason.STALE_GENERATION, f"generation {generation} is older than what is here")

    def upload_buffer_bytes(self) -> int:
        """Bytes of buffers that an upload to this shard carries."""
        state = self._state
        if not state.is_coordinator or state.settings.buffers == "none" or state.layout is None:
            return 0
        return packed_bytes(state.layout.buffers)

    def finish_upload(
        self,
        identity: Identity,
        generation: int,
        version: int,
        segments: list[Segment],
        buffers: bytes,
        *,
        run_id: str,
    ) -> int:
        """Install an uploaded model (dense segments that cover the shard's span) and return its version.

        That is the one which the worker names, or less where counting on from there would come to an end.
        """
        version = min(version, MOST_FIRST_VERSION)
        flat = torch.cat([segment.values for segment in segments]) if segments else torch.empty(0)

        def install() -> int:
            with self._state.join_lock:
                self.check_upload(identity, generation)
                layout = self._state.layout
                assert layout is not None  # check_upload has found a member, who brought one
                specs = layout.buffers if self.upload_buffer_bytes() else ()
                state, before = self._state, self._state.run.run_id
                state.run.require_upload(run_id or before)
                state.run.follow(run_id)
                try:
                    self._install(layout, flat, unpack(buffers, specs), generation, version)
                except BaseException:
                    state.run.run_id = before
                    raise
                return version

        return self._state.writer.run(install)

    def install_start(self, layout: ModelLayout) -> None:
        """Install what the server was started with, in the first worker's layout; under ``state.join_lock``.

        Raises:
            Refusal: ``FINGERPRINT_MISMATCH``, where it does not fit; ``NOT_DURABLE``.
        """
        state, start = self._state, self.start
        assert start is not None
        flat, buffers = modelstart.fit(layout, start.tensors, with_buffers=state.settings.buffers != "none")
        state.layout = layout
        span = state.span
        self._install(
            layout,
            flat[span.start : span.end],
            buffers if state.is_coordinator else [],
            next_generation(0),
            start.version,
            start,
        )
        self.start = None

    def _install(
        self,
        layout: ModelLayout,
        flat: torch.Tensor,
        buffers: list[torch.Tensor],
        generation: int,
        version: int,
        start: modelstart.Start | None = None,
    ) -> None:
        state = self._state
        before = state.model, state.buffers, state.run.state
        state.model = make_shard(
            layout,
            state.span,
            flat.to(state.device, torch.float32).clone(),
            generation=generation,
            version=version,
            settings=state.settings.shard,
            regime=state.regime,
        )
        state.buffers = BufferAverage(layout.buffers, buffers) if buffers else None
        if start is not None:
            self._go_on_from(start, state.model)
        state.run.started()
        try:
            state.persistence.take_inside(state)
        except BaseException:
            state.model, state.buffers, state.run.state = before
            raise
        state.membership.reset_downlinks()
        self.turn.end()
        state.metrics.version.set(version)
        log.info("model installed", extra={"generation": generation, "version": version, "elements": state.span.length})

    def _go_on_from(self, start: modelstart.Start, model: ModelShard) -> None:
        """Take over how far another run had come, whatever its number of shards was."""
        state = self._state
        if state.is_coordinator:
            state.run.samples, state.datasets = start.samples, start.datasets
        if state.buffers is not None:
            state.buffers.weight = start.buffer_weight
        if any(memory.pieces for memory in start.memories):
            same_model = start.layout is not None and start.layout.fingerprint == model.layout.fingerprint
            if not (same_model and model.inherit(start.memories)):
                log.warning("the update rule begins anew: that of the --init run, or its order of tensors, is another")
