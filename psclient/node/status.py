"""What a node's leader tells the other processes after each step: where the run is, or which error it met."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from psclient import errors
from psclient.errors import NodeBrokenError, SparsepsError
from psclient.optim.base import ParameterServerOptimizer
from psclient.report import StepReport, Totals


@dataclass(frozen=True)
class RemoteError:
    """An error as it travels.

    Attributes:
        kind: name of its class.
        message: its text.
        attributes: those of its attributes that are plain values.
    """

    kind: str
    message: str
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        """Describe an error."""
        plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
        return cls(type(error).__name__, str(error), plain)

    def again(self) -> SparsepsError:
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
    """What every process of a node knows.

    Attributes:
        version, finished, unfinished, live_workers, worker, run_id, server, report, totals: those of the leader's
            optimizer.
        defaults: its hyper-parameters.
        changed: which tensors it has changed: bit ``i`` stands for tensor ``i``.
        error: what it met; ``None`` where all went well.
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
    def of(cls, optimizer: ParameterServerOptimizer) -> "NodeStatus":
        """Look at the leader's optimizer."""
        return cls(
            optimizer.version,
            optimizer.finished,
            optimizer.unfinished,
            optimizer.live_workers,
            optimizer.worker,
            optimizer.run_id,
            optimizer.server,
            optimizer.report,
            replace(optimizer.totals),
            optimizer.defaults,
        )

    def encode(self) -> bytes:
        """Write it down."""
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
