"""The replica: the model's parameters as places in the flat layout.

Between replies the replica never changes: a worker's own update returns from the server. Parameters are written in
place, so the user's references stay valid. If the user gives a parameter other memory, its values must be the same:
a reply has the changes since the last one, and nothing about the rest.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from psclient.errors import ModelChangedError
from psclient.model.memory import first_shared
from psclient.model.module import edits_of
from psclient.model.scatter import scatter
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice, by_tensor
from pscore.selection.cuda import device_kernels
from pscore.selection.cuda.launches import SCATTERED_BYTES, TARGET, DeviceKernels
from pscore.selection.host.segments import KINDS
from pscore.wire.dense import bytes_of

DIGEST_BLOCK = 1 << 18
"""Elements that share a checksum of 32 bits, in a digest."""

_FETCHED = 64 * DIGEST_BLOCK  # elements that are brought from a device at once: 64 MiB of fp32


class Replica:
    """Reads and writes a model's parameters, which are in layout order and on any devices, through flat indices."""

    def __init__(
        self,
        layout: ModelLayout,
        parameters: Sequence[torch.Tensor],
        on_device: Callable[[torch.device], DeviceKernels | None] = device_kernels,
    ) -> None:
        self.layout = layout
        self.parameters = tuple(parameters)
        self._starts = np.array(layout.offsets)
        self._fp32: dict[int, torch.Tensor] = {}
        """fp32 copies of half-precision parameters, by position; only in top-k mode."""
        self._known = [parameter.detach() for parameter in self.parameters]
        """Aliases of the parameters' memory when it was last checked; they tell a copy from a change."""
        self._places = _places_of(self._known)
        """Where the aliases lie, with strides and dtypes."""
        devices = dict.fromkeys(parameter.device for parameter in self.parameters)
        self._kernels = {device: found for device in devices if (found := on_device(device)) is not None}
        """Kernels that write to all tensors of a device at once."""
        numbers = {device: number for number, device in enumerate(self._kernels)}
        self._devices = np.array([numbers.get(parameter.device, -1) for parameter in self.parameters])
        """The number of each parameter's device among those that have kernels; -1 for another."""
        self._addresses = np.zeros(len(self.parameters), np.int64)
        """Those of fp32 tensors on the host that are contiguous; 0 of a tensor that loops do not write to."""
        self._targets = np.zeros(len(self.parameters), TARGET)
        """Contiguous tensors, as kernels write to them; of the rest the address is 0."""
        for position, known in enumerate(self._known):
            self._locate(position, known)
        self._edits = edits_of(self.parameters)
        """How often each parameter had been written to when the last write that is known here was done."""
        self._chance = random.Random(0)  # of its own: a program's random numbers stay its own
        self._sample: tuple[int, int, int] | None = None
        """Of a block that was read last: its tensor's position, where it starts in it, and its checksum."""

    def loaded(self) -> str | None:
        """Return the name of a parameter that others have written to; costs next to nothing.

        The values may still be the same. Writing through ``parameter.data`` leaves no trace, but for :meth:`drifted`. A
        parameter of another dtype, shape or device raises :class:`ModelChangedError`, here and in :meth:`accept`.
        """
        for position in self._moved():
            if not torch.equal(self.parameters[position], self._known[position]):
                return self.layout.parameters[position].name
            self._adopt(position)
        edits = edits_of(self.parameters)
        if edits == self._edits:
            return None
        position = next(n for n, (new, old) in enumerate(zip(edits, self._edits, strict=True)) if new != old)
        return self.layout.parameters[position].name

    def written(self) -> list[int]:
        """Return the positions of the parameters that others have written to in place."""
        counts = zip(edits_of(self.parameters), self._edits, strict=True)
        return [position for position, (now, known) in enumerate(counts) if now != known]

    def digest(self) -> bytes:
        """Return 32 bytes that are equal if the values are, and else all but surely not; reads all parameters."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            for part in torch.split(parameter.detach().reshape(-1), _FETCHED):
                for block in torch.split(part.cpu(), DIGEST_BLOCK):
                    digest.update(crc32(bytes_of(block)).to_bytes(4, "little"))
        return digest.digest()

    def not_finite(self) -> str | None:
        """Return the name of the first parameter with a value that is not finite; reads all parameters."""
        for spec, parameter in zip(self.layout.parameters, self.parameters, strict=True):
            # An extreme is infinite if a value is, and no number if a value is none; isfinite() takes 18 times as long.
            if parameter.numel() and not bool(torch.stack(parameter.detach().aminmax()).isfinite().all()):
                return spec.name
        return None

    def sample(self) -> None:
        """Remember the bits of one random block of the trained parameters, for :meth:`drifted`."""
        trained = [n for n, parameter in enumerate(self.parameters) if parameter.requires_grad and parameter.numel()]
        sizes = [self.parameters[position].numel() for position in trained]
        if not trained:
            return
        [position] = self._chance.choices(trained, sizes)
        start = self._chance.randrange(0, self.parameters[position].numel(), DIGEST_BLOCK)
        self._sample = position, start, self._checksum(position, start)

    def drifted(self) -> str | None:
        """Return the name of the tensor whose block was sampled, if others have written to the block since.

        What this class writes, and :meth:`accept`, drop the sample.
        """
        sample, self._sample = self._sample, None
        if sample is None:
            return None
        position, start, checksum = sample
        return None if self._checksum(position, start) == checksum else self.layout.parameters[position].name

    def _checksum(self, position: int, start: int) -> int:
        parameter = self.parameters[position].detach()
        if not parameter.is_contiguous() and parameter.shape[0] > 1:  # some rows of it, without a copy of the whole
            row = parameter.numel() // parameter.shape[0]
            parameter, start = parameter[start // row : start // row + -(-DIGEST_BLOCK // row)], 0
        return int(crc32(bytes_of(parameter.reshape(-1)[start : start + DIGEST_BLOCK])))

    def accept(self) -> None:
        """Note the parameters' current values and memory as the known ones."""
        self._sample = None
        for position in self._moved():
            self._adopt(position)
        self._edits = edits_of(self.parameters)

    def _moved(self) -> Iterator[int]:
        """Yield the positions of parameters with other memory than they had; each is adopted before the next."""
        if _places_of(self.parameters) == self._places:
            return
        self._require_own_memory()
        before = self._places[0]  # share_memory() moves a tensor, and with it the alias that is known here
        for position, (parameter, known) in enumerate(zip(self.parameters, self._known, strict=True)):
            alike = parameter.dtype is known.dtype
            is_there = parameter.data_ptr() == known.data_ptr() == before[position]
            if alike and is_there and parameter.stride() == known.stride():
                continue
            if not alike or parameter.shape != known.shape or parameter.device != known.device:
                raise ModelChangedError(
                    self.layout.parameters[position].name,
                    f"is {_kind(parameter)} now, and was {_kind(known)} when the optimizer was made",
                    "convert and move models before: change it back, or close() this optimizer and make a new one",
                )
            yield position
        self._places = _places_of(self._known)

    def _require_own_memory(self) -> None:
        """Raise :class:`ModelChangedError` if two parameters were given the same memory since the last look."""
        pair = first_shared(self.parameters, written=len(self.parameters))
        if pair is not None:
            one, other = (self.layout.parameters[position].name for position in pair)
            raise ModelChangedError(
                other,
                f"was given the memory of {one!r} after the optimizer was made: each would be trained by itself, over "
                "the other",
                "tie parameters before, by letting both modules have one Parameter, or give each its own memory with "
                ".clone()",
            )

    def _adopt(self, position: int) -> None:
        """Note a parameter's current memory as the known one."""
        self._known[position] = known = self.parameters[position].detach()
        self._locate(position, known)

    def _locate(self, position: int, known: torch.Tensor) -> None:
        """Note where a parameter's memory is, for loops and for kernels."""
        address = known.data_ptr() if known.is_contiguous() and known.dtype in KINDS else 0
        on_kernels = self._devices[position] >= 0
        for_loops = known.dtype is torch.float32 and known.is_cpu and not on_kernels
        self._addresses[position] = address if for_loops else 0
        self._targets[position] = (address, address, 0, KINDS[known.dtype]) if address and on_kernels else (0, 0, 0, 0)

    def read(self, span: Span) -> Iterator[SparseSlice]:
        """Yield the values inside a span, tensor by tensor, dense, fp32 on the host."""
        for position, common in self.layout.overlapping(span):
            flat = self.parameters[position].detach().reshape(-1)
            yield SparseSlice(common, None, flat[self._within(position, common)].cpu().float())

    def write(self, segments: Sequence[SparseSlice]) -> None:
        """Write an exact reply's values over the parameters'."""
        for _, flat, where, values in self._written(segments, adds=False):
            flat[where] = values.to(flat.device, flat.dtype)

    def add(self, segments: Sequence[SparseSlice]) -> None:
        """Add a top-k reply's differences, in fp32; half-precision parameters follow their fp32 copies."""
        for position, flat, where, values in self._written(segments, adds=True):
            master = self._fp32[position] if flat.dtype != torch.float32 else flat
            if isinstance(where, slice):
                master[where] += values.to(flat.device)
            else:
                master.index_add_(0, where, values.to(flat.device))
            if master is not flat:
                flat[where] = master[where].to(flat.dtype)

    def open_fp32(self, span: Span) -> None:
        """Begin to keep fp32 copies of the half-precision parameters inside a span, equal to what they hold now."""
        for position, common in self.layout.overlapping(span):
            parameter = self.parameters[position]
            if parameter.dtype == torch.float32:
                continue
            flat = parameter.detach().reshape(-1)
            copy = self._fp32.setdefault(position, flat.float())
            where = self._within(position, common)
            copy[where] = flat[where].float()

    def _written(
        self, segments: Sequence[SparseSlice], *, adds: bool
    ) -> Iterator[tuple[int, torch.Tensor, slice | torch.Tensor, torch.Tensor]]:
        """Write what the compiled loops can; yield the rest: the parts of a segment, tensor by tensor.

        Each is (position of a tensor, its elements to write to, places in it, values); a large part comes in several.
        The writes count as known;
        :meth:`loaded` still reports those of others before. Parameters that are parts of one tensor count their writes
        together.
        """
        self._sample = None
        before = edits_of(self.parameters)
        scattered = self._scatter(segments, adds)
        for segment in segments:
            left = np.zeros_like(scattered)
            left[self._write_plain(segment, adds)] = True
            left &= ~scattered
            for position, part in by_tensor(self.layout, segment) if left.any() else ():
                if not left[position]:
                    continue
                within, data = self._within(position, part.span), self.parameters[position].detach()
                is_odd = not data.is_contiguous() and not (adds and position in self._fp32)
                if is_odd and part.offsets is not None and (memory := _as_memory(data)) is not None:  # channels_last
                    places = _places_in_memory(part.offsets + within.start, data)
                    yield position, memory, places.to(data.device), part.values
                    continue
                flat = data.reshape(-1)
                most = SCATTERED_BYTES // (4 if part.offsets is None else 12)
                for low in range(0, part.entries, most):  # what is on its way to a device at once is bounded
                    values, start = part.values[low : low + most], within.start + low
                    if part.offsets is None:
                        yield position, flat, slice(start, start + values.numel()), values
                    else:
                        where = (part.offsets[low : low + most] + within.start).to(data.device)
                        yield position, flat, where, values
                if not data.is_contiguous():  # then the flat elements may be a copy
                    data.copy_(flat.view(data.shape))
        now = edits_of(self.parameters)
        if before == self._edits:
            self._edits = now
        else:
            triples = zip(now, before, self._edits, strict=True)
            self._edits = [new if known == old else old for new, known, old in triples]

    def _scatter(self, segments: Sequence[SparseSlice], adds: bool) -> NDArray[np.bool_]:
        """Write the entries of tensors on devices that have kernels, a launch a device; return which tensors can be."""
        done = np.zeros(len(self.parameters), bool)
        on_host = [segment.cpu() for segment in segments] if self._kernels else []
        for number, kernels in enumerate(self._kernels.values()):
            targets = self._targets.copy()
            for position, copy in self._fp32.items():
                targets["master"][position] = copy.data_ptr()
            mine = (self._devices == number) & (targets["address"] != 0)
            if adds:  # in fp32
                mine &= (targets["kind"] == KINDS[torch.float32]) | (targets["master"] != targets["address"])
            targets["address"][~mine] = 0
            written = scatter(kernels, self.layout, targets, on_host, adds=adds)
            torch.autograd.graph.increment_version([self.parameters[position] for position in written.tolist()])
            done |= mine
        return done

    def _write_plain(self, segment: SparseSlice, adds: bool) -> Sequence[int]:
        """Write a segment's entries of fp32 tensors on the host; return the positions of the tensors that are left."""
        touched = self.layout.positions(segment.span)
        values = segment.values
        if not values.is_cpu or values.dtype != torch.float32:
            return touched
        from psclient.model import replica_loops

        addresses = self._addresses[touched.start : touched.stop]  # the aliases own the memory, and so it is there
        edges = self._starts[touched.start : touched.stop + 1]
        base, array = segment.span.start, values.numpy()
        if segment.offsets is None:
            firsts, ends = np.maximum(edges[:-1], base), np.minimum(edges[1:], segment.span.end)
            replica_loops.write_runs(addresses, edges[:-1], firsts, ends, array, base, adds)
            has_entries = firsts < ends
        else:
            offsets = segment.offsets.numpy()
            bounds = np.searchsorted(offsets, edges - base)
            replica_loops.write_at(addresses, edges[:-1], bounds, offsets, array, base, adds)
            has_entries = bounds[:-1] < bounds[1:]
        found = self.parameters[touched.start : touched.stop]
        is_plain = addresses != 0
        written = has_entries & is_plain
        torch.autograd.graph.increment_version(
            found if written.all() else [found[row] for row in np.flatnonzero(written).tolist()]
        )
        return (touched.start + np.flatnonzero(~is_plain)).tolist()

    def _within(self, position: int, span: Span) -> slice:
        offset = self.layout.offsets[position]
        return slice(span.start - offset, span.end - offset)


def _places_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.dtype], list[bool], list[Any]]:
    """Return addresses, dtypes, which tensors are contiguous, and the strides of the others."""
    is_contiguous = list(map(torch.Tensor.is_contiguous, tensors))
    strided = [] if all(is_contiguous) else [n for n, plain in enumerate(is_contiguous) if not plain]
    return (
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(attrgetter("dtype"), tensors)),
        is_contiguous,
        [tensors[n].stride() for n in strided],
    )


def _as_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's elements in the order of its memory, as a view; ``None`` if gaps or overlaps are among them."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def _places_in_memory(offsets: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return where elements of a tensor, numbered as its shape has them, lie in its memory; int64, on the host."""
    indices = np.unravel_index(offsets.cpu().numpy(), tuple(tensor.shape))
    return torch.from_numpy(sum(index * stride for index, stride in zip(indices, tensor.stride(), strict=True)))


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
