"""The trained part of a user's model: names, layout, buffers; found from ``model`` or from bare parameters."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.errors import ConfigurationError, ModelChangedError
from psclient.model.requirements import (
    local_of,
    require_constant_in_forward,
    require_own_memory,
    require_values,
    require_whole,
)
from psclient.model.wrappers import plain_modules, plain_name
from pscore.model.layout import ModelLayout, TensorSpec, digest_of, layout_of
from pscore.names import tensor_name_fault


class Place(NamedTuple):
    """A module, and the name of one of its tensors."""

    module: torch.nn.Module
    name: str


class NamedBuffers:
    """Buffers that are looked up when they are needed: a module may replace one by another tensor."""

    def __init__(self, found: Sequence[tuple[TensorSpec, Place]]) -> None:
        self.specs = tuple(spec for spec, _ in found)
        self._found = found

    def only(self, wanted: Callable[[TensorSpec], bool]) -> "NamedBuffers":
        """Return some of them."""
        return NamedBuffers([(spec, place) for spec, place in self._found if wanted(spec)])

    def now(self) -> list[torch.Tensor]:
        """Return the modules' current tensors; :class:`ModelChangedError` if one is of another kind."""
        found = []
        for spec, (module, name) in self._found:
            tensor = module._buffers.get(name)
            if tensor is None or tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                is_now = "is gone" if tensor is None else f"is {list(tensor.shape)} {tensor.dtype} now"
                raise ModelChangedError(
                    spec.name,
                    f"{is_now}, and the run has {spec.describe()}",
                    "put a tensor like that in its place, or close() this optimizer and make a new one",
                )
            found.append(tensor)
        return found


@dataclass(frozen=True)
class TrainedModel:
    """A model's tensors in layout order.

    Attributes:
        parameters: every parameter that the server has, each once even if tied.
        frozen: those that need no gradient; the server has their digests.
        uploaded_frozen: positions of parameters that the server has although they needed no gradient at first.
        frozen_writes: how often each frozen one had been written to at the time of its digest.
        places: of each parameter; empty without a model.
        buffers: persistent ones.
    """

    layout: ModelLayout
    parameters: tuple[torch.Tensor, ...]
    frozen: tuple[torch.Tensor, ...]
    uploaded_frozen: frozenset[int]
    frozen_writes: tuple[int, ...]
    places: tuple[Place, ...]
    buffers: NamedBuffers
    module: torch.nn.Module | None

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Elements of each parameter, int64 ``[n]``."""
        return np.diff(self.layout.offsets)

    @cached_property
    def _modules(self) -> list[torch.nn.Module]:
        return [module for module, _ in self.places]

    @cached_property
    def _names(self) -> list[str]:
        return [name for _, name in self.places]

    def positions_of(self, group: Mapping[str, Any]) -> list[int]:
        """Return the positions in the layout of a param group's tensors, ascending; the frozen ones have none."""
        members = {id(parameter) for parameter in group["params"]}
        return [position for position, parameter in enumerate(self.parameters) if id(parameter) in members]

    def refuse_shared(self) -> None:
        """Raise :class:`ConfigurationError` if other processes share a parameter; on CUDA that cannot be told."""
        for spec, parameter in zip(self.layout.parameters, self.parameters, strict=True):
            if parameter.device.type == "cpu" and local_of(parameter).is_shared():  # type: ignore[no-untyped-call]
                raise ConfigurationError(
                    f"{spec.name!r} is in shared memory (share_memory(), or a model that torch.multiprocessing has "
                    "handed to another process): several workers would write the same parameters. In each worker make "
                    "the optimizer of a copy: model = copy.deepcopy(model)"
                )

    def written_frozen(self) -> list[int]:
        """Return the numbers of the frozen parameters that were written to since their digest was computed."""
        counts = zip(self.frozen, self.frozen_writes, strict=True)
        return [number for number, (parameter, known) in enumerate(counts) if writes_to(parameter) != known]

    def check_frozen(
        self, written: Sequence[int] | None = None, digest: Callable[[torch.Tensor], bytes] = digest_of
    ) -> None:
        """Raise :class:`ModelChangedError` if a frozen parameter has other values; reads those that were written to."""
        for number in self.written_frozen() if written is None else written:
            known = self.layout.frozen[number]
            if digest(self.frozen[number]) != known.digest:
                raise ModelChangedError(
                    known.spec.name,
                    "is frozen, and has other values than when the optimizer was made, which the server compares",
                    "load what is frozen before the optimizer is made, on all workers",
                )

    def refuse_averages(self, written: Sequence[int]) -> None:
        """Raise :class:`ModelChangedError` if these, which the loop has written to, have never needed a gradient.

        Such a tensor is the loop's own (a moving average of the weights), and the server would put its value there.
        """
        mine = [n for n in written if n in self.uploaded_frozen and not self.parameters[n].requires_grad]
        if written and len(mine) == len(written):
            raise ModelChangedError(
                self.layout.parameters[mine[0]].name,
                "needs no gradient, and the loop writes to it (a teacher, a moving average), while model= makes it the "
                "server's",
                "keep it out of model=, as docs/guide/frozen.md shows (A teacher)",
            )

    def check(self) -> None:
        """Raise :class:`ModelChangedError` if a parameter was replaced or thawed; costs a look-up for each."""
        present = map(dict.get, map(attrgetter("_parameters"), self._modules), self._names)
        if all(map(is_, present, self.parameters)) and not any(map(attrgetter("requires_grad"), self.frozen)):
            return
        for parameter, known in zip(self.frozen, self.layout.frozen, strict=True):
            if parameter.requires_grad:
                raise ModelChangedError(
                    known.spec.name,
                    "needed no gradient when the optimizer was made, and needs one now: the server does not have it",
                    "make the optimizer anew, in a run of its own, or set upload_frozen=True (PSCLIENT_UPLOAD_FROZEN) "
                    "on all workers if parameters are to be thawed later",
                )
        moved = [
            position
            for position, (module, name) in enumerate(self.places)
            if module._parameters.get(name) is not self.parameters[position]
        ]
        elsewhere = {id(parameter) for parameter in self.module.parameters()} if self.module is not None else ()
        for position in moved:
            if id(self.parameters[position]) not in elsewhere:
                raise ModelChangedError(
                    self.layout.parameters[position].name,
                    "is no longer in its module: another Parameter stands there (load_state_dict(assign=True), say), "
                    "which this optimizer does not train",
                    "copy values into the old one, or make a new optimizer",
                )


def describe(
    model: torch.nn.Module | None,
    groups: Sequence[Mapping[str, Any]],
    *,
    upload_frozen: bool = False,
    in_parts: bool = False,
    digest: Callable[[torch.Tensor], bytes] = digest_of,
) -> TrainedModel:
    """Find the tensors of a model; without one, of param groups, named as they were given or by position.

    With ``upload_frozen`` parameters that need no gradient are the server's, too. With ``in_parts`` parameters may be
    DTensors; ``digest`` returns the SHA-256 of all of a frozen one.

    :class:`ConfigurationError` if a trained parameter is not the model's, or one cannot be trained.
    """
    trained = [parameter for group in groups for parameter in group["params"]]
    places: dict[int, Place] = {}
    buffers: list[tuple[str, Place]] = []
    aliases: dict[str, tuple[str, ...]] = {}
    if model is None:
        names = [name for group in groups for name in group.get("param_names", ())]
        names = names or [f"parameter_{i}" for i in range(len(trained))]
        named = list(zip(map(plain_name, names), trained, strict=True))
    elif not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"model= must be a torch.nn.Module, not {type(model).__name__}")
    else:
        names_of: dict[torch.Tensor, list[str]] = {}
        for prefix, module in plain_modules(model):
            for name, entry in module._parameters.items():
                if entry is not None:
                    names_of.setdefault(entry, []).append(f"{prefix}.{name}" if prefix else name)
                    places.setdefault(id(entry), Place(module, name))
        named = [(first, parameter) for parameter, (first, *_) in names_of.items()]
        aliases = {first: tuple(others) for first, *others in names_of.values() if others}
        buffers = _persistent_buffers(model)
        if any(id(parameter) not in places for parameter in trained):
            raise ConfigurationError("params holds a parameter that model does not have; pass the model they come from")
    tensors = [(name, place.module.get_buffer(place.name)) for name, place in buffers]
    require_whole(named, tensors, in_parts=in_parts)
    frozen = [(name, parameter) for name, parameter in named if not (upload_frozen or parameter.requires_grad)]
    named = [(name, parameter) for name, parameter in named if upload_frozen or parameter.requires_grad]
    require_values(named, frozen, tensors)
    require_constant_in_forward(() if model is None else plain_modules(model))
    try:
        layout = layout_of(named, tensors, aliases, frozen, digest)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    for spec in layout.tensors():
        for name in (spec.name, *spec.aliases):
            if fault := tensor_name_fault(name):
                raise ConfigurationError(fault)
    if layout.size == 0:
        raise ConfigurationError("there is nothing to train: no parameter that needs a gradient has any element")
    found = TrainedModel(
        layout,
        parameters=tuple(parameter for _, parameter in named),
        frozen=tuple(parameter for _, parameter in frozen),
        uploaded_frozen=frozenset(n for n, (_, parameter) in enumerate(named) if not parameter.requires_grad),
        frozen_writes=tuple(writes_to(parameter) for _, parameter in frozen),
        places=tuple(places[id(parameter)] for _, parameter in named) if model is not None else (),
        buffers=NamedBuffers([(spec, place) for spec, (_, place) in zip(layout.buffers, buffers, strict=True)]),
        module=model,
    )
    require_own_memory(*([(name, local_of(each)) for name, each in kind] for kind in (named, frozen, tensors)))
    found.refuse_shared()
    return found


def writes_to(parameter: torch.Tensor) -> int:
    """Return how often a tensor has been written to in place; 0 for one that keeps no count."""
    mine = local_of(parameter)
    return 0 if mine.is_inference() else mine._version


def edits_of(parameters: Collection[torch.Tensor]) -> list[int]:
    """Return :func:`writes_to` of each, fast."""
    try:
        return [parameter._version for parameter in parameters]
    except RuntimeError:  # an inference tensor
        return [writes_to(parameter) for parameter in parameters]


def _persistent_buffers(model: torch.nn.Module) -> list[tuple[str, Place]]:
    found: dict[int, tuple[str, Place]] = {}
    for prefix, module in plain_modules(model):
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                found.setdefault(id(tensor), (f"{prefix}.{name}" if prefix else name, Place(module, name)))
    return list(found.values())
