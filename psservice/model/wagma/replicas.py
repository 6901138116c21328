"""A shard of WAGMA-SGD: a model for every worker, averaged in groups (Li et al., IEEE TPDS 2021, algorithm 2).

A worker's own model is an ordinary :class:`ModelShard`: the worker's push changes it, and so does the average of the
group; a pull is answered from it like any other. For all of them stands their mean, which is computed when asked for.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.telemetry.tracing import traced
from psservice.model.changelog import ALMOST_ALL
from psservice.model.parameters import ModelShard
from psservice.model.training_mode import TrainingMode
from psservice.model.update.base import PLAIN, PushContext, RuleState
from psservice.model.wagma.rounds import Decision, Frozen, WagmaRounds
from psservice.settings import ShardSettings


@dataclass(frozen=True, slots=True)
class Kept:
    """What a late worker is averaged with: the sum (fp32 ``[n]``) and the number of the other models of a round."""

    others: torch.Tensor
    count: int


class GroupedShard(ModelShard):
    """A model for each worker over one span of the layout, and the rounds in which they are averaged.

    Called on the writer thread. A worker takes part from the decision "enter" to "leave"; its model begins as the mean.
    ``version`` counts the pushes of all; that of a worker's own model is the one at which that model last changed.
    Delays are not compensated. Arguments as for :class:`ModelShard`.

    Attributes:
        rounds: which workers have arrived in which round.
        incarnations: of the workers that take part.
        unsynced: the number of the new model, by worker whose model was replaced and who has not acknowledged a reply
            from the new model: a version that such a worker names may be that of the old model.
    """

    def __init__(
        self,
        layout: ModelLayout,
        span: Span,
        values: torch.Tensor,
        *,
        generation: int,
        version: int,
        settings: ShardSettings,
        mode: TrainingMode,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert mode.groups is not None
        settings = replace(settings, delay_compensation=0.0)
        super().__init__(layout, span, values, generation=generation, version=version, settings=settings, mode=mode)
        self._replaces = mode.groups.late == "replace"
        self._models: dict[str, ModelShard] = {}
        self._kept: dict[str, dict[int, Kept]] = {}
        self.rounds = WagmaRounds(mode.groups, clock)
        self.incarnations: dict[str, str] = {}
        self.unsynced: dict[str, int] = {}
        self._model_id = 0
        self._is_over = False

    @property
    def first_step(self) -> int:
        """The number of a new worker's first push: that of the next iteration, so that every shard counts alike."""
        return self.rounds.newest + 2

    def seen_by(self, worker: str) -> ModelShard:
        """Return a worker's own model."""
        return self._models[worker]

    def current(self) -> torch.Tensor:
        """Return the mean over the workers' models; the last one where nobody takes part. fp32 ``[n]``."""
        if self._models and not self._is_over:
            self.theta.copy_(self._sum(self._models)).div_(len(self._models))
        return self.theta.clone()

    @property
    def is_asynchronous(self) -> bool:
        """Staleness counts the pushes of all, and says nothing of a worker's own model."""
        return False

    @property
    def versions_are_pushes(self) -> bool:
        """Versions are pushes to different models: nothing may be concluded from earlier ones."""
        return False

    @traced("apply")
    def take(self, worker: str, push: SparseSlice | None, context: PushContext = PLAIN, step: int = 0) -> int:
        """Change a worker's own model; if its round is frozen, average the two as the rule for late workers says."""
        own, iteration = self._models[worker], step - 1
        if push is not None:
            push = self._corrected(push, context)
        own.version = self.version
        self.version = own.apply(push, PushContext(samples=context.samples))
        waits = self.rounds.arrive(worker, iteration)
        kept = self._kept[worker]
        place = kept.get(iteration)
        self._kept[worker] = {t: other for t, other in kept.items() if t > iteration}
        if place is not None and not waits:
            self._replace(own, (place.others + own.theta).div_(place.count + 1))
        return self.version

    def decide(self, decision: Decision) -> None:
        """Apply a decision; raises ``ValueError`` where it makes no sense."""
        worker = decision.worker
        if decision.kind == "enter":
            self._models[worker] = self._new(self.current(), self.version)
            self._kept[worker] = {}
            self.incarnations[worker] = decision.incarnation
            self._mark_unsynced(worker)
            self.rounds.enter(worker)
        elif decision.kind == "leave":
            self._leave(worker)
        elif decision.kind == "freeze":
            self._freeze(self.rounds.decide(self.rounds.open_round(decision.iteration, worker)))
        else:
            raise ValueError(f"decisions of kind {decision.kind!r} are not known to this version of the server")

    def waiting(self) -> set[str]:
        """Return the workers that wait for their round, or were dropped with one and have not arrived again."""
        return self.rounds.waiting()

    def begin_rounds_anew(self, dropped: Collection[str]) -> None:
        """Drop open rounds, and open none over these workers until they arrive again."""
        self.rounds.begin_anew(dropped)
        self._kept = {worker: {} for worker in self._kept}

    def finish(self) -> None:
        """Set every model to the mean: the run is over, and there are no more rounds."""
        self.current()
        self._is_over = True
        self.rounds.abandon()
        for worker, own in self._models.items():
            own.theta.copy_(self.theta)
            self._kept[worker] = {}
            self._mark_unsynced(worker)

    def export(self) -> RuleState:
        """Copy every worker's model, what late workers will need, and the open rounds."""
        workers: list[dict[str, Any]] = []
        tensors: dict[str, torch.Tensor] = {}
        for number, worker in enumerate(sorted(self._models)):
            own, kept = self._models[worker], self._kept[worker]
            workers.append(
                {
                    "worker": worker,
                    "incarnation": self.incarnations[worker],
                    "version": own.version,
                    "unsynced": worker in self.unsynced,
                    "kept": {str(iteration): place.count for iteration, place in kept.items()},
                }
            )
            tensors[f"{number}.model"] = own.theta.clone()
            tensors |= {f"{number}.kept.{iteration}": place.others.clone() for iteration, place in kept.items()}
        return RuleState({"workers": workers, "rounds": self.rounds.export(), "is_over": self._is_over}, tensors)

    def restore(self, state: RuleState) -> None:
        """Restore what :meth:`export` returned; raises ``ValueError`` or ``KeyError`` where it does not fit."""
        if not state.plain:
            return
        for number, found in enumerate(state.plain["workers"]):
            worker = str(found["worker"])
            self._models[worker] = self._new(self._fitting(state.tensors[f"{number}.model"]), int(found["version"]))
            self.incarnations[worker] = str(found["incarnation"])
            if found["unsynced"]:
                self._mark_unsynced(worker)
            self._kept[worker] = {
                int(iteration): Kept(self._fitting(state.tensors[f"{number}.kept.{iteration}"]), int(count))
                for iteration, count in found["kept"].items()
            }
        self.rounds.restore(state.plain["rounds"])
        self._is_over = bool(state.plain["is_over"])

    def _mark_unsynced(self, worker: str) -> None:
        self._model_id += 1
        self.unsynced[worker] = self._model_id

    def _leave(self, worker: str) -> None:
        if worker not in self._models:
            raise ValueError(f"{worker!r} takes no part")
        if len(self._models) == 1:
            self.theta.copy_(self._models[worker].theta)
        del self._models[worker], self._kept[worker], self.incarnations[worker]
        self.unsynced.pop(worker, None)
        self.rounds.leave(worker)

    def _freeze(self, frozen: Frozen) -> None:
        """Average over a round, set the fresh models to that, and keep what the other members will need."""
        included = sorted((*frozen.fresh, *frozen.stale))
        total = self._sum(included)
        for worker in (*frozen.stale, *frozen.absent):
            kept = Kept(total, len(included))
            if worker in frozen.stale and self._replaces:
                kept = Kept(total - self._models[worker].theta, len(included) - 1)
            self._kept[worker][frozen.iteration] = kept
        if len(included) > 1:
            mean = total / len(included)
            for worker in frozen.fresh:
                self._replace(self._models[worker], mean)
        self.rounds.froze(frozen)

    def _sum(self, workers: Iterable[str]) -> torch.Tensor:
        """Add models up in the order of names: the same bits in whatever order the workers arrived."""
        first, *others = sorted(workers)
        total = self._models[first].theta.clone()
        for worker in others:
            total.add_(self._models[worker].theta)
        return total

    def _replace(self, own: ModelShard, values: torch.Tensor) -> None:
        """Set a worker's model to other values; the log has the entries that differ."""
        differs = values.view(torch.int32) != own.theta.view(torch.int32)
        everything = int(differs.count_nonzero()) > ALMOST_ALL * values.numel()
        changed = None if everything else differs.nonzero().view(-1).to(self._offset_dtype)
        # Values, log, version: a reader beside the writer must find a version's values, and its changes.
        own.theta.copy_(values)
        own.changelog.append(self.version, changed)
        own.version = self.version

    def _new(self, values: torch.Tensor, version: int) -> ModelShard:
        return ModelShard(
            self.layout,
            self.span,
            values,
            generation=self.generation,
            version=version,
            settings=self.settings,
            mode=TrainingMode(),
        )

    def _fitting(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32 or tensor.shape != self.theta.shape:
            raise ValueError(f"a model of {list(tensor.shape)} {tensor.dtype} does not fit {list(self.theta.shape)}")
        return tensor.to(self.theta.device)


def shard_kind(mode: TrainingMode) -> type[ModelShard]:
    """Return the kind of shard that a training mode needs."""
    return ModelShard if mode.groups is None else GroupedShard
