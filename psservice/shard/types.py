"""What goes into the engine and comes out of it, where that is more than a value or two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pscore.model.segment import Segment
from psservice.cluster.leases import Identity
from psservice.sampling.dataset import Share


@dataclass(frozen=True, slots=True)
class JoinOutcome:
    """What a joining worker is told: ``state`` is ready, upload or wait; ``last_push`` is (incarnation, step).

    ``first_step`` is the lowest number that its next push should have; ``load_refused`` tells that the model which the
    worker has loaded does not take the place of the one that is here.
    """

    state: str
    generation: int
    version: int
    last_push: tuple[str, int] | None
    first_step: int = 1
    load_refused: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that a worker's script has loaded: what tells it from others, and whether it replaces a trained one."""

    digest: bytes
    replaces: bool


@dataclass(frozen=True, slots=True)
class Push:
    """A received push, not yet applied; segments in any order, disjoint, inside the shard's span."""

    identity: Identity
    step: int
    generation: int
    base_version: int
    samples: int
    segments: list[Segment]
    messages: Sequence[bytes] = ()
    """The stream as it came, for the journal."""
    learning_rate: float = 0.0
    """That the values carry; 0 where it is not known."""
    finished: Mapping[str, Share] = field(default_factory=dict)
    """Samples that it finishes, by dataset."""
    group_rates: Sequence[float] = ()
    """At which the server's optimizer is to step its param groups; empty for those agreed."""
    run_id: str = ""
    """The run that its worker names."""
