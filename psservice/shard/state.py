"""What a shard is made of: the parts that every room of the engine works on, and nothing that they do."""

import logging
import threading
from collections.abc import Callable

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.wire.errors import ErrorCode, Rejected
from psservice.app.serving_clock import ServingClock
from psservice.cluster.drain_gate import DrainGate
from psservice.cluster.leases import Identity, Member, Membership
from psservice.cluster.run import Run
from psservice.model.buffers import BufferAverage
from psservice.model.image_budget import ImageBudget
from psservice.model.parameters import ModelShard
from psservice.model.training_mode import TrainingMode
from psservice.observability.metrics import Metrics
from psservice.policy.reply_mode import reply_rule
from psservice.recovery.capture import Content
from psservice.recovery.durability import Durability
from psservice.recovery.replayer import LogReplayer
from psservice.sampling.dataset import Datasets
from psservice.settings import ServerSettings
from psservice.shard.apply_thread import Writer
from psservice.storage.environment import Environment

log = logging.getLogger(__name__)


class ShardState:
    """One shard of one run.

    Args:
        settings: the server's.
        device: where the parameters live.
        metrics: told what happens.
        on_health: told ``False`` while pushes cannot be made durable.
        on_failure: called once, when a change has failed half-way and the process is to stop.
        environment: clocks, threads and files.

    Attributes:
        layout: the model's, from the first join on.
        model: this shard's part of it, from the upload on.
        buffers: their average; on shard 0 only, where the run has any.
        regime: what the run's method asks of the server.
        images: what images of workers' replicas may occupy.
        installing: whether another model is on its way in: who joins waits for it. Set under ``join_lock``.
        durable: whether pushes can be written down as promised.
        doorway: open unless the server is drained.
        join_lock: held while a worker joins, while ends of leases are written down, and while the model is replaced.

    Raises:
        StorageError: the data directory is in use, or cannot be written.
    """

    def __init__(
        self,
        settings: ServerSettings,
        device: torch.device,
        metrics: Metrics,
        on_health: Callable[[bool], None],
        on_failure: Callable[[], None],
        environment: Environment,
    ) -> None:
        """Begin empty."""
        self.settings, self.device, self.metrics = settings, device, metrics
        self.environment = environment
        self.doorway = DrainGate()
        self.is_coordinator = settings.shard_index == 0
        self.run = Run(
            settings.run_id,
            coordinator=self.is_coordinator,
            end_versions=settings.end_versions if self.is_coordinator else 0,
            end_samples=settings.end_samples if self.is_coordinator else 0,
        )
        self.membership = Membership(
            settings.lease_seconds,
            lambda: reply_rule(settings.down_mode, settings.exact_limit),
            on_expire=self._expired,
            clock=ServingClock(settings.lease_seconds / 4, environment.monotonic),
        )
        self.images = ImageBudget(settings.image_bytes)
        self.writer = Writer(settings.apply_queue_limit, metrics.queue_seconds.observe, on_failure, environment)
        self.model: ModelShard | None = None
        self.layout: ModelLayout | None = None
        self.buffers: BufferAverage | None = None
        self.datasets = Datasets()
        self.regime = TrainingMode()
        self.join_lock = threading.Lock()
        self.installing = False
        self.durable = True
        self._on_health = on_health
        self.persistence = Durability(settings, self._health_changed, environment)

    @property
    def span(self) -> Span:
        """What this shard owns; raises :class:`Rejected` (``NOT_INITIALISED``) before the first join."""
        if self.layout is None:
            raise Rejected(ErrorCode.NOT_INITIALISED, "no worker has joined yet, so the model is not known")
        return self.layout.shard_spans(self.settings.num_shards)[self.settings.shard_index]

    def is_alone(self, identity: Identity) -> bool:
        """Tell whether there is no model yet and nobody but this worker, so that it may change what was agreed on."""
        return (
            self.model is None
            and not self.installing
            and all(member.identity == identity for member in self.membership.members())
        )

    def require_model(self, generation: int | None) -> ModelShard:
        """Return the model; raises :class:`Rejected` where there is none, or one of another generation."""
        if self.model is None:
            raise Rejected(ErrorCode.NOT_INITIALISED, "no worker has uploaded a model yet")
        if generation is not None and generation != self.model.generation:
            raise Rejected(
                ErrorCode.STALE_GENERATION,
                f"the caller has generation {generation}, the server {self.model.generation}",
            )
        return self.model

    def content(self) -> Content:
        """Return what the shard holds; on the writer thread. Raises :class:`Rejected` where there is no model."""
        run = self.run
        return Content(self.require_model(None), self.buffers, self.datasets, run.run_id, run.state, run.samples)

    def adopt(self, history: LogReplayer) -> None:
        """Become what a history has been replayed to; before anything is served, or on the writer thread."""
        manifest = history.manifest
        self.layout, self.model, self.buffers = history.layout, history.model, history.buffers
        self.datasets = history.datasets
        self.run.restore(history.run_id, history.run_state, manifest.method, manifest.method_settings, history.samples)
        self.regime = TrainingMode.of(manifest.method_settings)
        live = [live.identity for live in history.workers.values()]
        for member in self.membership.restore(history.pushes, history.last_pushes, live):
            live_then = history.workers[member.identity.worker_id]
            member.index_codecs, member.clock = live_then.index_codecs, live_then.clock
            member.last_step = self.membership.record(member.identity).step
        self.metrics.version.set(history.model.version)
        self.metrics.live_workers.set(len(self.membership))

    def _health_changed(self, healthy: bool) -> None:
        self.durable = healthy
        self._on_health(healthy)

    def _expired(self, member: Member) -> None:
        self.persistence.events.left(member.identity)
        self.metrics.leases_expired.inc()
        log.warning(
            "lease ended: worker is taken for dead",
            extra={"worker": member.identity.worker_id, "last_step": member.last_step},
        )
