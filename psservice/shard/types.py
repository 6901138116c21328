"""Values that go into a shard's calls and come out of them."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pscore.model.segment import Segment
from psservice.cluster.upload_grant import UploadGrant
from psservice.recovery.init_source import Start
from psservice.sampling.dataset import Share
from psservice.shard.upload import Upload
from psservice.types import Identity


@dataclass(frozen=True, slots=True)
class JoinOutcome:
    """The answer to a joining worker: ``state`` is ready, upload or wait; ``last_push`` is (incarnation, step)."""

    state: str
    generation: int
    version: int
    last_push: tuple[str, int] | None
    first_step: int = 1
    load_refused: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that a worker's script has loaded: its digest, and whether it replaces a trained one."""

    digest: bytes
    replaces: bool


@dataclass(frozen=True, slots=True)
class Push:
    """A received push, not yet applied; segments in any order, disjoint, inside the shard's span.

    ``messages`` is the stream as it came, for the journal; ``learning_rate`` is 0 where it is not known, ``group_rates``
    is empty for the rates agreed.
    """

    identity: Identity
    step: int
    generation: int
    base_version: int
    samples: int
    segments: list[Segment]
    messages: Sequence[bytes] = ()
    learning_rate: float = 0.0
    finished: Mapping[str, Share] = field(default_factory=dict)
    group_rates: Sequence[float] = ()
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """The model that a worker has uploaded: where its training began, and its digest."""

    generation: int
    version: int
    digest: bytes


@dataclass
class Uploads:
    """Where the shard's model comes from.

    Attributes:
        grant: which worker may upload; used under ``join_lock``.
        start: the ``--init`` model, until the first worker has brought a layout that fits.
        current: the unfinished upload; changed under ``lock``.
        origin: of the model that is installed.
    """

    grant: UploadGrant
    start: Start | None = None
    current: Upload | None = None
    origin: Origin | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes of an unfinished upload."""
        upload = self.current
        return 0 if upload is None else upload.nbytes
