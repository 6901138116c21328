"""A shard of WAGMA-SGD: a model for every worker, averaged in groups (Li et al., IEEE TPDS 2021, algorithm 2).

A worker's own model is an ordinary :class:`ModelShard`: pushes of the worker and averages of groups change that model,
and pulls of the worker are answered from it. The run's model is the mean of all, computed on demand.
"""

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from pscore.model.sparse_slice import SparseSlice
from pscore.telemetry.tracing import traced
from psservice.memory_budget import Kept
from psservice.model.changelog import ALMOST_ALL
from psservice.model.copies import TensorCopy, mean_of
from psservice.model.parameters import GroupDecision, ModelShard
from psservice.model.training_mode import TrainingMode
from psservice.rules.base import PLAIN, PushContext, RuleState
from psservice.rules.changed import ChangedIndices, offset_dtype
from psservice.wagma.group_rounds import Frozen, GroupRounds


class OtherModels(NamedTuple):
    """The other models of a round, with which a late worker is averaged: their sum (fp32 ``[n]``) and number."""

    total: torch.Tensor
    number: int


@dataclass(slots=True)
class Replica:
    """One worker's model, on the server.

    Attributes:
        late_for: by iteration, the frozen rounds for which the worker was late.
        unsynced: the number of the model that replaced the old one; 0 once the worker has acknowledged a reply from it.
            Until then a version that the worker names may be one of the old model.
    """

    model: ModelShard
    incarnation: str
    unsynced: int = 0
    late_for: dict[int, OtherModels] = field(default_factory=dict)


class GroupedShard(ModelShard):
    """A model for each worker over one span of the layout, and the rounds in which they are averaged.

    Called on the apply thread. A worker takes part from the decision "enter" to "leave"; its model begins as the mean.
    ``version`` counts the pushes of all; that of a worker's own model is the one at which that model last changed.
    Delays are not compensated.
    """

    def __post_init__(self) -> None:
        assert self.mode.groups is not None
        self.settings = replace(self.settings, delay_compensation=0.0)
        super().__post_init__()
        self.replicas: dict[str, Replica] = {}
        self.rounds = GroupRounds(self.mode.groups, self.clock)
        self._replaces = self.mode.groups.late == "replace"
        self._replacements = itertools.count(1)
        self._is_over = False

    @property
    def first_step(self) -> int:
        """The number of a new worker's first push: that of the next iteration, so that every shard counts alike."""
        return self.rounds.newest + 2

    def open_values(self) -> TensorCopy:
        """Open a copy of the mean over the workers' models; of the last one if nobody takes part. fp32 ``[n]``."""
        if not self.replicas or self._is_over:
            return super().open_values()
        return mean_of([self.copies.open(self.replicas[worker].model.theta) for worker in sorted(self.replicas)])

    @property
    def versions_name_values(self) -> bool:
        """Whether the mean is the same at the same version: averages of groups round, and a worker may leave."""
        return False

    def changes_between(self, version: int, until: int) -> list[ChangedIndices] | None:
        """Return ``None``: every model changes, each by itself, and so does their mean."""
        return None

    @traced("apply")
    def take(self, worker: str, push: SparseSlice | None, context: PushContext = PLAIN, step: int = 0) -> int:
        """Change a worker's own model; if its round is frozen, average the two as the rule for late workers says."""
        replica, iteration = self.replicas[worker], step - 1
        own = replica.model
        own.version = self.version
        self.version = own.apply(push)
        waits = self.rounds.arrive(worker, iteration)
        others = replica.late_for.get(iteration)
        replica.late_for = {t: each for t, each in replica.late_for.items() if t > iteration}
        if others is not None and not waits:
            self._replace(own, (others.total + own.theta).div_(others.number + 1))
        return self.version

    def decide(self, kind: GroupDecision, worker: str, incarnation: str = "", iteration: int = 0) -> None:
        """Apply a decision; raises ``ValueError`` if the decision makes no sense."""
        if kind == "enter":
            replica = self._add(worker, incarnation, self.current(), self.version)
            replica.unsynced = next(self._replacements)
            self.rounds.enter(worker)
        elif kind == "leave":
            if worker not in self.replicas:
                raise ValueError(f"{worker!r} takes no part")
            last = self.replicas.pop(worker)
            if not self.replicas:
                self.copies.overwrites(self.theta, None)
                self.theta.copy_(last.model.theta)
            self.rounds.leave(worker)
        elif kind == "freeze":
            self._average(self.rounds.freeze(iteration, worker))
        else:
            raise ValueError(f"decisions of kind {kind!r} are not known to this version of the server")

    def kept(self) -> Kept:
        """Return what is kept for answers, of every worker's model; from any thread."""
        replicas = [*self.replicas.values()]
        return Kept(
            self.copies.nbytes,
            {name: nbytes for each in replicas for name, nbytes in each.model.replies.occupied().items()},
        )

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sums that are kept for late workers; from any thread."""
        replicas = [*self.replicas.values()]
        sums = {id(others.total): others.total.nbytes for each in replicas for others in [*each.late_for.values()]}
        return sum(sums.values())

    def bytes_to_freeze(self, frozen: Frozen) -> int:
        """Return the bytes of the sums that are kept from a round's freeze on."""
        own = len(frozen.stale) if self._replaces else 0
        common = bool(frozen.absent or (frozen.stale and not self._replaces))
        return (own + common) * self.theta.nbytes

    def forget_replies(self) -> None:
        """Drop the replies that callers share; from any thread."""
        for replica in [*self.replicas.values()]:
            replica.model.replies.clear()

    def waiting(self) -> set[str]:
        """Return the workers that wait for their round, or were dropped with one and have not arrived again."""
        return self.rounds.waiting()

    def begin_rounds_anew(self, dropped: Collection[str]) -> None:
        """Drop open rounds, and open none over these workers until they arrive again."""
        self.rounds.begin_anew(dropped)
        for replica in self.replicas.values():
            replica.late_for = {}

    def finish(self) -> None:
        """Set every model to the mean: the run is over, and there are no more rounds."""
        mean = self.current()
        self.copies.overwrites(self.theta, None)
        self.theta.copy_(mean)
        self._is_over = True
        self.begin_rounds_anew(())
        for replica in self.replicas.values():
            self._replace(replica.model, self.theta)
            replica.unsynced = next(self._replacements)

    def export(self) -> RuleState:
        """Return every worker's model, the sums for late workers, and the open rounds."""
        workers: list[dict[str, Any]] = []
        tensors: dict[str, torch.Tensor] = {}
        for number, (worker, replica) in enumerate(sorted(self.replicas.items())):
            workers.append(
                {
                    "worker": worker,
                    "incarnation": replica.incarnation,
                    "version": replica.model.version,
                    "unsynced": replica.unsynced > 0,
                    "kept": {str(iteration): others.number for iteration, others in replica.late_for.items()},
                }
            )
            tensors[f"{number}.model"] = replica.model.theta
            tensors |= {f"{number}.kept.{t}": others.total for t, others in replica.late_for.items()}
        return RuleState({"workers": workers, "rounds": self.rounds.export(), "is_over": self._is_over}, tensors)

    def restore(self, state: RuleState) -> None:
        """Restore an exported state; raises ``ValueError`` or ``KeyError`` if the state does not fit."""
        if not state.plain:
            return
        for number, found in enumerate(state.plain["workers"]):
            own = self._fitting(state.tensors[f"{number}.model"])
            replica = self._add(str(found["worker"]), str(found["incarnation"]), own, int(found["version"]))
            if found["unsynced"]:
                replica.unsynced = next(self._replacements)
            replica.late_for = {
                int(iteration): OtherModels(self._fitting(state.tensors[f"{number}.kept.{iteration}"]), int(count))
                for iteration, count in found["kept"].items()
            }
        self.rounds.restore(state.plain["rounds"])
        self._is_over = bool(state.plain["is_over"])

    def _add(self, worker: str, incarnation: str, values: torch.Tensor, version: int) -> Replica:
        generation, settings, mode = self.generation, self.settings, TrainingMode()
        model = ModelShard(
            self.layout,
            self.span,
            values,
            generation=generation,
            version=version,
            settings=settings,
            mode=mode,
            copies=self.copies,
        )
        self.replicas[worker] = Replica(model, incarnation)
        return self.replicas[worker]

    def _average(self, frozen: Frozen) -> None:
        """Average the models of a frozen round, set the fresh ones to that, and keep the sum for the other members."""
        included = sorted((*frozen.fresh, *frozen.stale))
        total = self._sum(included)
        for worker in (*frozen.stale, *frozen.absent):
            replica, others = self.replicas[worker], OtherModels(total, len(included))
            if worker in frozen.stale and self._replaces:
                others = OtherModels(total - replica.model.theta, len(included) - 1)
            replica.late_for[frozen.iteration] = others
        if len(included) > 1:
            mean = total / len(included)
            for worker in frozen.fresh:
                self._replace(self.replicas[worker].model, mean)

    def _sum(self, workers: Iterable[str]) -> torch.Tensor:
        """Add models up in the order of names: the same bits in whatever order the workers arrived."""
        first, *others = sorted(workers)
        total = self.replicas[first].model.theta.clone()
        for worker in others:
            total.add_(self.replicas[worker].model.theta)
        return total

    def _replace(self, own: ModelShard, values: torch.Tensor) -> None:
        """Set a worker's model to other values; the log has the entries that differ."""
        differs = values.view(torch.int32) != own.theta.view(torch.int32)
        everything = int(differs.count_nonzero()) > ALMOST_ALL * values.numel()
        changed = None if everything else differs.nonzero().view(-1).to(offset_dtype(self.span.length))
        # Values, log, version: a reader beside the apply thread must find a version's values, and its changes.
        own.replies.clear()
        own.changes += 1
        own.copies.overwrites(own.theta, None if changed is None else changed.long())
        own.theta.copy_(values)
        own.changelog.append(self.version, changed)
        own.version = self.version
        own.replies.clear()
        own.changes += 1

    def _fitting(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32 or tensor.shape != self.theta.shape:
            raise ValueError(f"a model of {list(tensor.shape)} {tensor.dtype} does not fit {list(self.theta.shape)}")
        return tensor.to(self.theta.device)
