"""The weights of TRL's asynchronous trainers (``AsyncGRPOTrainer(weight_transfer=...)``), by a feed."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from psclient.errors import EngineError
from psclient.integrations.vllm_server import VllmServer
from psclient.publisher.published import Published
from psclient.publisher.publisher import Publisher

log = logging.getLogger("psclient")


class WeightTransfer:
    """Publishes the policy, and has engines install each version: TRL's ``WeightTransferProtocol``.

    >>> publisher = psclient.Publisher("ps:50051")
    >>> engines = [VllmServer("http://host:8000", {"server": "ps:50051"})]
    >>> trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(publisher, engines))

    An engine that cannot be reached, or does not take a version, is left out: it stays paused, if it still answers,
    until it has installed a later version. Rollouts that follow the feed by themselves (:func:`psclient.follow`) need
    no engine here.

    Args:
        publisher: of the feed; closed at the end of the training. TRL gathers the tensors of several ranks by itself,
            so the publisher has no ``group``.
        engines: that serve the policy.
        dtype: in which floating-point tensors are published; ``None``: as the trainer has them. Engines in bfloat16
            need no more than bfloat16.

    Attributes:
        published: the version that was published last; ``None`` before the first one.
    """

    def __init__(
        self, publisher: Publisher, engines: Sequence[VllmServer] = (), *, dtype: torch.dtype | None = None
    ) -> None:
        self._publisher, self._dtype = publisher, dtype
        self._engines: Sequence[VllmServer] = tuple(engines)
        self._current: Sequence[VllmServer] = ()  # that are paused, and have the newest version
        self.published: Published | None = None

    def init_weight_transfer(self) -> None:
        """Do nothing: an engine is told of the feed with its first version."""

    def pause(self) -> None:
        """Hold the requests of all engines that can be reached."""
        self._current, _ = _each(self._engines, VllmServer.pause)  # unless a newer version is published

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the tensors, and have the engines that are paused install the version.

        If they cannot be published, the engines have the newest version as they are, and :meth:`resume` has them go on.

        Raises:
            SparsepsError: the version could not be published.
            EngineError: no engine has installed it.
        """
        self.published = self._publisher.publish(self._converted(iterator))
        name = self.published.weight_version
        self._current, failures = _each(self._current, lambda engine: engine.update(name))
        if self._engines and not self._current:
            raise failures[0] if failures else EngineError(self._engines[0].url, "no engine could be paused")

    def resume(self) -> None:
        """Have those engines go on that have the newest version."""
        _each(self._current, VllmServer.resume)

    def destroy(self) -> None:
        """Close the publisher."""
        self._publisher.close()

    def _converted(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in iterator:
            yield name, tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor


def _each(
    engines: Sequence[VllmServer], do: Callable[[VllmServer], None]
) -> tuple[Sequence[VllmServer], Sequence[EngineError]]:
    """Call all engines at the same time; return those that have done it, and the others' errors."""
    if not engines:
        return (), ()

    def attempt(engine: VllmServer) -> EngineError | None:
        try:
            do(engine)
        except EngineError as error:
            log.warning("an engine is left out: %s", error)
            return error
        return None

    with ThreadPoolExecutor(len(engines), "psclient-engines") as pool:
        outcomes = [*zip(engines, pool.map(attempt, engines), strict=True)]
    return [engine for engine, error in outcomes if error is None], [
        error for _, error in outcomes if error is not None
    ]
