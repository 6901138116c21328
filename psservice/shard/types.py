"""Values that go into a shard's calls and come out of them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cluster.upload_grant import UploadGrant
from psservice.recovery.past_model import Start
from psservice.shard.upload import Upload


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
class Push:
    """A received push, not yet applied; segments in any order, disjoint, inside the shard's span.

    ``messages`` is the stream as it came, for the journal.
    """

    header: pb.PushHeader
    segments: list[SparseSlice]
    messages: Sequence[bytes] = ()


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
