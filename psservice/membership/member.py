"""A live worker."""

from dataclasses import dataclass

from psservice.replies.reply_session import ReplyMode, ReplySession
from psservice.state.workers import Worker
from psservice.values import Identity


@dataclass
class Member:
    """What a shard keeps of a worker for as long as the worker's lease lasts.

    Attributes:
        received_bytes: of streams, also of those that were cut.
        reply_density: density of the last reply.
        worker: what the journal knows of it.
        clock_moved: when the worker last pushed, or joined.
        interval_seconds: mean time between the worker's pushes; 0 before the second.
        first_batches: fingerprint of the worker's first batches; 0 if the worker has not sent one.
        batches_told: when the worker first sent that fingerprint.
        has_no_samples: the last lease of samples was empty and the worker holds none: rounds close without the worker.
    """

    worker: Worker
    downlink: ReplySession
    lease_end: float
    last_step: int = 0
    staleness: int = 0
    pushes: int = 0
    push_bytes: int = 0
    pull_bytes: int = 0
    received_bytes: int = 0
    samples: int = 0
    reply_mode: ReplyMode | None = None
    reply_density: float = 0.0
    clock_moved: float = 0.0
    interval_seconds: float = 0.0
    first_batches: int = 0
    batches_told: float = 0.0
    has_no_samples: bool = False

    @property
    def identity(self) -> Identity:
        """Whose lease it is."""
        return self.worker.identity

    @property
    def makes_pushes(self) -> bool:
        """Whether the others may have to wait for a push of this worker."""
        return not self.worker.wait and not self.has_no_samples
