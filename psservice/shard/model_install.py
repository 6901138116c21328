"""Putting another model in a shard's place: an upload, or the ``--init`` model.

The first snapshot of a model is on the disk before anybody is told of the model, and writing it takes as long as the
disk does. So nothing waits for it: the place is claimed under the join lock, the apply thread copies and then refuses
what comes (``BUSY``), the snapshot is written by the caller's thread, and the model is published in one step. Workers
that join meanwhile wait. A server that dies before the snapshot has its name recovers the state before; one that dies
after it recovers the new model.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pscore.model.buffers import packed_bytes, unpack
from pscore.model.layout import ModelLayout
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import epoch, next_generation
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.awaiting import NotYetError
from psservice.durability.capture import shard_kind
from psservice.durability.durability import Prepared
from psservice.durability.initial_model import InitialModel, fit
from psservice.model.buffers import BufferAverage
from psservice.model.parameters import ModelShard
from psservice.shard.shard import Shard
from psservice.shard.upload import Origin, Upload
from psservice.state.state import ShardState
from psservice.values import Identity

log = logging.getLogger(__name__)

_MOST_FIRST_VERSION = 1 << 52
"""Highest version at which the count of an uploaded model begins: pushes then never reach the bound of versions."""


# Claim, copy, write, publish


def claim(shard: Shard) -> None:
    """Claim the model's place; ``join_lock`` is held. Raises :class:`Rejected` (``BUSY``) if it is claimed."""
    require_unclaimed(shard)
    shard.installing = True


def require_unclaimed(shard: Shard) -> None:
    """Raise :class:`Rejected` (``BUSY``) if the model's place is claimed; ``join_lock`` is held."""
    if shard.installing:
        raise NotYetError(ErrorCode.BUSY, "another model is being installed", lambda: not shard.installing)


def install(shard: Shard, make: Callable[[], ShardState], published: Callable[[], None] = lambda: None) -> None:
    """Write the state of a claimed place, publish it, and free the claim (``NOT_DURABLE``: all goes on as before).

    ``make`` runs on the apply thread behind everything that was queued, ``published`` under the join lock at the end.
    """
    publish(shard, prepare(shard, make), published)


def prepare(shard: Shard, make: Callable[[], ShardState]) -> Prepared:
    """Write the state of a claimed place down; frees the claim if that fails."""
    try:
        return shard.durability.prepare(make)
    except BaseException:
        _free(shard)
        raise


def publish(shard: Shard, prepared: Prepared, published: Callable[[], None] = lambda: None) -> None:
    """Publish a prepared state, and free the claim; raises :class:`Rejected` (``NOT_DURABLE``)."""

    def serve(state: ShardState) -> None:
        with shard.join_lock:
            shard.serve(state)
            shard.leases.reset_downlinks()
            published()

    try:
        shard.durability.publish(prepared, serve)
    finally:
        _free(shard)
    model = prepared.state.model
    assert model is not None
    log.info(
        "model installed",
        extra={"generation": model.generation, "version": model.version, "elements": model.span.length},
    )


def abandon(shard: Shard, prepared: Prepared) -> None:
    """Go on as before :func:`prepare`, and free the claim."""
    try:
        shard.durability.abandon_prepared(prepared)
    finally:
        _free(shard)


def _free(shard: Shard) -> None:
    shard.installing = False
    shard.leases.waiters.wake(everyone=True)


def _make_model(
    shard: Shard, layout: ModelLayout, values: torch.Tensor, generation: int, version: int, first_version: int = 0
) -> ModelShard:
    return shard_kind(shard.state.mode)(
        layout,
        shard.span,
        values.to(shard.device),
        generation=generation,
        version=version,
        settings=shard.settings.shard,
        mode=shard.state.mode,
        clock=shard.environment.monotonic,
        first_version=first_version,
    )


# An upload


def open_upload(shard: Shard, identity: Identity, generation: int, buffer_bytes: int) -> Upload:
    """Return the upload that a call resumes, or a new one in its place; refuse before anything is received."""
    shard.drain_gate.require_open()
    uploads, clock = shard.uploads, shard.leases.clock
    with uploads.lock:
        _check_upload(shard, identity, generation)
        if buffer_bytes != (expected := _buffer_bytes(shard)):
            raise Rejected(ErrorCode.BAD_REQUEST, f"{buffer_bytes} bytes of buffers declared, the model has {expected}")
        upload, span = uploads.current, shard.span
        if upload is not None:
            if (upload.identity, upload.generation, upload.span) == (identity, generation, span):
                return upload
            moves = clock() - upload.moved < shard.settings.stream_idle_seconds
            is_newer = epoch(generation) > epoch(upload.generation)
            if not is_newer and moves and shard.leases.is_live(upload.identity):
                raise Rejected(ErrorCode.STALE_GENERATION, "another worker uploads the model now")
        dtype = shard.value_dtype
        uploads.current = Upload(identity, generation, span, dtype, buffer_bytes, lambda: shard.leases.clock())
        return uploads.current


def _check_upload(shard: Shard, identity: Identity, generation: int) -> None:
    """Refuse an upload that would not be installed; called before its bytes are received, and again at the end."""
    shard.leases.require(identity)
    ours = 0 if shard.model is None else epoch(shard.model.generation)
    if shard.model is not None and epoch(generation) == ours:
        raise Rejected(ErrorCode.ALREADY_UPLOADED, "another worker has uploaded the model meanwhile")
    if shard.is_coordinator:
        shard.uploads.require_grant(identity, generation)
    if epoch(generation) <= ours:
        raise Rejected(ErrorCode.STALE_GENERATION, f"generation {generation} is older than what is here")


def _buffer_bytes(shard: Shard) -> int:
    if not shard.is_coordinator or shard.settings.buffers == "none" or shard.state.layout is None:
        return 0
    return packed_bytes(shard.state.layout.buffers)


def upload_progress(shard: Shard) -> pb.ModelProgress | None:
    """Return the progress of a worker's upload, 1 while the model is installed; ``None`` if no worker uploads."""
    return shard.uploads.progress() or (pb.ModelProgress(share=1.0) if shard.installing else None)


def model_awaited(shard: Shard) -> tuple[int, bool]:
    """Return what becomes another when a model comes, or when the worker that was to bring it does not."""
    return 0 if shard.model is None else shard.model.generation, upload_progress(shard) is None


def forget_upload(shard: Shard, identity: Identity | None = None) -> None:
    """Free the unfinished upload of a worker that has left, or one that no worker resumes: the shard has a model."""
    uploads = shard.uploads
    if identity is not None:
        uploads.release_grant(identity)
    with uploads.lock:
        upload = uploads.current
        if upload is not None:
            is_needless = shard.model is not None and not shard.leases.is_live(upload.identity)
            if upload.identity == identity or is_needless:
                uploads.current = None


def finish_upload(shard: Shard, upload: Upload, version: int, *, run_id: str = "", digest: bytes = b"") -> int:
    """Install a whole upload, and return its version: at least the previous, at most ``_MOST_FIRST_VERSION``."""
    if shard.is_coordinator and shard.model is not None:  # a run's version does not go back
        version = max(version, shard.model.version)
    version = min(version, _MOST_FIRST_VERSION)
    if shard.is_coordinator and shard.model is None and version:
        log.warning(
            "shard 0 had lost its data, and a worker fills it: the run begins anew to count samples and to lease those "
            "of datasets, under a new id unless --run-id names one; earlier checkpoints cannot be restored",
            extra={"run": shard.run.run_id, "version": version},
        )
    try:
        with shard.join_lock:
            _check_upload(shard, upload.identity, upload.generation)
            shard.run.require_upload(run_id or shard.run.run_id)
            layout = shard.state.layout
            assert layout is not None  # the check has found a member, who brought one
            claim(shard)
        specs = layout.buffers if _buffer_bytes(shard) else ()

        def make() -> ShardState:
            values = unpack(upload.buffers(), specs)
            average = BufferAverage(layout.buffers, values) if values else None
            model = _make_model(shard, layout, upload.model.values, upload.generation, version)
            run = shard.run
            return shard.state.with_model(
                model,
                average,
                shard.state.datasets,
                run_id=run.adopted(run_id),
                run_state=run.state_with_model,
                samples=run.samples,
            )

        def published() -> None:
            shard.uploads.origin = Origin(upload.generation, version, digest) if digest else None
            shard.uploads.end_grant()

        install(shard, make, published)
    except BaseException:
        upload.is_whole = False
        raise
    with shard.uploads.lock:
        if shard.uploads.current is upload:
            shard.uploads.current = None
    return version


def began_as(shard: Shard, loaded: pb.LoadedModel) -> bool:
    """Tell whether the installed model began as the one that a worker has loaded."""
    model, origin = shard.model, shard.uploads.origin
    if model is None or origin is None:
        return False
    return (model.generation, loaded.digest) == (origin.generation, origin.digest)


def replaces(shard: Shard, loaded: pb.LoadedModel) -> bool:
    """Tell whether a model that a worker has loaded replaces the installed one.

    It does if no worker has pushed to that one, which a worker has uploaded, or if the worker insists.
    """
    model, origin = shard.model, shard.uploads.origin
    if model is None or began_as(shard, loaded):
        return False
    untouched = origin is not None and (model.generation, model.version) == (origin.generation, origin.version)
    return loaded.replaces or untouched


# The --init model


@dataclass(frozen=True, slots=True)
class FittedModel:
    """The ``--init`` model in a worker's layout: the whole model's values (fp32 ``[n]``), and its buffers."""

    initial: InitialModel
    layout: ModelLayout
    flat: torch.Tensor
    buffers: list[torch.Tensor]


def fit_initial(shard: Shard, layout: ModelLayout) -> FittedModel | None:
    """Bring the ``--init`` model, if not installed yet, into a worker's layout (``FINGERPRINT_MISMATCH``)."""
    initial = shard.uploads.initial
    if initial is None:
        return None
    with_buffers = shard.settings.buffers != "none"
    return FittedModel(initial, layout, *fit(layout, initial.tensors, with_buffers=with_buffers))


@contextmanager
def join_lock_with_initial(shard: Shard, layout: ModelLayout) -> Iterator[FittedModel | None]:
    """Hold ``join_lock``, and have the ``--init`` model of that moment in a worker's layout (``FINGERPRINT_MISMATCH``).

    All of a model is copied for that, so it is done before the lock is taken, and done again if the model was taken, or
    given back, meanwhile.
    """
    while True:
        fitted = fit_initial(shard, layout)
        with shard.join_lock:
            if shard.uploads.initial is (None if fitted is None else fitted.initial):
                yield fitted
                return


def install_initial(shard: Shard, fitted: FittedModel) -> None:
    """Install the ``--init`` model in the claimed place; after ``NOT_DURABLE`` the next worker's join tries again."""
    initial, layout = fitted.initial, fitted.layout

    def make() -> ShardState:
        span, run = shard.span, shard.run
        values, version = fitted.flat[span.start : span.end].clone(), initial.version
        model = _make_model(shard, layout, values, next_generation(0), version, first_version=version)
        average = None
        if fitted.buffers and shard.is_coordinator:
            average = BufferAverage(layout.buffers, fitted.buffers)
            average.weight = initial.buffer_weight
        if any(memory.pieces for memory in initial.memories):
            same_model = initial.layout is not None and initial.layout.fingerprint == layout.fingerprint
            if not (same_model and model.rule.import_portable(initial.memories)):
                log.warning("the update rule begins anew: that of the --init run, or its order of tensors, is another")
        # How far another run had come, whatever its number of shards was.
        samples, datasets = run.samples, shard.state.datasets
        if shard.is_coordinator:
            samples, datasets = initial.samples, initial.datasets
        return shard.state.with_model(
            model, average, datasets, run_id=run.run_id, run_state=run.state_with_model, samples=samples
        )

    try:
        install(shard, make, shard.uploads.end_grant)
    except BaseException:
        shard.uploads.initial = initial
        raise
