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
from dataclasses import replace
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex
from zlib import crc32

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from psclient import settings as client_settings
from psclient.compress.gradients import PushedGradients, gather
from psclient.compress.groups import ParamGroups
from psclient.compress.method import Method
from psclient.engine.sample_counter import SampleCounter
from psclient.engine.state import PushMark, check_memories, mark_state, restore_memories, split
from psclient.errors import (
    ConfigurationError,
    CopyRefusedError,
    ModelChangedError,
    NodeBrokenError,
    SparsepsError,
    WorkersStillTrainingError,
)
from psclient.model.module import TrainedModel, describe
from psclient.model.replica import Replica
from psclient.model.requirements import is_dtensor
from psclient.model.wrappers import reshard
from psclient.node.agreement import Agreement
from psclient.node.comm import NodeComm, NodeStatus
from psclient.node.group import leader_settings, require_meshes_in, unwrap_ddp
from psclient.optim.arguments import Params, check_added, check_params, check_seconds, check_step, split_model
from psclient.optim.base import ParameterServerOptimizer
from psclient.report import StepReport, Totals
from psclient.settings import ClientSettings, Server

if TYPE_CHECKING:
    from psclient.node.rank import Rank
    from psclient.node.sharded import Sharded


class _Call(IntEnum):
    """A call that all processes of a node make; ``NOTHING`` if one of them cannot."""

    NOTHING = 0
    JOIN = 1
    STEP = 2
    FLUSH = 3
    PULL = 4
    WAIT = 5
    LOAD = 6


_WAIT_SECONDS = 30.0  # of one call that waits for other workers: the processes of a node wait less long for one another


def _of_leader(name: str, documentation: str) -> Any:
    """Return a property: an attribute of the leader's optimizer after the last call."""
    return property(lambda node: getattr(node._status, name), doc=documentation)


class NodeOptimizer(Optimizer):
    """One worker of several processes; made, stepped and pulled by all processes of a node together.

    >>> ddp = DistributedDataParallel(model, process_group=psclient.node_group())
    >>> optimizer = psclient.NodeOptimizer(psclient.DGS, model.parameters(), lr=0.1, model=ddp, server="host:50051")

    If parameters are DTensors (``fully_shard``, tensor parallelism), the processes have the model in parts. Each
    selects from its own blocks, and all that have blocks must be in the group.

    Args:
        method: a training method, as ``psclient.DGS``; only the leader makes one. For a model in parts a class, or a
            ``functools.partial`` of one.
        params: parameters, param groups, or a model and then also ``model``; the same on every process.
        model: the module, or the ``DistributedDataParallel`` around it, whose process group is then the node's.
        group: the processes of this node; the default group if neither this nor a DDP says otherwise.
        server: as for the method, without ``"local"``.
        worker: the node's name; by default the leader's place in the job.
        settings: everything else about the connection.
        timeout_seconds: how long a process of the node may let the others wait; by default what the settings give the
            leader to wait for a server, three times over, and a minute.
        *arguments: the method's own arguments, behind the parameters, as the name of a server's optimizer.
        **options: the same by name, as ``lr``.

    Raises:
        SparsepsError: as the method does, on every process.
        NodeBrokenError: another process of this node is gone or silent.
    """

    def __init__(
        self,
        method: Callable[..., ParameterServerOptimizer],
        params: Params,
        *arguments: Any,
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
        reshard(model)
        module, group = unwrap_ddp(model, group)
        resolved = leader_settings(client_settings.resolve(settings, server, worker), group)
        self._status = NodeStatus()
        self._own: ParameterServerOptimizer | None = None
        self._joined = False
        super().__init__(check_params(params), {})
        self._interrupted = PushedGradients()  # on every process, as each has to know whether to call a closure
        self._loss: Any = None
        self._uncounted = 0
        self._closed = self._is_stale = False
        patience = max(resolved.connect_seconds, resolved.patience_seconds)
        seconds = timeout_seconds or 3 * patience + 60
        own = [] if module is None else module.parameters()
        in_parts = any(map(is_dtensor, chain(own, *(each["params"] for each in self.param_groups))))
        if in_parts:
            require_meshes_in(group, [] if module is None else module.named_parameters())
        else:  # before the processes meet: each refuses a model by itself
            self._model = describe(module, self.param_groups, upload_frozen=resolved.upload_frozen)
        self._comm, self._wait_seconds = NodeComm(group, seconds), min(_WAIT_SECONDS, seconds / 2)
        self._ranks: Sharded | None = None
        if in_parts:
            self._model, self._replica = self._described_parts(module, method, upload_frozen=resolved.upload_frozen)
        else:
            self._replica = Replica(self._model.layout, self._model.parameters)
        more: dict[str, Any] = {} if self._ranks is None else {"_ranks": self._ranks}
        self._agreement = Agreement(self._comm, self._model.parameters)
        self._samples = SampleCounter(model) if model is not None else None
        if self._samples is not None:
            weakref.finalize(self, self._samples.close)

        def join(_: int) -> None:
            self._own = method(self.param_groups, *arguments, model=module, settings=resolved, **options, **more)
            self._own._gradients_are_its_own = True  # the node's, which pushes them once

        try:
            self._call(
                _Call.JOIN,
                int.from_bytes(self._model.layout.fingerprint[:6]),
                join,
                words=self._agreement.of_arguments(self.param_groups, arguments, options),
            )
        except BaseException:
            self.close()
            raise
        self._joined = True
        self._share()
        self._regroup()

    def _described_parts(
        self, module: torch.nn.Module | None, method: Callable[..., Any], *, upload_frozen: bool
    ) -> tuple[TrainedModel, Replica]:
        """Return a model of DTensors, and this process's part of its values."""
        from psclient.model.part import Part
        from psclient.node.rank import Rank
        from psclient.node.sharded import Sharded, digest_of_all

        self._comm.gather([0])  # nobody leaves, because it refuses the model, while another one still connects
        kind: Any = method
        while isinstance(kind, partial):
            kind = kind.func
        known = getattr(kind, "_method", None)
        if not isinstance(known, Method):
            raise ConfigurationError(
                "the model is in parts (DTensors), and every rank has to know the method: pass a class, as "
                "psclient.DGS, or a functools.partial() of one"
            )
        try:
            model = describe(
                module,
                self.param_groups,
                upload_frozen=upload_frozen,
                in_parts=True,
                digest=partial(digest_of_all, comm=self._comm),
            )
            part = Part(model)
        except BaseException:
            self._comm.close()
            raise
        rank = Rank(part, self.param_groups)
        self._ranks = Sharded(self._comm, model, rank, known, lambda: self.state)
        return model, rank.values

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
        else:
            super().add_param_group(param_group)
            if self._joined:
                check_added(self.param_groups, self._model)
        if self._joined:
            self._open_states()
            self._regroup()

    # State: each process by itself, since a script saves on one and loads on all

    def state_dict(self) -> dict[str, Any]:
        """Return the leader's state, residuals included; on the other processes, hyper-parameters only.

        Of a model in parts, return the state of this rank's blocks, as DTensors that lie as the parameters do.

        Raises:
            ConfigurationError: the model is in parts, and a push is in doubt.
        """
        if self._ranks is not None:
            return self._state_of_part(self._ranks.rank)
        return super().state_dict() | {"state": {}} if self._own is None else self._own.state_dict()

    def _state_of_part(self, rank: "Rank") -> dict[str, Any]:
        from psclient.node.part_state import of_part

        if self._status.in_doubt:
            raise ConfigurationError(
                "nobody knows yet whether the last push was applied, so there is no state to save: call pull() or "
                "step() on all ranks first"
            )
        rank.fill_memories()
        state = of_part(super().state_dict(), self.param_groups, rank.part)
        mark_state(state, PushMark(**self._status.mark))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the leader; the other processes load its hyper-parameters.

        Of a model in parts all ranks call this together, each with what its :meth:`state_dict` has returned, or with
        whole memories.
        """
        if self._ranks is not None:
            self._load_part(state_dict, self._ranks)
        elif self._own is None:
            _, plain = split(state_dict, None)
            super().load_state_dict(plain | {"state": {}})
            self._open_states()
        else:
            self._own.load_state_dict(state_dict)
            self._share()

    def _load_part(self, state_dict: dict[str, Any], ranks: "Sharded") -> None:
        from psclient.node.part_state import localized

        part, found = ranks.rank.part, dict[str, Any]()
        mark: PushMark | None = None

        def read() -> None:
            nonlocal mark
            mark, plain = split(state_dict, ranks.method.name)
            if mark is None:
                raise ConfigurationError(
                    "this state is another optimizer's, and a model in parts takes over what psclient has saved: load "
                    "the model's weights alone"
                )
            found.update(localized(plain, self.param_groups, part))
            check_memories(found, part.groups(self.param_groups), part.own)

        def settle(_: int) -> None:
            assert mark is not None
            self._is_stale = self._leader._settle(mark)

        self._call(_Call.LOAD, 0, settle, prepares=read)
        assert mark is not None
        super().load_state_dict(found)
        restore_memories(self, found)
        if self._status.is_stale:
            self.state.clear()
        self._open_states()
        if self._own is not None:
            self._own._take_over(self.state, self.param_groups, mark.step)
        self._regroup()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CopyRefusedError(type(self).__name__)

    # Inner parts

    @property
    def _leader(self) -> ParameterServerOptimizer:
        """The optimizer that has joined, on the leader."""
        assert self._own is not None
        return self._own

    def _gradients(self) -> dict[int, torch.Tensor]:
        groups, everything = ParamGroups(self.param_groups), range(len(self._model.parameters))
        if self._ranks is not None:
            return self._ranks.gradients(groups, everything)
        return gather(self._model, groups, everything)

    def _call(
        self,
        call: _Call,
        value: int,
        work: Callable[[int], None],
        *,
        prepares: Callable[[], None] | None = None,
        words: str = "",
    ) -> None:
        """Make a call together; every process raises the leader's error.

        ``value`` is the model's fingerprint for a join, samples for a step, which are summed. The leader alone calls
        ``work``, with the sum; each process first calls ``prepares``. ``words`` have to be equal on all.
        :class:`ConfigurationError` if the processes make different calls, have different models or different words;
        :class:`NodeBrokenError` if one is gone, silent, or cannot take part.
        """
        if self._closed:
            raise ConfigurationError("this optimizer has left its run (close()); make a new one to go on")
        unfit: SparsepsError | None = None
        loaded = drifted = -1
        try:
            if prepares is not None:
                prepares()
            if call is not _Call.JOIN:
                loaded, drifted = self._look()
        except ModelChangedError as error:
            if not self._comm.is_leader or self._ranks is not None:  # else its optimizer checks its model by itself
                unfit = error
        except SparsepsError as error:
            unfit = error
        if self._ranks is not None and self._joined:
            words = self._agreement.of_groups(self.param_groups)
        found = self._comm.gather([_Call.NOTHING if unfit else call, value, loaded, drifted, crc32(words.encode())])
        if unfit is not None:
            raise unfit
        self._check_all_do(call, found)
        if len({each[4] for each in found}) > 1:
            self._agreement.refuse(words)
        met: Exception | None
        if self._ranks is not None:
            self._ranks.loaded = [each[2] for each in found]
            self._ranks.drifted = [each[3] for each in found]
        if self._comm.is_leader:
            met = self._lead(lambda: work(sum(each[1] for each in found)))
        else:
            if self._ranks is not None:
                self._ranks.serve()
            self._status = NodeStatus.decode(self._comm.broadcast_bytes())
            met = None if self._status.error is None else self._status.error.rebuild()
        tensors = self._tensors()
        # Before it has joined, and if its script has loaded a model, a process may have any values.
        everything = met is None and (call in (_Call.JOIN, _Call.PULL) or any(each[2] >= 0 for each in found))
        changed = range(len(tensors)) if everything else self._status.changed
        self._comm.broadcast_tensors([tensors[number] for number in changed])
        if met is not None:
            raise met
        self._replica.accept()

    def _look(self) -> tuple[int, int]:
        """Return the positions of a parameter that the script has written to since the last call; −1 for none.

        The second one was written to without a trace; that is looked for if the model is in parts, by each rank.
        """
        reshard(self._model.module)
        self._model.buffers.now()
        if not self._comm.is_leader or self._ranks is not None:  # a leader with the whole model checks it by itself
            self._model.check()
        drifted = None
        if self._ranks is not None:
            self._ranks.rank.part.check()
            drifted = self._replica.drifted()
        layout = self._model.layout
        return layout.position(self._replica.loaded()), layout.position(drifted)

    def _check_all_do(self, call: _Call, found: Sequence[Sequence[int]]) -> None:
        for rank, (other, value, *_) in enumerate(found):
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
        ranks = self._ranks
        if ranks is not None:
            ranks.in_call = True
        try:
            work()
        except NodeBrokenError:
            raise
        except Exception as met:
            error = met
        except BaseException:
            self._comm.close()  # on the way out (SIGTERM, Ctrl-C): the others must know
            raise
        finally:
            if ranks is not None and self._comm.is_closed:
                ranks.in_call = False
        if ranks is not None:
            ranks.end()
        changed = [number for number, tensor in enumerate(tensors) if tensor._version != before[number]]
        self._status = replace(NodeStatus.of(self._own, changed, error), is_stale=self._is_stale)
        self._comm.broadcast_bytes(self._status.encode())
        return error

    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the leader passes on, in an order that all processes share."""
        return [*(() if self._ranks is not None else self._model.parameters), *self._model.buffers.now()]

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

    def _regroup(self) -> None:
        """Have this rank's selection use the param groups and states that are there now, if the model is in parts."""
        if self._ranks is not None:
            self._ranks.rank.take_groups(self.param_groups)
            self._ranks.rank.take_states(self.state)

    def _open_states(self) -> None:
        """Have a state, though an empty one: ``torch.distributed.checkpoint`` steps an optimizer that has none.

        A step that the leader does not take would wait for it.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state.setdefault(parameter, {})
