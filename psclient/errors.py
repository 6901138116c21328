"""Every error that this library raises, and the one place where a gRPC status becomes one of them.

Each message says what happened and what to do next. All derive from :class:`SparsepsError`, and each from the built-in
error that a caller would expect too.
"""

import re
from collections.abc import Sequence
from typing import ClassVar

import grpc

from pscore.names import escaped, shown
from pscore.net.channels import NO_ANSWER, advice
from pscore.net.proxies import told_of_proxy
from pscore.wire.errors import ErrorCode, Rejected, details_of

START_FIRST = "Start the server first, or raise PSCLIENT_CONNECT_SECONDS"
STEP_AGAIN = "Nothing is lost: call step() again, or raise PSCLIENT_PATIENCE_SECONDS"


class SparsepsError(Exception):
    """Base of all errors of this library."""


class ConfigurationError(SparsepsError, ValueError):
    """The optimizer was given something that cannot work; the message says what."""


class HyperparameterError(ConfigurationError):
    """A hyper-parameter is out of its range; nothing was sent or changed.

    Attributes:
        name: of the hyper-parameter, its key in the param group.
        group: the number of the param group; -1 for a value that is not a group's yet.
    """

    def __init__(self, name: str, value: object, bound: str, group: int = -1) -> None:
        if group < 0:
            super().__init__(f"{name} must be {bound}, not {value!r}")
        else:
            super().__init__(
                f"{name} of param group {group} is {value!r}, and must be {bound}. Nothing was sent or changed: look "
                "at what sets it (a schedule that divides by zero, say), set it right, and call step() again"
            )
        self.name, self.group = name, group


class UnknownArgumentError(ConfigurationError, TypeError):
    """An optimizer was given a keyword argument that it does not have."""


class CopyRefusedError(SparsepsError, TypeError):
    """An optimizer was copied or pickled: it is one worker's place in a run, and there is one of it."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"this {kind} is one worker's place in a run and cannot be copied or pickled; to keep its residuals, copy "
            "or save optimizer.state_dict(); to train another model or in another process, make a new optimizer there"
        )


class ModelChangedError(SparsepsError, RuntimeError):
    """The model is no longer the one that the optimizer was made for; nothing was sent.

    Attributes:
        tensor: name of the first tensor concerned.
    """

    def __init__(self, tensor: str, what: str, advice: str) -> None:
        super().__init__(f"{tensor!r} {what}; {advice}")
        self.tensor = tensor


class ModelLoadedError(ModelChangedError):
    """A model was loaded into the worker, and the server's has been trained: one of the two is to stay."""

    def __init__(self, tensor: str, run_id: str, version: int) -> None:
        super().__init__(
            tensor,
            f"was written to since the last reply (by load_state_dict, say), and run {shown(run_id)} has been trained, "
            f"to version {version}",
            'to go on with the server\'s model, pass on_load="server" to the optimizer (PSCLIENT_ON_LOAD), or call '
            'optimizer.pull() now; to put this one in its place for all workers, pass on_load="replace"',
        )


class PatienceError(SparsepsError, OSError):
    """The time that a call may take is over. The optimizer stays usable: the next ``step()`` goes on.

    Attributes:
        address: which server.
        seconds: how long it was tried.
    """

    _text: ClassVar[str]

    def __init__(self, address: str, seconds: float, why: str, hint: str) -> None:
        super().__init__(self._text.format(address=address, seconds=seconds, why=why, hint=hint))
        self.address, self.seconds = address, seconds


class ServerUnreachableError(PatienceError, ConnectionError):
    """A server did not answer within the patience. The optimizer stays usable: the next ``step()`` goes on."""

    _text = (
        "{address} did not answer for {seconds:.0f} s: {why}; check that `psservice serve` or `psservice relay` runs "
        "there and that the address can be reached. {hint}"
    )


class HandshakeError(ServerUnreachableError):
    """A server, or something else, listens at an address, and the two cannot speak: TLS, certificates, another port."""

    _text = "{address} cannot be spoken to for {seconds:.0f} s: {why}; {hint}"


class WrongShardError(ServerUnreachableError):
    """The server at an address is another shard than it was taken for, or one of a run with another number of shards.

    Shards that change places are found again; a run that was started again with another number of shards is not.
    """

    _text = (
        "{address} has been the wrong server for {seconds:.0f} s: {why}; name every shard's address once, in order. "
        "{hint}"
    )


class HeldBackError(PatienceError, TimeoutError):
    """Slower workers have held this one back for longer than its patience: a bound on leads, or a synchronous round.

    The server answers, so this is no :class:`ServerUnreachableError`. The optimizer stays usable, and the next
    ``step()`` goes on.
    """

    _text = (
        "waited {seconds:.0f} s for slower workers ({address}: {why}); look after the slowest one, or allow more: a "
        "larger --ssp-bound, or psclient.Rounds with a quorum or a time limit. {hint}"
    )


class EpochHeldUpError(SparsepsError, TimeoutError):
    """Other workers hold samples and have finished none of them for a long time.

    Attributes:
        epoch: the epoch of the samples, or an earlier one.
        samples: how many they hold.
    """

    def __init__(self, epoch: int, samples: int, seconds: float) -> None:
        super().__init__(
            f"other workers hold {samples} samples up to epoch {epoch} and do not finish them, {seconds:.0f} s long; "
            "stop those that hang (`psservice status` shows each worker's last step), or raise "
            "PSCLIENT_PATIENCE_SECONDS. Nothing is lost: iterate again to go on"
        )
        self.epoch, self.samples = epoch, samples


class WorkersStillTrainingError(SparsepsError, TimeoutError):
    """Other workers are not through within the time that ``wait_for_all()`` was given; the optimizer stays usable.

    Attributes:
        workers: their names.
        seconds: how long this worker has waited.
    """

    def __init__(self, workers: Sequence[str], seconds: float) -> None:
        self.workers, self.seconds = tuple(workers), seconds
        names = ", ".join(shown(each) for each in self.workers)
        super().__init__(
            f"not through after {seconds:.0f} s: {names}; call wait_for_all() again to wait longer, or go on with the "
            "model as it is: pull() brings it. `psservice status` says how far each worker is"
        )


class FollowerNotReadyError(SparsepsError, TimeoutError):
    """A follower has no whole model, or not the version that was asked for; the message says why, if that is known."""


class RolledBackError(SparsepsError, RuntimeError):
    """The server has an older model than the follower, or that of another run, and the follower keeps its own."""


class EngineError(SparsepsError, RuntimeError):
    """An engine of inference did not take a version; it keeps the one before, or is to be updated before it serves.

    Attributes:
        url: of the engine's server.
    """

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{url}: {why}")
        self.url = url


class ServerNotReadyError(SparsepsError, RuntimeError):
    """The server answers, but has no model, and another worker that should upload it does not finish."""


class ServerFaultError(SparsepsError, RuntimeError):
    """The server failed in a way that it should not, or answered against the protocol; its log has more."""


class FingerprintMismatchError(SparsepsError, ValueError):
    """This worker's model differs from the run's.

    Attributes:
        tensor: name of the first tensor that differs.
    """

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


class SettingsMismatchError(SparsepsError, ValueError):
    """This worker trains with another method or other settings than the run."""


class WorkerAliveError(SparsepsError, RuntimeError):
    """Another living worker has the same name; give each worker its own (``worker=`` or ``PSCLIENT_WORKER``)."""


class LeaseLostError(SparsepsError, ConnectionError):
    """The lease was lost and could not be had again."""


class RunFinishedError(SparsepsError, RuntimeError):
    """The run is over: leave the training loop when ``optimizer.finished`` is true."""


class RefusedError(SparsepsError, RuntimeError):
    """The server refused a call for a reason that trying again cannot mend; nothing was applied.

    Attributes:
        reason: the reason's name, as in the protocol.
    """

    def __init__(self, refusal: Rejected) -> None:
        super().__init__(str(refusal))
        self.reason = refusal.reason.name


class NonFiniteGradientError(SparsepsError, FloatingPointError):
    """A gradient is infinite or not a number; nothing was sent.

    Nothing was changed either, but with ``overlap=True``: gradients that backward had handed over before stay in the
    residuals, and go with the next push.

    Attributes:
        parameter: its name.
    """

    _text: ClassVar[str] = (
        "the gradient of {!r} is not finite; nothing was sent. Lower the learning rate, clip the gradient, or scale "
        "the loss with torch.amp.GradScaler"
    )

    def __init__(self, parameter: str) -> None:
        super().__init__(self._text.format(parameter))
        self.parameter = parameter


class UpdateOverflowError(NonFiniteGradientError, OverflowError):
    """The gradients are finite, and an update is not; nothing was sent.

    A residual has left the range of fp32; or a residual, a momentum or (with weight decay) a parameter had NaN before,
    because the script wrote to it. The entries concerned are cleared in residual and momentum. What else the step has
    added stays in the residuals, so go on with the next batch: calling ``step()`` again with the same gradients would
    add them twice.
    """

    _text = (
        "the update of {!r} has left the range of fp32, or is not a number because its residual, its momentum or the "
        "parameter is not; nothing was sent. Entries that are not finite were cleared, and what else this step has "
        "added stays in the residuals. Lower the learning rate or clip the gradient, look at what writes to the "
        "optimizer's state or the model, and go on with the next batch"
    )


class AccessError(SparsepsError, PermissionError):
    """The server does not let this caller in: no token, a wrong one, or one for something else."""


class EvictedError(SparsepsError, PermissionError):
    """An operator has evicted this worker and keeps it out for a time (`psservice evict --ban-seconds`).

    Nothing is lost or counted twice: a push that is under way stays unacknowledged, and the first ``step()`` after
    that time sends it again. The optimizer stays usable.

    Attributes:
        seconds: until the worker may come back.
    """

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(
            f"{why}; end this worker, or wait that long and call step() again: nothing is lost. "
            "`psservice evict` with --ban-seconds 0 lets it in at once"
        )
        self.seconds = seconds


class RankLostError(SparsepsError, ConnectionError):
    """Another rank of a publisher's group is gone, or silent for too long; this publisher cannot go on."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; look at the first error in the ranks' logs. Readers have the version before, or this one; make a "
            "new publisher on every rank"
        )


class NodeBrokenError(SparsepsError, ConnectionError):
    """Another process of this node is gone, or silent for too long; this one's optimizer cannot go on."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; look at the first error in the node's logs. End this process, so that the launcher (torchrun) "
            "starts the whole node again: the server keeps the model, and other nodes train on"
        )


class Transient(Exception):  # noqa: N818 - never leaves the library: it is answered with another attempt
    """A call failed in a way that trying again may mend.

    ``retry_seconds`` and ``reason`` are the server's, if there are any. ``lost``: the server may be at another
    address now. ``advice`` says what to change, if the two cannot speak. ``code``: of the call, without a reason.
    """

    def __init__(
        self,
        why: str,
        retry_seconds: float | None = None,
        reason: ErrorCode | None = None,
        *,
        lost: bool = False,
        advice: str = "",
        code: grpc.StatusCode | None = None,
    ) -> None:
        super().__init__(why)
        self.retry_seconds, self.reason, self.lost, self.advice = retry_seconds, reason, lost, advice
        self.code = code


_LOST = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
"""Nobody answers: the server may be somewhere else by now."""

_TRANSIENT = _LOST | {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN}

_HELD_BACK = frozenset({ErrorCode.TOO_FAR_AHEAD, ErrorCode.ROUND_OPEN})

_LATER = _HELD_BACK | {ErrorCode.BUSY, ErrorCode.DRAINING, ErrorCode.NOT_DURABLE, ErrorCode.NO_STANDBY}
"""Reasons for which the same call will do later."""


_ELSEWHERE = frozenset({ErrorCode.SHARD_MISMATCH, ErrorCode.STANDBY, ErrorCode.REPLACED})
"""Reasons of a server that is not, or no longer, the one that is looked for: it may be at another address."""


REJOIN_REASONS = frozenset(
    {
        ErrorCode.LEASE_EXPIRED,
        ErrorCode.STALE_GENERATION,
        ErrorCode.RUN_MISMATCH,
        ErrorCode.NOT_INITIALISED,
        ErrorCode.VERSION_IN_FUTURE,
    }
)
"""Refusals after which a worker joins again; all but the first mean that the server's training is another one."""


def from_rpc_error(error: grpc.RpcError, address: str = "") -> Exception:
    """Say what a failed call means: :class:`Rejected`, a :class:`Transient`, or an error that ends the attempts.

    ``address`` is the one that was called, ``HOST:PORT``, for a word on a proxy.
    """
    code, detail = error.code(), escaped(error.details() or "")
    found = details_of(error)
    reason, retry_seconds = found.reason, found.retry_seconds
    if reason in _LATER:
        return Transient(detail, retry_seconds, reason)
    # Denied access is no Rejected: it says nothing about what became of an earlier attempt.
    if reason in (ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED):
        return AccessError(detail)
    if reason is not None:
        detail = detail.removesuffix(f" ({reason.name}: {reason.advice})")
    if reason is ErrorCode.EVICTED:
        return EvictedError(detail, retry_seconds or 0.0)
    if reason in _ELSEWHERE:
        return Transient(detail, reason=reason, lost=True)  # another server's answer, and no Rejected either
    if reason is not None:
        return Rejected(reason, detail, retry_seconds=retry_seconds, **found.metadata)
    if code in _TRANSIENT:
        via = told_of_proxy(address) if address and code in NO_ANSWER else ""
        return Transient(f"{code.name}: {detail}{via}", lost=code in _LOST, advice=advice(detail), code=code)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        detail += "; is this the port for workers (--listen), or that of the health check?"
    return ServerFaultError(f"the server answered {code.name}: {detail}")


def out_of_patience(address: str, seconds: float, last: Transient, hint: str) -> PatienceError:
    """Return the error of an undertaking whose last attempt, after ``seconds`` in all, has failed like this."""
    if last.advice:
        return HandshakeError(address, seconds, str(last), last.advice)
    kind: type[PatienceError] = HeldBackError if last.reason in _HELD_BACK else ServerUnreachableError
    if last.reason is ErrorCode.SHARD_MISMATCH:
        kind = WrongShardError
    return kind(address, seconds, str(last), hint)


_UNNAMED = re.compile(r"parameter_\d+")

_NAME_ANEW = (
    "give each worker its own name (worker= or PSCLIENT_WORKER), or stop the other one. Without a name, a worker's is "
    "its place in its job, such as rank-0; if two jobs train at one server, name those of one of them: "
    'worker=f"second-{psclient.worker_index()}"'
)

_KINDS: dict[ErrorCode, type[SparsepsError]] = {
    ErrorCode.SETTINGS_MISMATCH: SettingsMismatchError,
    ErrorCode.LEASE_EXPIRED: LeaseLostError,
    ErrorCode.RUN_FINISHED: RunFinishedError,
    ErrorCode.NOT_INITIALISED: ServerNotReadyError,
}


def from_refusal(refusal: Rejected) -> SparsepsError:
    """Return the error that a caller sees for a refusal that nobody handled."""
    reason, text = refusal.reason, f"{refusal.detail}; {refusal.reason.advice}"
    if reason in _KINDS:
        return _KINDS[reason](text)
    if reason is ErrorCode.WORKER_ALIVE:
        return WorkerAliveError(f"{refusal.detail}; {_NAME_ANEW}")
    if reason is not ErrorCode.FINGERPRINT_MISMATCH:
        return RefusedError(refusal)
    if _UNNAMED.search(refusal.detail):
        text += "; a worker without model= has called its tensors by their position: pass model= on every one"
    return FingerprintMismatchError(text, refusal.metadata.get("tensor", ""))
