"""The optimizer that every method shares: an ordinary ``torch.optim.Optimizer`` whose step goes through a server.

A training loop sees this class; the steps are in :mod:`psclient.engine.engine`. The parameters change only by what the
server answers. All calls to servers are made in a thread of the optimizer's own.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch.optim.optimizer import Optimizer

from psclient import settings as client_settings
from psclient.budget import DEFAULT_BUDGET, Budget, budget_of
from psclient.compress.gradients import gather
from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.method import Method
from psclient.engine.budget import BudgetSchedule
from psclient.engine.engine import Engine, GradientScale, GradientSource
from psclient.engine.home import Ranks
from psclient.engine.lifecycle import Lifecycle
from psclient.engine.mgs import LayerDensity
from psclient.engine.sample_counter import FirstBatches, SampleCounter
from psclient.engine.state import (
    PushMark,
    check_memories,
    from_sgd,
    is_out_of_date,
    mark_state,
    restore_memories,
    split,
    state_as_refused,
    warn_of_missing_memories,
)
from psclient.engine.traced import TracedEngine
from psclient.engine.worker_metrics import WorkerMetrics
from psclient.errors import ConfigurationError, CopyRefusedError, PatienceError
from psclient.model.module import TrainedModel, describe
from psclient.model.requirements import refuse_averaged
from psclient.optim.arguments import (
    Density,
    Params,
    check_added,
    check_mode,
    check_params,
    check_seconds,
    check_step,
    split_model,
    unknown_argument,
    warn_without_model,
)
from psclient.optim.local_steps import LocalSteps
from psclient.report import StepReport, Totals
from psclient.rounds import Rounds
from psclient.settings import ClientSettings, OnLoad, Server
from pscore.wire.messages import LARGEST_LOSS

log = logging.getLogger("psclient")


class ParameterServerOptimizer(Optimizer):
    """Base of the methods; use one of its subclasses.

    To make one is to join the run, with four effects on the program: it waits for the servers, and the model is
    uploaded, or replaced by theirs; SIGTERM and the end of the program push what is held (``flush_on_sigterm``); the
    class of ``model`` counts the samples of its calls; with ``server="local"`` a server process is started.
    :meth:`close` undoes the last three.

    Args:
        params: parameters, param groups, or a model: then its parameters that need a gradient, and ``model`` too.
        defaults: the method's hyper-parameters.
        density: see :data:`Density`. A function leaves groups alone that were given a density of their own. ``None``
            with a budget.
        agreed: the method's settings in which all workers must agree, beside the common ones.
        model: the module that the parameters belong to: names the tensors, and has the buffers and the
            calls at which samples are counted.
            Without it, tensors have the names of ``model.named_parameters()`` if ``params`` has these, else they are
            named by position, and buffers stay local.
        server: ``HOST:PORT`` of each shard in order (a list, or one string with commas or a range as ``{0..3}``), one
            ``dns:///HOST:PORT`` for all, a running :class:`~psclient.LocalServer`, or ``"local"`` to start one for this
            process alone; the default is ``PSCLIENT_SERVER``.
        worker: this worker's name; see :class:`~psclient.ClientSettings`.
        overlap: push while backward goes on, and fetch the reply while the next step computes: every gradient is one
            step staler. With ``rounds`` the push goes on during backward too, and ``step()`` awaits the round: nothing
            is staler. Gradients must not be touched between ``backward()`` and ``step()``.
        rounds: train synchronously; the default is to apply each push as it comes.
        budget: the share of the dense bytes that a push and a reply may take, as ``0.03``, or a :class:`Budget` in
            bytes a second or seconds a step. Chooses density, value type and form of the replies. To choose density
            only, pass ``density`` instead. Groups with a density of their own are outside the budget. The default of a
            sparse method
            is ``0.03``, unless ``density`` or a value type (``PSCLIENT_VALUE_TYPE``) is given; the density then is
            ``default_density``.
        on_load: the rule for a model that the script loads into the worker later. The run begins with this model if
            nobody has pushed yet. Afterwards ``"error"`` (the default) raises ``ModelLoadedError``, ``"server"``
            replaces the loaded model by the server's, and ``"replace"`` sends it to all workers.
        settings: everything else about the connection.

    Raises:
        SparsepsError: the server cannot be reached, trains another model, or in another way.
    """

    _method: Method
    _gradient_scale: GradientScale | None = None
    """Returns a factor for all gradients of a step, if the method clips.

    A tensor of no dimension, on their device, costs no wait. Such gradients may not be finite: the step fails then,
    whatever is returned. With ``overlap=True`` nobody asks: the first gradients are sent before the last are known.
    """

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        density: Density | None,
        agreed: Mapping[str, str] | None = None,
        /,
        *,
        model: torch.nn.Module | None = None,
        server: Server | None = None,
        worker: str | None = None,
        overlap: bool = False,
        rounds: Rounds | None = None,
        budget: float | Budget | None = None,
        on_load: OnLoad | None = None,
        settings: ClientSettings | None = None,
        _ranks: Ranks | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise unknown_argument(type(self), ParameterServerOptimizer, next(iter(unknown)))
        check_mode(overlap, rounds)
        self._joined, self._has_other_ranks = False, _ranks is not None
        self._rounds, self._agreed = rounds, dict(agreed or {})
        self._own_density: set[int] = set()  # numbers of the groups that a density schedule leaves alone
        self._gradients_are_its_own = False  # known since the first step, or by a NodeOptimizer: no mean of several's
        self._loss: Any = None
        resolved = client_settings.resolve(settings, server, worker, on_load)
        following = budget_of(budget) if budget is not None else None
        if density is not None and following is not None:
            raise ConfigurationError("density= and budget= exclude each other: a budget chooses the density")
        method = self._method
        if density is None and following is None and method.default_density < 1 and not resolved.names_a_value_type:
            following = DEFAULT_BUDGET
        if density is None:
            density = method.default_density
        params, model = split_model(params, model)
        super().__init__(check_params(params), defaults | {"density": density(1) if callable(density) else density})
        if model is None:
            warn_without_model(self.param_groups)
        references = sys.getrefcount(model)  # after params: a generator of them refers to the model until it ends
        self._own_references = 0  # until this is made: nothing is forgotten then
        if _ranks is None:
            self._model = describe(model, self.param_groups, upload_frozen=resolved.upload_frozen)
        else:  # from a NodeOptimizer
            self._model = _ranks.model
        refuse_averaged(self._model.parameters, () if model is None else model.modules())
        self._groups = ParamGroups(self.param_groups, self._own_density)
        layer_density = density if isinstance(density, LayerDensity) else None
        if layer_density is not None:
            layer_density.check(overlap=overlap)
        forms = None
        if following is not None:
            forms = BudgetSchedule(following, self._model.layout, resolved.dense_below, sends_all=method.sends_all)
            resolved = resolved.model_copy(update={"dense_below": forms.dense_below})
        agreed_settings = self._agreed_settings()
        self._life = Lifecycle(resolved, self._model, self._groups)
        gradients, rates = self._sources(self._model, self._groups)
        if _ranks is not None:
            gradients = partial(_ranks.gradients, self._groups)
        self._engine = (TracedEngine if resolved.tracing else Engine)(
            method,
            self._model,
            self._groups,
            self.state,
            agreed_settings,
            resolved,
            self._life,
            forms.of(self._life.shards) if forms is not None else density if callable(density) else None,
            layer_density,
            rates,
            gradients,
            synchronous=rounds is not None or not method.asynchronous,
            ranks=_ranks,
        )
        self._run = run = self._engine.run
        self._steps: Engine | LocalSteps = self._engine
        self._life.watch(self, run.leases, self._engine.abandon)
        try:
            if resolved.metrics_listen:
                self._engine.metrics = WorkerMetrics(
                    resolved.metrics_listen, self._life.name, self._engine.totals, self._model.layout.size
                )
            self._life.begin(lambda: self._engine.do(run.join))
            self._joined = True
            self._open_states()
            first_batches = FirstBatches(run.leases)

            def see(batch: torch.Tensor) -> None:
                first_batches.see(batch)
                if run.progress is not None:
                    run.progress.look()

            counter = SampleCounter(model, see) if model is not None else None
            self._engine.do(lambda: self._engine.start(counter, overlap=overlap))
        except BaseException:
            self.close()
            raise
        self._own_references = sys.getrefcount(model) - references

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``torch.amp.GradScaler`` reads this before it unscales; refused if overlap has sent the gradients."""
        if self._engine.overlap is not None:
            raise ConfigurationError(
                "GradScaler unscales gradients after backward(), and with overlap=True they have left by then; leave "
                "overlap out, or train in bf16, which needs no scaling"
            )
        return False

    # What a method defines

    def _agreed_settings(self) -> dict[str, str]:
        """Return the settings in which all workers of a run must agree."""
        momenta = [str(float(group["momentum"])) for group in self.param_groups if "momentum" in group]
        common = {"momentum": ",".join(momenta)} if momenta else {}
        return common | ({"rounds": self._rounds.agreed()} if self._rounds is not None else {}) | self._agreed

    def _sources(self, model: TrainedModel, groups: ParamGroups) -> tuple[GradientSource, Callable[[], Rates]]:
        """Return the functions that collect a push's gradients and its rates; neither may refer to the optimizer."""
        return partial(gather, model, groups), groups.rates

    # What a training loop uses

    @property
    def report(self) -> StepReport:
        """The report of the last step."""
        return self._engine.report

    @property
    def totals(self) -> Totals:
        """Sums over all steps."""
        return self._engine.totals

    @property
    def version(self) -> int:
        """The coordinator's version that this worker has seen: updates applied from all workers."""
        return self._run.coordinator.version

    @property
    def finished(self) -> bool:
        """True once the run is over; leave the loop then."""
        return self._run.run_finished

    @property
    def live_workers(self) -> int:
        """Workers alive, as last heard."""
        return self._run.live_workers

    @property
    def _unfinished(self) -> bool:
        """True if the last step has pushed its gradients and met an error before its end.

        The next :meth:`step` completes it, unless the gradients are others by then, or there are none.
        """
        return self._steps.unfinished

    @property
    def _local_steps(self) -> int:
        """Steps that have changed this machine's parameters and are not pushed yet; 0 without local steps."""
        return self._steps.local_steps

    @property
    def worker(self) -> str:
        """This worker's name."""
        return self._run.identity.worker_id

    @property
    def _has_forgotten_model(self) -> bool:
        """Whether nothing but this optimizer refers to the module ``model=``: a cell has made another one, say."""
        module, alone = self._model.module, object()
        return module is not None and sys.getrefcount(module) - sys.getrefcount(alone) <= self._own_references

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._run.identity.run_id

    @property
    def server(self) -> str:
        """The shards as they were named: their addresses, separated by commas, or one name for all."""
        return self._life.server

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Push this step's update and bring the parameters up to the server's.

        Args:
            closure: recomputes the loss, as for any torch optimizer. If the last step is unfinished, it is
                not called: that step is completed, and what the closure returned then is returned.
            samples: how many samples the gradients come from; counted at the calls of ``model`` if not given.

        Returns:
            What the closure returned.

        Raises:
            NonFiniteGradientError: nothing was sent, and without overlap nothing was changed.
            UpdateOverflowError: nothing was sent; what the step has added stays in the residuals if it is finite.
            ServerUnreachableError: no server within the patience; call again to go on, nothing is lost.
            RunFinishedError: the run was over before this step.
        """
        self._engine.require_open()
        if not self._gradients_are_its_own:  # not only when it was made: a script may wrap or share its model late
            refuse_averaged(self._model.parameters)
            self._model.refuse_shared()
            self._gradients_are_its_own = True
        check_step(closure, samples)
        if closure is not None and not self._unfinished:
            with torch.enable_grad():
                self._loss = closure()
        self._engine.do(lambda: self._steps.step(samples, self._gradient_scale))
        # Not in the thread: a step whose end its caller has not seen must be completed again.
        self._steps.pushed.clear()
        loss, self._loss = self._loss, None
        return loss

    def log_loss(self, loss: float | torch.Tensor) -> None:
        """Show a loss on the server's status page: it goes with the next push, and changes nothing in the training.

        The page has the mean over all workers. Call it before :meth:`step` as often as you like, which keeps the last
        one; with ``overlap=True`` it may go a step later. Several processes that are one worker show the leader's.

        Args:
            loss: a number, or a tensor of one element. On a GPU its value is waited for, so call this every few steps
                there. One that is not finite, or beyond ±10^12, is left out.

        Raises:
            ConfigurationError: it has more than one element.
        """
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise ConfigurationError(
                f"log_loss() takes a number or a tensor of one element, not one of shape {tuple(loss.shape)}: pass "
                "loss.mean()"
            )
        value = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
        self._engine.loss = value if abs(value) <= LARGEST_LOSS else None

    def accumulating(self) -> AbstractContextManager[None]:
        """With overlap: run the backward passes in the body without handing their gradients over.

        For gradient accumulation: wrap all but the last backward pass before a ``step()``. Without overlap this does
        nothing.
        """
        return nullcontext() if self._engine.overlap is None else self._engine.overlap.accumulating()

    def lookahead(self) -> AbstractContextManager[None]:
        """Run forward and backward passes where the model will be once this worker's residuals arrive.

        Wrap both, and not :meth:`step`: after the body the parameters have their bits again. Costs a copy of them.

        Raises:
            ConfigurationError: with ``overlap=True`` or ``rounds=``, or for a method that it is not for.
        """
        unfit = self._method.sends_all or "update" in self._agreed_settings() or self._rounds is not None
        if unfit or self._engine.overlap is not None:
            raise ConfigurationError("lookahead() is for DGS, DGC and GradientDropping, without overlap= and rounds=")
        return self._engine.looking_ahead()

    def flush(self) -> None:
        """Push all residuals whole, at density 1; :meth:`pull` brings them back into the parameters.

        Raises:
            ServerUnreachableError: no server within the patience.
        """
        self._engine.do(self._steps.flush)

    @property
    def _held(self) -> str:
        """What :meth:`_flush_on_exit` pushes, in words for the log."""
        if not self._has_other_ranks:
            return "what it held"
        return (
            "what the blocks of rank 0 held (what other ranks held since the last flush() is lost; docs/guide/fsdp.md, "
            "SIGTERM, has the lines that push it)"
        )

    def _flush_on_exit(self) -> None:
        """End a lookahead; push the rest before this worker leaves or waits: by :meth:`flush`, or the local steps."""
        self._engine.end_lookahead()
        self._engine.do(self._steps.flush_on_exit)

    def pull(self) -> None:
        """Make the parameters the server's without pushing, before an evaluation, say.

        After top-k replies the whole model is fetched, because a top-k reply leaves small differences out. Local steps
        since the last push stay, on top of the server's values.

        Raises:
            ServerUnreachableError: no server within the patience.
        """
        self._engine.do(self._steps.pull)

    def wait_for_all(self, seconds: float = 3600.0) -> None:
        """Wait until every live worker has called this, or has left; then :meth:`pull` gives all of them one model.

        For the end of a script, before the model is saved. The last push is answered first, and local steps are
        pushed. A dead worker is waited for until its lease ends, and one that joins meanwhile counts. While this worker
        waits, no round and no bound on leads waits for it. Residuals stay here, as after any step. Buffers (BatchNorm
        statistics) are the average of all workers afterwards. After the end of the run the call returns at once.

        Raises:
            WorkersStillTrainingError: after ``seconds``; call again to go on waiting.
            ServerUnreachableError: no server within the patience.
        """
        check_seconds(seconds)
        self._engine.do(lambda: self._steps.wait_for_all(seconds))

    def _hurry(self, seconds: float) -> None:
        """Wait no longer than this for a server from now on, and for no other worker."""
        self._run.set_deadline(seconds)
        self._run.cancel_wait()

    def close(self) -> None:
        """Leave the run and free everything; stops an embedded server. Harmless twice.

        Called at exit by itself; and the worker of an optimizer that is collected before leaves too. After a SIGTERM
        that the script's own handler has taken, what is held is pushed first.
        """
        self._life.push_expected()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any torch optimizer; after joining, its parameters must belong to ``model``.

        Raises:
            ConfigurationError: a parameter is not part of the model that joined, or a value is out of its range.
        """
        has_own_density, number = "density" in param_group, len(self.param_groups)
        super().add_param_group(param_group)
        check_added(
            self.param_groups,
            self._model if self._joined else None,
            are_agreed=self._method.groups_are_agreed,
            step_has_begun=self._joined and self._engine.begun,
        )
        if has_own_density:
            self._own_density.add(number)
        if self._joined:
            self._groups.assign(self.param_groups)
            self._life.claim.trained |= {id(parameter) for parameter in self.param_groups[-1]["params"]}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as for any torch optimizer.

        With overlap, between ``backward()`` and ``step()``: a batch is skipped. What had been handed over by then stays
        in the residuals.
        """
        overlap = self._engine.overlap
        if overlap is not None and overlap.begun and not self._life.in_child:
            self._engine.always(overlap.forget)
        super().zero_grad(set_to_none)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return residuals, hyper-parameters, and which push of which incarnation they belong to.

        A push that is still in doubt is part of the residuals returned: if it turns out to have been applied, they are
        recognised as out of date when they are loaded.
        """
        return self._engine.always(self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        try:
            self._engine.finish_overlap()
        except PatienceError as error:
            log.warning("saving the state with a push in doubt: %s", error)
        self._engine.selector.fill_memories()
        state = state_as_refused(self.state, self._engine, super().state_dict)
        mark_state(state, self._mark())
        return state

    def _mark(self) -> PushMark:
        """Return the mark of the last push."""
        return PushMark.now(self._method.name, self._run, self._engine)

    @property
    def _in_doubt(self) -> bool:
        """True if a push has neither been acknowledged nor refused."""
        return bool(self._engine.unacked_parts())

    def _settle(self, mark: PushMark) -> bool:
        """End the last push; return whether residuals that were saved at a mark are out of date then."""
        self._engine.always(self._engine.finish_push)
        return self._is_out_of_date(mark)

    def _take_over(self, state: Any, groups: list[dict[str, Any]], step: int) -> None:
        """Use a state and param groups that a NodeOptimizer has loaded, of a push of this number."""
        self.state, self.param_groups = state, groups
        self._groups.assign(groups)
        self._engine.number = max(self._engine.number, step)

    def _is_out_of_date(self, mark: PushMark) -> bool:
        record, remembers = self._run.last_push_record, self._method.server_remembers
        return is_out_of_date(mark, self._mark(), record, server_remembers=remembers)

    def _open_states(self) -> None:
        """Have a state of each parameter: ``torch.distributed.checkpoint`` steps an optimizer that has none."""
        for parameter in self._model.parameters:
            if parameter in self._groups:
                self.state.setdefault(parameter, {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take residuals and hyper-parameters over.

        Residuals that are older than the last push that the server has applied from this worker contain gradients that
        were sent since; they are dropped, with a warning. A state of ``torch.optim.SGD`` gives its rates and weight
        decay, and its momentum if the method has the same.

        Raises:
            ConfigurationError: another method, or another optimizer, has saved it; the message says how to go on.
        """
        if self._life.in_child:
            self._engine.require_open()
        mark, plain = split(state_dict, self._method.name)
        if mark is None:
            plain = self._from_torch(plain)
        check_memories(plain, self.param_groups, self._model)
        self._engine.always(
            self._engine.finish_push
        )  # a push that is applied later would count beside the loaded residuals
        super().load_state_dict(plain)
        self._groups.assign(self.param_groups)
        self._engine.selector.memories.states = self.state  # torch has put a new dict in the place of the old one
        restore_memories(self, plain)
        self._open_states()
        if mark is None:
            return
        warn_of_missing_memories(state_dict)
        if self._is_out_of_date(mark):
            self.state.clear()
            self._open_states()
        self._engine.number = max(self._engine.number, mark.step)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CopyRefusedError(type(self).__name__)

    # Inner parts

    def _from_torch(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of an optimizer of torch's as one of this method."""
        return from_sgd(state, self.param_groups, self._method.name, keeps_momentum=self._method.momentum_is_torchs)
