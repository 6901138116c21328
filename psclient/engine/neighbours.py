"""The other optimizers of a process: which one a new one takes the place of, and which one forbids it."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from psclient.errors import ConfigurationError


class Optimizing(Protocol):
    """The part of an optimizer that others of its process concern."""

    @property
    def _has_forgotten_model(self) -> bool:
        """Whether nothing but the optimizer refers to its model."""

    def close(self) -> None:
        """Leave the run."""


class Living(Protocol):
    """The part of a worker's life that others of its process concern."""

    @property
    def alive(self) -> bool:
        """Whether this process's worker has not left."""

    def owner(self) -> Optimizing | None:
        """Return the optimizer, if it was not collected."""


@dataclass
class Claim:
    """What a worker of this process is: one place in one run, of one model.

    Attributes:
        server: the shards as they were named.
        places: of shard 0: that name, and the addresses that it leads to, since one server may have several names.
        name: the worker's.
        is_named: whether the script or its environment has named the worker, so that it is one of several on purpose.
        fingerprint: of the model's layout.
        trained: the ids of the parameters in the param groups; the optimizer keeps them alive.
    """

    server: str
    places: set[str]
    name: str
    is_named: bool
    fingerprint: bytes
    trained: set[int]


_claims: list[tuple[Claim, "weakref.ref[Living]"]] = []


def add(claim: Claim, life: Living) -> None:
    """Note a worker that is about to join."""
    _claims[:] = [(each, other) for each, other in _claims if (found := other()) is not None and found.alive]
    _claims.append((claim, weakref.ref(life)))


def is_near(claim: Claim) -> bool:
    """Tell whether another worker of this process is at the same servers."""
    return any(not each.places.isdisjoint(claim.places) for each, _ in _living())


def predecessors(claim: Claim) -> list[tuple[str, Optimizing]]:
    """Return the optimizers, each with its worker's name, whose place a new one takes: a cell was run again, say.

    These are over some of the same parameters, or in the same place of the run with a model that is no longer used.

    Raises:
        ConfigurationError: the two would be one model: the earlier one trains another that is in use.
    """
    found = []
    for other, optimizer in _living():
        is_near = not other.places.isdisjoint(claim.places)
        is_same_place = is_near and other.name == claim.name
        is_one_model = is_near and other.fingerprint == claim.fingerprint
        if not other.trained.isdisjoint(claim.trained):
            found.append((other.name, optimizer))
        elif is_same_place or (is_one_model and not claim.is_named):
            if not optimizer._has_forgotten_model:
                raise ConfigurationError(
                    f"worker {other.name} of this process trains another model at {other.server}, and a run trains one "
                    "model: both would become the same one. Make one optimizer of both, with "
                    "model=torch.nn.ModuleDict(...), or give each model its own server (docs/guide/training.md, "
                    "Several models). If both are workers of one run on purpose, name them: worker=. If the other has "
                    "ended, close() it first"
                )
            found.append((other.name, optimizer))
    return found


def _living() -> Sequence[tuple[Claim, Optimizing]]:
    lives = [(claim, life()) for claim, life in _claims]
    owners = [(claim, life.owner()) for claim, life in lives if life is not None and life.alive]
    return [(claim, optimizer) for claim, optimizer in owners if optimizer is not None]
