"""What a node's leader sends to the other processes after each call: where the run is, or the error it met."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from psclient import errors
from psclient.errors import NodeBrokenError, SparsepsError
from psclient.optim.base import ParameterServerOptimizer
from psclient.report import StepReport, Totals

_COPIED = ("version", "finished", "unfinished", "live_workers", "worker", "run_id", "server", "report", "defaults")


@dataclass(frozen=True)
class RemoteError:
    """An error as it travels: the name of its class, its text, and those of its attributes that are plain values."""

    kind: str
    message: str
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """Describe an error."""
        plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
        return cls(type(error).__name__, str(error), plain)

    def rebuild(self) -> SparsepsError:
        """Return an error of the same class; :class:`NodeBrokenError` for one that is not this library's."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, SparsepsError)):
            return NodeBrokenError(f"the process that speaks to the server ended with {self.kind}: {self.message}")
        error: SparsepsError = kind.__new__(kind, self.message)  # each class has a constructor of its own
        error.args = (self.message,)
        vars(error).update(self.attributes)
        return error


@dataclass(frozen=True)
class NodeStatus:
    """What every process of a node knows: attributes of the leader's optimizer.

    Attributes:
        changed: which tensors the call has changed: bit ``i`` stands for tensor ``i``.
        error: what the call met; ``None`` where all went well.
    """

    version: int = 0
    finished: bool = False
    unfinished: bool = False
    live_workers: int = 0
    worker: str = ""
    run_id: str = ""
    server: str = ""
    report: StepReport = field(default_factory=lambda: StepReport(0))
    totals: Totals = field(default_factory=Totals)
    defaults: dict[str, Any] = field(default_factory=dict)
    changed: int = 0
    error: RemoteError | None = None

    @classmethod
    def of(cls, leader: ParameterServerOptimizer | None, changed: int, error: Exception | None) -> "NodeStatus":
        """Describe the leader's optimizer after a call; without one, only what came of the call."""
        told = None if error is None else RemoteError.of(error)
        if leader is None:
            return cls(changed=changed, error=told)
        copied = {name: getattr(leader, name) for name in _COPIED}
        return cls(**copied, totals=replace(leader.totals), changed=changed, error=told)

    def encode(self) -> bytes:
        """Return JSON."""
        plain = asdict(self) | {"changed": f"{self.changed:x}"}  # JSON's integers are not for thousands of bits
        return json.dumps(plain, default=float).encode()

    @classmethod
    def decode(cls, data: bytes) -> "NodeStatus":
        """Read what :meth:`encode` wrote."""
        plain = json.loads(data)
        plain["report"], plain["totals"] = StepReport(**plain["report"]), Totals(**plain["totals"])
        plain["changed"] = int(plain["changed"], 16)
        plain["error"] = plain["error"] and RemoteError(**plain["error"])
        return cls(**plain)
