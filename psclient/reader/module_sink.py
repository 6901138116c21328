"""A module that follows: its parameters and buffers are overwritten in place, so that references to them stay valid."""

from collections.abc import Callable, Iterator, Sequence

import torch

from psclient.errors import ConfigurationError, from_refusal
from psclient.model.replica import Replica
from psclient.model.wrappers import plain_modules
from psclient.reader.sink import MisfitError, Sink, StagedCut
from pscore.model.buffers import pack
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.model.sparse_slice import SparseSlice, by_tensor
from pscore.names import shown
from pscore.reader.cut import Cut
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.messages import READER_DTYPES

Rename = Callable[[str], str]
"""Returns what the module calls a tensor, from the name that the run has for it."""


class ModuleSink(Sink):
    """Holds a cut in a module, on whatever devices its tensors are.

    Between commits nobody else may write to these tensors. A commit that fails half-way is undone. Raises
    :class:`ConfigurationError` if ``module`` is none.
    """

    def __init__(self, module: torch.nn.Module, rename: Rename | None = None) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ConfigurationError(f"a module follows, and not {type(module).__name__}: pass the module itself")
        self._module, self._rename = module, rename or (lambda name: name)
        self._held: Cut | None = None
        self._layout: ModelLayout | None = None
        self._replica: Replica | None = None
        self._places: list[tuple[int, int, torch.dtype]] = []
        self._staged: StagedCut | None = None

    def dtype(self, layout: ModelLayout | None) -> torch.dtype | None:
        """Return the one 16-bit type in which the module has what the run has in fp32; ``None`` if there is none."""
        if layout is not None and layout.word_bytes:
            return None
        named = self._named("_parameters")
        specs = layout.parameters if layout is not None else ()
        names = [
            self._rename(name) for spec in specs if spec.dtype == torch.float32 for name in (spec.name, *spec.aliases)
        ]
        tensors = named.values() if layout is None else (named[name] for name in names if name in named)
        found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return found.pop() if len(found) == 1 and found <= {*READER_DTYPES} else None

    def open(self, layout: ModelLayout) -> Cut | None:
        """Find the module's tensors; return the cut that they hold."""
        tensors = self._tensors_of(layout)
        self._buffers_of(layout.buffers)  # so that one that does not fit is told at once
        places = _places_of(tensors)
        is_other = self._layout is None or layout.fingerprint != self._layout.fingerprint or places != self._places
        if is_other or self._replica is None or self._replica.written():
            self._replica, self._held = _replica_of(layout, tensors), None
        self._layout, self._places = layout, places
        return self._held

    def is_current(self) -> bool:
        """Tell whether the module has the parameters that were found, in the same memory, and nobody has written there.

        ``half()`` and others replace them. Writes through ``.data`` leave no trace. Buffers may change at any time:
        they are found and compared anew for each cut.
        """
        if self._layout is None or self._replica is None or _places_of(self._tensors_of(self._layout)) != self._places:
            return False
        is_overwritten = self._staged is not None and self._staged.is_whole
        return is_overwritten or not self._replica.written()

    def read(self, entries: SparseSlice) -> SparseSlice:
        """Return the module's values at the places of these entries."""
        assert self._layout is not None
        assert self._replica is not None
        values = torch.empty(entries.entries, dtype=self._layout.value_dtype, device="cpu")
        for first, last, found in _parts(self._layout, self._replica.parameters, entries):
            values[first:last] = found
        return SparseSlice(entries.span, entries.offsets, values)

    def buffers(self) -> bytes:
        """Return the module's buffers as they are: a forward pass in training mode changes them.

        Nothing if some are of 16 bits and the run's of 32: they come with each version.
        """
        assert self._layout is not None
        buffers = self._buffers_of(self._layout.buffers)
        is_same = all(mine.dtype == spec.dtype for mine, spec in zip(buffers, self._layout.buffers, strict=True))
        return pack(buffers) if is_same else b""

    def stage(self, staged: StagedCut) -> None:
        """Keep what is to be written."""
        self._staged = staged

    def commit(self) -> None:
        """Write the values; after an error the former ones."""
        staged, replica, self._staged = self._staged, self._replica, None
        assert staged is not None
        assert replica is not None
        specs = staged.layout.buffers if staged.buffers is not None else ()
        buffers = self._buffers_of(specs)
        values = _narrowed(specs, staged.buffers or (), buffers)
        before = [buffer.detach().clone() for buffer in buffers]
        try:
            replica.write(staged.changes)
            _write(buffers, values)
        except BaseException:
            if len(staged.before) < len(staged.changes):  # the first cut: there is nothing to go back to
                self._held = None
            replica.write(staged.before)
            _write(buffers, before)
            raise
        self._held = staged.cut

    def abort(self) -> None:
        """Drop what is staged."""
        self._staged = None

    def close(self) -> None:
        """Do nothing: the module stays as it is."""

    def _named(self, kind: str) -> dict[str, torch.Tensor]:
        """Return the module's tensors of a kind by all their names, without those of wrappers."""
        return {
            f"{path}.{name}" if path else name: tensor
            for path, module in plain_modules(self._module)
            for name, tensor in getattr(module, kind).items()
            if tensor is not None
        }

    def _tensors_of(self, layout: ModelLayout) -> list[torch.Tensor]:
        named = self._named("_parameters")
        all_named = self._named("_buffers") | named if layout.word_bytes else named  # a feed has buffers among its own
        tensors = [self._find(spec, all_named) for spec in layout.parameters]
        for spec, tensor in zip(layout.parameters, tensors, strict=True):
            for alias in spec.aliases:
                if named.get(self._rename(alias), tensor) is not tensor:
                    raise MisfitError(
                        f"{shown(alias)} is another name of {shown(spec.name)} in the run, and a tensor of its own in "
                        "this module: tie the two before you follow"
                    )
        known = {id(tensor) for tensor in tensors}
        frozen = {self._rename(name) for each in layout.frozen for name in (each.spec.name, *each.spec.aliases)}
        for name, tensor in named.items():
            if id(tensor) not in known and name not in frozen:
                raise MisfitError(
                    f"the run has no parameter {shown(name)}: build the module that the workers train, or pass rename="
                )
        return tensors

    def _buffers_of(self, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        named = self._named("_buffers")
        return [self._find(spec, named, may_be_narrow=True) for spec in specs]

    def _find(self, spec: TensorSpec, named: dict[str, torch.Tensor], *, may_be_narrow: bool = False) -> torch.Tensor:
        names = [self._rename(name) for name in (spec.name, *spec.aliases)]
        found = next((named[name] for name in names if name in named), None)
        if found is None:
            raise MisfitError(
                f"the module has no {shown(names[0])}, which the run has as {spec.describe()}: build the module that "
                "the workers train, or pass rename="
            )
        if found.is_meta:
            raise MisfitError(f"{shown(names[0])} is on the meta device: call module.to_empty(device=...) before")
        is_narrow = may_be_narrow and spec.dtype == torch.float32 and found.dtype in READER_DTYPES
        if tuple(found.shape) != spec.shape or not (found.dtype == spec.dtype or is_narrow):
            is_here = TensorSpec(names[0], tuple(found.shape), found.dtype).describe()
            raise MisfitError(
                f"the module has {is_here}, and the run {spec.describe()}: both must be alike, or the module must have "
                "all that is float32 in the run in float16, or in bfloat16. Convert all of it before you follow: "
                "module.bfloat16(), module.half(), module.float()"
            )
        return found


def _replica_of(layout: ModelLayout, tensors: Sequence[torch.Tensor]) -> Replica:
    """Return the tensors' replica: of their words, if they are a feed's."""
    if not layout.word_bytes:
        return Replica(layout, tensors)
    for spec, tensor in zip(layout.parameters, tensors, strict=True):
        if not tensor.is_contiguous():
            raise ConfigurationError(
                f"{shown(spec.name)} is not contiguous, and the words of a feed are written as they lie"
            )
    specs = [TensorSpec(spec.name, (layout.length(spec),), layout.value_dtype) for spec in layout.parameters]
    views = [tensor.detach().view(-1).view(layout.value_dtype) for tensor in tensors]
    return Replica(ModelLayout(tuple(specs), word_bytes=layout.word_bytes), views)


def _places_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, torch.dtype]]:
    return [(id(tensor), tensor.data_ptr(), tensor.dtype) for tensor in tensors]


def _narrowed(
    specs: Sequence[TensorSpec], values: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return buffers' values in the types of their targets; raises ``NON_FINITE`` if one would be infinite."""
    found = [value.to(target.dtype) for value, target in zip(values, targets, strict=True)]
    for spec, value, narrow in zip(specs, values, found, strict=True):
        if narrow.dtype != value.dtype and not torch.equal(narrow.isfinite(), value.isfinite()):
            is_half = narrow.dtype == torch.float16
            kind, wider = ("float16", "bfloat16") if is_half else ("bfloat16", "float32")
            what = f"the buffer {shown(spec.name)} has values beyond {kind}: follow in {wider}"
            raise from_refusal(Rejected(ErrorCode.NON_FINITE, what))
    return found


def _write(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.detach().copy_(value)


def _parts(
    layout: ModelLayout, tensors: Sequence[torch.Tensor], entries: SparseSlice
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield, tensor by tensor, which of the entries lie in it, and its values there."""
    last = 0
    for position, part in by_tensor(layout, entries):
        first, last = last, last + part.entries
        start = part.span.start - layout.offsets[position]
        flat = tensors[position].detach().reshape(-1)
        if part.offsets is None:
            found = flat[start : start + part.span.length]
        elif flat.is_cpu and flat.dtype == torch.float32:
            found = torch.from_numpy(flat.numpy()[part.offsets.numpy() + start])
        else:
            found = flat[(part.offsets + start).to(flat.device)]
        yield first, last, found.cpu().to(layout.value_dtype)
