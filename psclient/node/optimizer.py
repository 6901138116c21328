"""A node as one worker: its processes average gradients among themselves, and its leader calls the server.

The leader, rank 0 of the node's group, owns the optimizer that has joined; the others own the same param groups and
nothing else. Every call that reaches the server is made by all of them together::

    every process   the call's name, its own samples    ──▶  all
    leader          the call itself                          (the others wait)
    leader          where the run is, or the error      ──▶  the others, who raise it too
    leader          the tensors that have changed       ──▶  the others

So after each call all have the same parameters, and the same error if there is one.
"""

import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NoReturn, Self, SupportsIndex

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from psclient import settings as client_settings
from psclient.compress.gradients import PushedGradients, gather
from psclient.compress.groups import ParamGroups
from psclient.engine.sample_counter import SampleCounter
from psclient.engine.state import split
from psclient.errors import (
    ConfigurationError,
    CopyRefusedError,
    ModelChangedError,
    NodeBrokenError,
    SparsepsError,
    WorkersStillTrainingError,
)
from psclient.model.module import describe
from psclient.model.replica import Replica
from psclient.node.comm import NodeComm, NodeStatus
from psclient.node.group import leader_settings, unwrap_ddp
from psclient.optim.arguments import Params, check_added, check_params, check_seconds, check_step, split_model
from psclient.optim.base import ParameterServerOptimizer
from psclient.report import StepReport, Totals
from psclient.settings import ClientSettings, Server


class _Call(IntEnum):
    """A call that all processes of a node make; ``NOTHING`` if one of them cannot."""

    NOTHING = 0
    JOIN = 1
    STEP = 2
    FLUSH = 3
    PULL = 4
    WAIT = 5


_WAIT_SECONDS = 30.0  # of one call that waits for other workers: the processes of a node wait less long for one another


def _of_leader(name: str, documentation: str) -> Any:
    """Return a property: an attribute of the leader's optimizer after the last call."""
    return property(lambda node: getattr(node._status, name), doc=documentation)


class NodeOptimizer(Optimizer):
    """One worker of several processes; made, stepped and pulled by all processes of a node together.

    >>> ddp = DistributedDataParallel(model, process_group=psclient.node_group())
    >>> optimizer = psclient.NodeOptimizer(psclient.DGS, model.parameters(), lr=0.1, model=ddp, server="host:50051")

    Args:
        method: a training method, as ``psclient.DGS``; only the leader makes one.
        params: parameters, param groups, or a model and then also ``model``; the same on every process.
        model: the module, or the ``DistributedDataParallel`` around it, whose process group is then the node's.
        group: the processes of this node; the default group if neither this nor a DDP says otherwise.
        server: as for the method, without ``"local"``.
        worker: the node's name; by default the leader's place in the job.
        settings: everything else about the connection.
        timeout_seconds: how long a process of the node may let the others wait; by default what the settings give the
            leader to wait for a server, three times over, and a minute.
        **options: the method's own arguments, as ``lr``.

    Raises:
        SparsepsError: as the method does, on every process.
        NodeBrokenError: another process of this node is gone or silent.
    """

    def __init__(
        self,
        method: Callable[..., ParameterServerOptimizer],
        params: Params,
        *,
        model: torch.nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
        server: Server | None = None,
        worker: str | None = None,
        settings: ClientSettings | None = None,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> None:
        if options.get("overlap"):
            raise ConfigurationError(
                "overlap=True sends gradients when they come out of backward(), which is before DDP has averaged them "
                "over the node; leave it out with NodeOptimizer"
            )
        if isinstance(params, Optimizer):
            raise ConfigurationError(
                "NodeOptimizer takes parameters; psclient.Outer and WAGMA, which take an optimizer, are not for it"
            )
        params, model = split_model(params, model)
        module, group = unwrap_ddp(model, group)
        resolved = leader_settings(client_settings.resolve(settings, server, worker), group)
        self._status = NodeStatus()
        self._own: ParameterServerOptimizer | None = None
        self._joined = False
        super().__init__(check_params(params), {})
        self._model = describe(module, self.param_groups, upload_frozen=resolved.upload_frozen)
        self._interrupted = PushedGradients()  # on every process, as each has to know whether to call a closure
        self._loss: Any = None
        self._uncounted = 0
        self._closed = False
        patience = max(resolved.connect_seconds, resolved.patience_seconds)
        seconds = timeout_seconds or 3 * patience + 60
        self._comm, self._wait_seconds = NodeComm(group, seconds), min(_WAIT_SECONDS, seconds / 2)
        self._replica = Replica(self._model.layout, self._model.parameters)
        self._samples = SampleCounter(model) if model is not None else None
        if self._samples is not None:
            weakref.finalize(self, self._samples.close)

        def join(_: int) -> None:
            self._own = method(self.param_groups, model=module, settings=resolved, **options)
            self._own._gradients_are_its_own = True  # the node's, which pushes them once

        try:
            self._call(_Call.JOIN, int.from_bytes(self._model.layout.fingerprint[:6]), join)
        except BaseException:
            self.close()
            raise
        self._joined = True
        self._share()

    # What a training loop uses

    @property
    def leads(self) -> bool:
        """Whether this process calls the server."""
        return self._comm.is_leader

    report: StepReport = _of_leader("report", "The report of the node's last step.")
    totals: Totals = _of_leader("totals", "Sums over all steps of the node.")
    version: int = _of_leader("version", "The coordinator's version that this node has seen: updates from all workers.")
    finished: bool = _of_leader("finished", "True once the run is over, on all processes after the same step.")
    live_workers: int = _of_leader("live_workers", "Workers alive, as last heard; a node is one.")
    worker: str = _of_leader("worker", "The node's name.")
    run_id: str = _of_leader("run_id", "The run's id.")
    server: str = _of_leader("server", "The addresses of the shards, separated by commas.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Push the node's update and bring the parameters of all its processes up to the server's.

        Args:
            closure: recomputes the loss; see :meth:`ParameterServerOptimizer.step`.
            samples: how many samples this process has contributed; counted at the calls of ``model`` if not given.

        Returns:
            What the closure returned.

        Raises:
            SparsepsError: the leader's error, on every process.
            NodeBrokenError: another process of this node is gone or silent.
        """
        check_step(closure, samples)
        if closure is not None and not self._interrupted.matches(self._gradients()):
            with torch.enable_grad():
                self._loss = closure()
        if samples is None:
            samples = self._uncounted = self._uncounted + (self._samples.take() if self._samples is not None else 1)
        before = self.totals.samples
        try:
            self._call(_Call.STEP, samples, lambda total: self._leader.step(samples=total))
        except BaseException:
            if self.totals.samples != before:  # else they were not pushed, and count with the next step
                self._uncounted = 0
            if self._status.unfinished:
                self._interrupted.note(self._gradients())
            raise
        self._interrupted.clear()
        self._uncounted = 0
        loss, self._loss = self._loss, None
        return loss

    @torch.no_grad()
    def flush(self) -> None:
        """Push the leader's residuals; see the method's ``flush()``."""
        self._call(_Call.FLUSH, 0, lambda _: self._leader.flush())

    @torch.no_grad()
    def pull(self) -> None:
        """Make the parameters the server's without pushing; see :meth:`ParameterServerOptimizer.pull`."""
        self._call(_Call.PULL, 0, lambda _: self._leader.pull())

    def log_loss(self, loss: float | torch.Tensor) -> None:
        """Show the leader's loss; see :meth:`ParameterServerOptimizer.log_loss`. Other processes may call it too."""
        if self._own is not None:
            self._own.log_loss(loss)

    @torch.no_grad()
    def wait_for_all(self, seconds: float = 3600.0) -> None:
        """Wait until every live worker is through; see :meth:`ParameterServerOptimizer.wait_for_all`.

        ``seconds`` must be the same on all processes of the node.
        """
        check_seconds(seconds)
        left = seconds
        while True:
            part = min(left, self._wait_seconds)
            left -= part
            try:
                self._call(_Call.WAIT, 0, lambda _, part=part: self._leader.wait_for_all(part))  # type: ignore[misc]
                return
            except WorkersStillTrainingError as error:
                if left <= 0:
                    raise WorkersStillTrainingError(error.workers, seconds) from None

    def close(self) -> None:
        """Leave the run; harmless twice. Processes of the node that still wait for this one get an error."""
        if self._closed:
            return
        self._closed = True
        if self._samples is not None:
            self._samples.close()
        try:
            if self._own is not None:
                self._own.close()
        finally:
            self._comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, on every process; its parameters must belong to ``model``.

        Raises:
            ConfigurationError: a parameter is not part of the model that joined, or a value is out of its range.
        """
        if self._joined and self._own is not None:
            self._own.add_param_group(param_group)
            return
        super().add_param_group(param_group)
        if self._joined:
            check_added(self.param_groups, self._model)

    # State: each process by itself, since a script saves on one and loads on all

    def state_dict(self) -> dict[str, Any]:
        """Return the leader's state, residuals included; on the other processes, hyper-parameters only."""
        return super().state_dict() | {"state": {}} if self._own is None else self._own.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the leader; the other processes load its hyper-parameters."""
        if self._own is None:
            _, plain = split(state_dict, None)
            super().load_state_dict(plain | {"state": {}})
            self._open_states()
        else:
            self._own.load_state_dict(state_dict)
            self._share()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CopyRefusedError(type(self).__name__)

    # Inner parts

    @property
    def _leader(self) -> ParameterServerOptimizer:
        """The optimizer that has joined, on the leader."""
        assert self._own is not None
        return self._own

    def _gradients(self) -> dict[int, torch.Tensor]:
        return gather(self._model, ParamGroups(self.param_groups), range(len(self._model.parameters)))

    def _call(self, call: _Call, value: int, work: Callable[[int], None]) -> None:
        """Make a call together; every process raises the leader's error.

        ``value`` is the model's fingerprint for a join, samples for a step, which are summed. The leader alone calls
        ``work``, with the sum. :class:`ConfigurationError` if the processes make different calls or have different
        models; :class:`NodeBrokenError` if one is gone, silent, or cannot take part.
        """
        if self._closed:
            raise ConfigurationError("this optimizer has left its run (close()); make a new one to go on")
        unfit: SparsepsError | None = None
        is_loaded = False
        try:
            is_loaded = call is not _Call.JOIN and self._is_loaded()
        except ModelChangedError as error:
            if not self._comm.is_leader:  # whose optimizer checks its model by itself
                unfit = error
        found = self._comm.gather([_Call.NOTHING if unfit else call, value, is_loaded])
        if unfit is not None:
            raise unfit
        self._check_all_do(call, found)
        met: Exception | None
        if self._comm.is_leader:
            met = self._lead(lambda: work(sum(number for _, number, _ in found)))
        else:
            self._status = NodeStatus.decode(self._comm.broadcast_bytes())
            met = None if self._status.error is None else self._status.error.rebuild()
        tensors = self._tensors()
        # Before it has joined, and if its script has loaded a model, a process may have any values.
        everything = met is None and (call in (_Call.JOIN, _Call.PULL) or any(loaded for _, _, loaded in found))
        changed = range(len(tensors)) if everything else self._status.changed
        self._comm.broadcast_tensors([tensors[number] for number in changed])
        if met is not None:
            raise met
        self._replica.accept()

    def _is_loaded(self) -> bool:
        """Tell whether the script has written to this process's model since the last call."""
        self._model.buffers.now()
        if not self._comm.is_leader:
            self._model.check()
        return self._replica.loaded() is not None

    def _check_all_do(self, call: _Call, found: Sequence[Sequence[int]]) -> None:
        for rank, (other, value, _) in enumerate(found):
            if other == _Call.NOTHING:
                raise NodeBrokenError(f"rank {rank} of this node cannot take part in {call.name.lower()}()")
            if other != call:
                raise ConfigurationError(
                    f"rank {rank} of this node is in {_Call(other).name.lower()}() while rank {self._comm.rank} is in "
                    f"{call.name.lower()}(); all processes of a node must make the same calls in the same order"
                )
            if call is _Call.JOIN and value != found[0][1]:
                raise ConfigurationError(
                    f"the model of rank {rank} differs from that of rank 0 of this node in names, shapes or dtypes; "
                    "build the same one on every process"
                )

    def _lead(self, work: Callable[[], None]) -> Exception | None:
        tensors = self._tensors()
        before = [tensor._version for tensor in tensors]
        error: Exception | None = None
        try:
            work()
        except Exception as met:
            error = met
        except BaseException:
            self._comm.close()  # on the way out (SIGTERM, Ctrl-C): the others must know
            raise
        changed = [number for number, tensor in enumerate(tensors) if tensor._version != before[number]]
        self._status = NodeStatus.of(self._own, changed, error)
        self._comm.broadcast_bytes(self._status.encode())
        return error

    def _tensors(self) -> list[torch.Tensor]:
        """Return what may change, in an order that all processes share."""
        return [*self._model.parameters, *self._model.buffers.now()]

    def _share(self) -> None:
        """Share the leader's groups with its optimizer, so that a scheduler on this one has an effect."""
        leader = self._own
        if leader is not None:
            self.defaults, self.state, self.param_groups = leader.defaults, leader.state, leader.param_groups
            return
        self._open_states()
        self.defaults = self._status.defaults
        for group in self.param_groups:
            group.update(self.defaults | group)

    def _open_states(self) -> None:
        """Have a state, though an empty one: ``torch.distributed.checkpoint`` steps an optimizer that has none.

        A step that the leader does not take would wait for it.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state.setdefault(parameter, {})
