"""A shard: the parts of which it is composed, and the model that they work on.

What is done with a shard is in the files beside this one: joining, pushes, pulls, installing a model, the run's end.
"""

import threading
from collections.abc import Callable

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.selection import SELECTORS
from pscore.wire.codecs.names import VALUE_CODECS
from pscore.wire.errors import ErrorCode, Rejected
from psservice.apply_thread import ApplyThread
from psservice.cluster.dedup import Dedup
from psservice.cluster.drain_gate import DrainGate
from psservice.cluster.histories import Histories
from psservice.cluster.leases import Leases, ServingClock
from psservice.cluster.run import Run
from psservice.model.buffers import BufferAverage
from psservice.model.parameters import ModelShard
from psservice.model.topk import ImageBudget, TopKSettings
from psservice.model.training_mode import TrainingMode
from psservice.observability.metrics import Metrics
from psservice.policy.admission import Admission
from psservice.policy.reply_mode import ReplyRule
from psservice.policy.staleness import StalenessScaling
from psservice.recovery.capture import Content
from psservice.recovery.durability import Durability
from psservice.recovery.final_model import FinalModel, ModelCopy
from psservice.recovery.replayer import LogReplayer
from psservice.sampling.dataset import Datasets
from psservice.settings import ServerSettings
from psservice.shard.synchronizer import Synchronizer, synchronizer_for
from psservice.shard.upload import Uploads
from psservice.storage.environment import Environment
from psservice.types import Identity


class Shard:
    """One shard of one run; :func:`psservice.shard.lifecycle.open_shard` makes and recovers it (``StorageError``).

    Attributes:
        layout: the model's, from the first join on.
        synchronizer: has the model, and synchronizes the pushes to it; ``None`` before the upload.
        histories: of versions: the shard's own, and what it knows of the other shards'.
        buffers: their average; on shard 0 only, where the run has any.
        mode: what the run's method asks of the server.
        lease_ends: the thread that ends leases by the clock, once the shard is open.
        installing: whether another model is on its way in: joining workers wait for it. Set under ``join_lock``.
        join_lock: held while a worker joins, while ends of leases are journaled, and while the model is replaced.
    """

    def __init__(
        self,
        settings: ServerSettings,
        device: torch.device,
        metrics: Metrics,
        on_health: Callable[[], None],
        on_failure: Callable[[], None],
        environment: Environment,
    ) -> None:
        self.settings, self.device, self.metrics, self.environment = settings, device, metrics, environment
        self.drain_gate = DrainGate()
        self.is_coordinator = settings.shard_index == 0
        self.run = Run(
            settings.run_id,
            coordinator=self.is_coordinator,
            end_versions=settings.end_versions if self.is_coordinator else 0,
            end_samples=settings.end_samples if self.is_coordinator else 0,
        )
        self.leases = Leases(
            settings.lease_seconds,
            lambda: ReplyRule(settings.down_mode, settings.exact_limit),
            ServingClock(settings.lease_seconds / 4, environment.monotonic),
        )
        self.dedup = Dedup(self.leases)
        self.admission = Admission(
            settings.max_staleness, settings.ssp_bound if self.is_coordinator else 0, settings.max_update_norm
        )
        self.scaling = StalenessScaling(settings.staleness_step == "adaptive", settings.rescale_speed)
        self.topk = TopKSettings(
            settings.down_density,
            settings.down_dense_below,
            SELECTORS[settings.down_selector],
            VALUE_CODECS[settings.down_value_type],
            settings.chunk_bytes,
            ImageBudget(settings.image_bytes),
        )
        self.uploads = Uploads(self.leases, settings.stream_idle_seconds)
        self.final_model = FinalModel(settings.final_model, settings.shard_index, settings.num_shards, environment)
        self.apply_thread = ApplyThread(metrics.queue_seconds.observe, on_failure, environment)
        self.layout: ModelLayout | None = None
        self.synchronizer: Synchronizer | None = None
        self.buffers: BufferAverage | None = None
        self.datasets = Datasets()
        self.histories = Histories()
        self.mode = TrainingMode()
        self.join_lock = threading.Lock()
        self.stopping = threading.Event()
        self.lease_ends: threading.Thread | None = None
        self.installing = False
        self.durability = Durability(self, on_health)

    @property
    def span(self) -> Span:
        """The shard's part of the layout; raises :class:`Rejected` (``NOT_INITIALISED``) before the first join."""
        if (model := self.model) is not None:
            return model.span
        if self.layout is None:
            raise Rejected(ErrorCode.NOT_INITIALISED, "no worker has joined yet, so the model is not known")
        return self.layout.shard_spans(self.settings.num_shards)[self.settings.shard_index]

    @property
    def model(self) -> ModelShard | None:
        """The shard's part of the model, from the upload on."""
        return None if self.synchronizer is None else self.synchronizer.model

    def set_model(self, model: ModelShard) -> None:
        """Replace the model; while nothing is served, or the apply thread is held."""
        events = self.durability.events
        self.synchronizer = synchronizer_for(model, self.leases, events, self.apply_thread, self.metrics)
        self.metrics.version = model.version

    def is_alone(self, identity: Identity) -> bool:
        """Tell whether there is no model and no worker but this one, which may then change what was agreed on."""
        return (
            self.synchronizer is None
            and not self.installing
            and all(member.identity == identity for member in self.leases.members())
        )

    def require_synchronizer(self, generation: int | None) -> Synchronizer:
        """Return the synchronizer; raises :class:`Rejected` where there is no model, or one of another generation."""
        if self.synchronizer is None:
            raise Rejected(ErrorCode.NOT_INITIALISED, "no worker has uploaded a model yet")
        ours = self.synchronizer.model.generation
        if generation is not None and generation != ours:
            raise Rejected(ErrorCode.STALE_GENERATION, f"the caller has generation {generation}, the server {ours}")
        return self.synchronizer

    def require_model(self, generation: int | None) -> ModelShard:
        """Return the model; raises as :meth:`require_synchronizer`."""
        return self.require_synchronizer(generation).model

    def content(self) -> Content:
        """Return everything that is replaced with the model; on the apply thread. Raises :class:`Rejected`."""
        run = self.run
        model, histories = self.require_model(None), self.histories
        return Content(model, self.buffers, self.datasets, run.run_id, run.state, run.samples, histories)

    def adopt(self, history: LogReplayer) -> None:
        """Become what a history has been replayed to; before anything is served."""
        manifest, run = history.manifest, self.run
        self.layout, self.buffers, self.datasets = history.layout, history.buffers, history.datasets
        self.histories = history.histories
        run.run_id, run.state, run.samples = history.run_id, history.run_state, history.samples
        run.method, run.method_settings = manifest.method, manifest.method_settings
        self.mode = history.model.mode
        self.set_model(history.model)
        self.dedup.restore(history.pushes, history.last_pushes)
        for live in history.workers.values():
            member = self.leases.join(live.identity)
            member.index_codecs, member.clock = frozenset(live.index_codecs), live.clock
            member.last_step = self.dedup.record(member.identity).step

    def copy_model(self) -> ModelCopy:
        """Copy the shard's values at a version that is durable; the copy must be closed."""
        copy = self.apply_thread.run(self.copy_now)
        try:
            self.durability.events.wait()
        except BaseException:
            copy.close()
            raise
        return copy

    def copy_now(self) -> ModelCopy:
        """Copy the shard's values at the current version; on the apply thread. The copy must be closed."""
        return ModelCopy(self.require_model(None), self.buffers.state() if self.buffers else {})

    def close(self) -> None:
        """Finish what is committed and stop the threads; a state that a failed change has left is not kept."""
        self.stopping.set()
        if self.lease_ends is not None:
            self.lease_ends.join()  # or it would write behind the last snapshot
        self.durability.stop()
        self.apply_thread.close()
        if self.apply_thread.failed:
            self.durability.abandon()
        else:
            self.durability.close()
        self.final_model.wait()
