"""Where a worker's values, gradients and residuals are: in this process, or with the ranks of a group."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Protocol

import torch

from psclient.compress.gradients import Gradients, Scale, finite
from psclient.compress.groups import ParamGroups
from psclient.compress.host_table import Choice, Sent
from psclient.compress.method import Method, State
from psclient.compress.residuals import Memories
from psclient.compress.selector import Selector
from psclient.model.module import TrainedModel
from psclient.model.replica import Replica
from psclient.report import StepReport
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice


class Values(Protocol):
    """The model's parameters, through flat indices; :class:`~psclient.model.replica.Replica` has them all here."""

    @property
    def layout(self) -> ModelLayout:
        """Of the whole model."""

    def loaded(self) -> str | None:
        """Return the name of a parameter that others have written to."""

    def written(self) -> list[int]:
        """Return the positions of the parameters that others have written to in place."""

    def accept(self) -> None:
        """Note the current values as the known ones."""

    def digest(self) -> bytes:
        """Return 32 bytes that are equal if the values are, and else all but surely not."""

    def not_finite(self) -> str | None:
        """Return the name of the first parameter with a value that is not finite."""

    def sample(self) -> None:
        """Remember the bits of a random block of the trained parameters."""

    def drifted(self) -> str | None:
        """Return the name of the tensor whose block was sampled, if others have written to the block since."""

    def read(self, span: Span) -> Iterable[SparseSlice]:
        """Return the values of a span, ascending, dense, fp32 on the host."""

    def write(self, segments: Sequence[SparseSlice]) -> None:
        """Write an exact reply's values over the parameters'."""

    def add(self, segments: Sequence[SparseSlice]) -> None:
        """Add a top-k reply's differences."""

    def open_fp32(self, span: Span) -> None:
        """Begin to keep fp32 copies of the half-precision parameters inside a span."""


class Selection(Protocol):
    """Selects a push's entries; :class:`~psclient.compress.selector.Selector` does it for tensors that are here."""

    memories: Memories

    @property
    def on_one_device(self) -> bool:
        """Whether launches on one device select from all tensors."""

    def compress(self, group: range, gradients: Gradients, scale: Scale, report: StepReport) -> Sent:
        """Return the entries that a group of tensors sends."""

    def abandon(self) -> None:
        """Restore the entries of groups that :meth:`compress` was not asked for."""

    def take_residuals(self, group: range) -> list[SparseSlice]:
        """Take everything out of these tensors' residuals."""

    def restore(self, slices: Iterable[SparseSlice], *, at_once: bool = True) -> None:
        """Add entries that did not arrive to the residuals again; ``at_once``: the next push selects from them all."""

    def fill_memories(self) -> None:
        """Have every memory that the method keeps between steps."""

    def take_off_unsent(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Take off the parameters what their residuals would send; yields each one, and its values, before it is."""


class Home(Protocol):
    """What an engine needs of the place where the tensors are; called in the engine's thread."""

    @property
    def replica(self) -> Values:
        """The parameters."""

    @property
    def selector(self) -> Selection:
        """The selection, with the residuals."""

    @property
    def spill(self) -> Callable[[Sequence[SparseSlice]], None] | None:
        """What writes a reply of everything in parts, as it comes; ``None``: it is written when it is whole."""

    @property
    def room(self) -> Callable[[Span], torch.Tensor | None]:
        """Returns memory for dense values of a span of a reply, fp32 on the host, if some lies idle between pushes."""

    def finite(self, found: Mapping[int, torch.Tensor], *, waits: bool) -> Gradients:
        """Return a step's gradients; raises :class:`NonFiniteGradientError`, as :func:`finite` does."""

    def check_frozen(self) -> None:
        """Raise :class:`ModelChangedError` if a frozen parameter has other values than at first."""

    def with_norms_of(self, gradients: Gradients) -> Sequence[torch.Tensor]:
        """Return tensors whose norms, together, are that of all gradients of the step."""


class Ranks(Protocol):
    """The ranks of a group that are one worker, as the optimizer on the first one needs them."""

    @property
    def model(self) -> TrainedModel:
        """The whole model."""

    def gradients(self, groups: ParamGroups, positions: range) -> dict[int, torch.Tensor]:
        """Return this rank's blocks of the gradients of trained parameters at these positions, by position."""

    def home(
        self,
        method: Method,
        model: TrainedModel,
        states: MutableMapping[torch.Tensor, State],
        groups: ParamGroups,
        choice: Choice,
    ) -> Home:
        """Make the home of the engine; the arguments are those of :class:`~psclient.compress.selector.Selector`."""


class OneProcess:
    """All tensors are in this process; ``selector`` is of the same model."""

    spill = None

    def __init__(self, model: TrainedModel, selector: Selector) -> None:
        self._model = model
        self.replica: Values = Replica(model.layout, model.parameters)
        self.selector: Selection = selector
        self.room = selector.buffer.idle

    def finite(self, found: Mapping[int, torch.Tensor], *, waits: bool) -> Gradients:
        """See :class:`Home`."""
        return finite(self._model, found, waits=waits)

    def check_frozen(self) -> None:
        """See :class:`Home`."""
        self._model.check_frozen()

    def with_norms_of(self, gradients: Gradients) -> Sequence[torch.Tensor]:
        """See :class:`Home`: the gradients themselves."""
        return list(gradients.values())
