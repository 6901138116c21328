"""One worker of a run: its parts, the thread that they work in, and its end."""

import logging
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import TypeVar

import torch

from psclient import settings as client_settings
from psclient.buckets.layer_density import LayerDensity
from psclient.buckets.planner import BucketPlanner
from psclient.compress.compressor import Choice, Compressor
from psclient.compress.groups import ParamGroups
from psclient.compress.method import Method, State
from psclient.engine.lifecycle import Lifecycle, Stoppable, end_earlier, has_other
from psclient.engine.push_pull import PushPull
from psclient.engine.step import CLOSING_SECONDS
from psclient.errors import ConfigurationError, FingerprintMismatchError, ServerUnreachableError, SparsepsError
from psclient.executor import SerialExecutor
from psclient.model.module import TrainedModel
from psclient.model.replica import Replica
from psclient.rpc.cluster import Cluster
from psclient.rpc.local_server import start_alone
from psclient.rpc.membership import Membership
from psclient.rpc.resolver import connect
from psclient.rpc.shard import ShardClient
from psclient.settings import ClientSettings
from pscore import jit
from pscore.select import SELECTORS
from pscore.telemetry import tracing
from pscore.telemetry.span import TracingError
from pscore.wire.errors import ErrorCode

log = logging.getLogger("psclient")

Result = TypeVar("Result")

_ONE_SERVER_ONE_MODEL = (
    "another optimizer of this process trains another model there: give each model a server of its own, or make one "
    "optimizer of both, with model=torch.nn.ModuleDict(...) (docs/training.md, Several models)"
)
_LEAVING_SECONDS = 5.0  # for calls whose answers are of no consequence, and threads that end


class Worker:
    """Makes a worker's parts, does its work in a thread of its own, and ends it.

    No call of gRPC is made in the program's thread: a signal's exception inside one leaves its locks taken.
    ``memories`` is each parameter's, as the method has it; ``agreed`` are the settings in which all workers of the run
    must agree; ``layer_density`` gives each layer a density of its own.
    """

    lifecycle: Lifecycle

    def __init__(
        self,
        method: type[Method],
        model: TrainedModel,
        groups: ParamGroups,
        memories: MutableMapping[torch.Tensor, State],
        agreed: Mapping[str, str],
        settings: ClientSettings,
        layer_density: LayerDensity | None,
    ) -> None:
        self._name = client_settings.worker_name(settings)
        self._own_server = start_alone() if settings.server == client_settings.LOCAL else None
        self.server = settings.server if self._own_server is None else self._own_server.server
        self._has_neighbour = has_other(self.server)
        self._thread = SerialExecutor("psclient-step")
        try:
            end_earlier(self.server, self._name)
            shards = self._thread.call(partial(self._reach, settings), lambda: None)
        except BaseException:
            if self._own_server is not None:
                self._own_server.stop()
            raise
        replica = Replica(model.layout, model.parameters)
        self.membership = Membership(shards, self._name, replica, model.buffers, method.name, agreed, settings)
        self.cluster = Cluster(shards, self.membership, replica, model.buffers)
        planner = self.planner = BucketPlanner(model.layout, settings, layer_density)

        def density_of(position: int) -> float | None:
            return None if groups.has_own_density(model.parameters[position]) else planner.densities.get(position)

        choice = Choice(SELECTORS[settings.selector], settings.select_over, settings.dense_below)
        self.compressor = Compressor(method, model, memories, groups.of, choice, density_of)
        self.push_pull = PushPull(model.layout, self.cluster, self.compressor, planner)

    def _reach(self, settings: ClientSettings) -> list[ShardClient]:
        jit.announce = log.warning
        if settings.tracing:
            try:
                tracing.start("psclient", self._name)
            except TracingError as error:
                raise ConfigurationError(str(error)) from error
        connections = connect(self.server, settings.security, settings.connect_seconds)
        return [ShardClient(connection, index, settings) for index, connection in enumerate(connections)]

    def watch(self, optimizer: Stoppable, abandon: Callable[[], None], *, flush_on_sigterm: bool) -> None:
        """End ``optimizer`` in order from now on; ``abandon`` ends the worker of one that is collected."""
        leases = self.membership.leases
        self.lifecycle = Lifecycle(optimizer, self._own_server, leases, abandon, flush_on_sigterm=flush_on_sigterm)

    def join(self) -> None:
        """Take this worker's place in the run."""
        self.lifecycle.take_place(self.server, self._name)
        try:
            self.run(self.membership.join)
        except FingerprintMismatchError as error:
            if not self._has_neighbour:
                raise
            text = str(error).replace(ErrorCode.FINGERPRINT_MISMATCH.advice, _ONE_SERVER_ONE_MODEL)
            raise FingerprintMismatchError(text, error.tensor) from None

    def require_open(self) -> None:
        """Raise :class:`ConfigurationError` where the optimizer has left its run, or belongs to another process."""
        if self.lifecycle.in_child:
            raise ConfigurationError("this process was forked from the optimizer's; make an optimizer of its own here")
        if self.lifecycle.ended:
            raise ConfigurationError("this optimizer has left its run (close()); make a new one to go on")

    def run(self, work: Callable[[], Result]) -> Result:
        """Do work that needs a worker with a place in its run."""
        self.require_open()
        return self.always(work, self.membership.seconds_left)

    def always(self, work: Callable[[], Result], seconds: float | None = None) -> Result:
        """Do work, on the CUDA stream of the calling thread; after the end, in the calling thread itself.

        A signal's exception ends the wait and not the work: calls to servers are cut short, and the rest goes on to a
        point from which the next call can continue. Only an end has a limit in ``seconds``.
        """
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

        def body() -> Result:
            with torch.no_grad(), torch.cuda.stream(stream):
                return work()

        if self.lifecycle.ended or self.lifecycle.in_child:
            return body()
        try:
            return self._thread.call(body, self.cluster.cancel_unawaited, seconds)
        except TimeoutError as error:
            if isinstance(error, SparsepsError):
                raise
            address, hint = self.membership.coordinator.address, "What it had not pushed is lost with this worker"
            raise ServerUnreachableError(address, seconds or 0.0, "its time is over", hint) from None

    def close(self, leave: Callable[[], None]) -> None:
        """End the worker with ``leave``; harmless twice."""
        if self.lifecycle.ended or self.lifecycle.in_child:
            return
        self.membership.set_deadline(CLOSING_SECONDS)
        self._thread.cancel()  # only what nobody waits for can be under way: the last call was interrupted
        self.cluster.cancel_unawaited()
        leaving = self._thread.submit(torch.no_grad()(leave))  # goes on where the wait is interrupted
        self.lifecycle.ended = True
        try:
            leaving.result(CLOSING_SECONDS + _LEAVING_SECONDS)
            self._thread.close(_LEAVING_SECONDS)
        except TimeoutError:
            log.warning("worker %s could not leave in time; its lease ends by itself", self._name)
        finally:
            self.lifecycle.release()
