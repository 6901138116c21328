"""Who calls, and what a role allows."""

from dataclasses import dataclass
from enum import IntEnum

from pscore.wire.errors import ErrorCode, Rejected


class Role(IntEnum):
    """What a caller may do; each role includes those before."""

    READER = 1
    WORKER = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls; ``worker`` is the only worker that the caller may be, empty for any.

    ``token`` names the token in the log, by the beginning of its hash: nobody can find the token by that.
    ``certificate`` is the name of the caller's certificate that gives the role. ``is_shard`` tells whether another
    shard calls.
    """

    role: Role
    worker: str = ""
    token: str = ""
    certificate: str = ""
    is_shard: bool = False

    def require_worker(self, worker_id: str) -> None:
        """Check that the caller may be this worker; raises :class:`Rejected` (``PERMISSION_DENIED``)."""
        if self.worker and self.worker != worker_id:
            proof = "certificate" if self.certificate else "token"
            raise Rejected(ErrorCode.PERMISSION_DENIED, f"the {proof} is that of another worker than {worker_id!r}")
