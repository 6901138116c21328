"""A model's flat layout: every parameter laid end to end, in ``named_parameters()`` order.

An *index* is a position in this layout. Worker and server compare layouts by fingerprint before the first push.
"""

import bisect
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pscore.names import shown

PARAMETER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of parameters on a worker. The server's master copy is fp32, so fp64 would lose bits and is refused."""

BUFFER_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Dtypes of buffers, whose values travel. Of a frozen parameter a digest travels: it may have any dtype."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""In which dtype words of so many bytes are handled: as bits, of which nothing is computed."""

_NOT_IN_FILES = (torch.complex32, torch.complex128)  # of safetensors
_MOST_WHOLE = 1 << 16  # elements of small tensors that are sent whole in any model


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model: its name as in ``state_dict()``, shape, dtype, and other names of the same tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the tensor's own dtype."""
        return self.numel * self.dtype.itemsize

    def describe(self) -> str:
        """Return name, shape and dtype, for messages."""
        return f"{shown(self.name)} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A parameter that is not trained, and the SHA-256 of its values; the values stay with the workers."""

    spec: TensorSpec
    digest: bytes


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range ``[start, end)`` of the flat layout."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.end - self.start

    def intersect(self, other: "Span") -> "Span":
        """Return the common part; empty (length 0) if there is none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.end, other.end)))


@dataclass(frozen=True)
class ModelLayout:
    """The tensors of a model: trained parameters, which are laid out flat, persistent buffers, and frozen parameters.

    The tensors of a feed (:mod:`psclient.publisher`) are not trained here: they are laid out as words of ``word_bytes``
    each, may have any dtype, and are its ``parameters``.

    Raises ``ValueError`` if a name occurs twice, a parameter or buffer has a dtype outside :data:`PARAMETER_DTYPES`
    or :data:`BUFFER_DTYPES`, or the tensors of a feed do not consist of such words, or fit into no file.

    Attributes:
        word_bytes: of a feed: 1, 2 or 4; 0 for a model that is trained here.
        offsets: where each parameter begins, in elements or words, and where the last one ends.
    """

    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...] = ()
    frozen: tuple[FrozenTensor, ...] = ()
    word_bytes: int = 0
    offsets: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors()]
        if len(set(names)) != len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"tensor name {shown(duplicate)!r} occurs twice")
        if self.word_bytes:
            self._require_words()
        for spec in self.parameters:
            if not self.word_bytes and spec.dtype not in PARAMETER_DTYPES:
                raise ValueError(
                    f"parameter {spec.describe()}: only float32, float16 and bfloat16 can be trained; "
                    "convert it with model.float()"
                )
        for spec in self.buffers:
            if spec.dtype not in BUFFER_DTYPES:
                raise ValueError(
                    f"buffer {spec.describe()}: a server does not take this dtype; register it with persistent=False"
                )
        offsets = accumulate(map(self.length, self.parameters), initial=0)
        object.__setattr__(self, "offsets", tuple(offsets))

    def _require_words(self) -> None:
        if self.word_bytes not in WORDS:
            raise ValueError(f"words of {self.word_bytes} bytes; a feed has words of {', '.join(map(str, WORDS))}")
        if self.buffers or self.frozen:
            raise ValueError("all tensors of a feed are its parameters")
        for spec in self.parameters:
            if spec.dtype in _NOT_IN_FILES:
                raise ValueError(f"tensor {spec.describe()}: model files have no tensors of this dtype")
            if spec.dtype.itemsize % self.word_bytes:
                raise ValueError(f"tensor {spec.describe()} does not consist of words of {self.word_bytes} bytes")

    def length(self, spec: TensorSpec) -> int:
        """Return how many elements of the flat layout a parameter has: words, in a feed."""
        return spec.nbytes // self.word_bytes if self.word_bytes else spec.numel

    @property
    def value_dtype(self) -> torch.dtype:
        """In which dtype values of the flat layout are handled: fp32, or in a feed that of its words."""
        return WORDS[self.word_bytes] if self.word_bytes else torch.float32

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield parameters, then buffers, then frozen parameters."""
        yield from self.parameters
        yield from self.buffers
        yield from (frozen.spec for frozen in self.frozen)

    @property
    def size(self) -> int:
        """Number of elements of all parameters together (``n``)."""
        return self.offsets[-1]

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 over kind, name, sizes, dtype and frozen values' digest of every tensor, each behind its length."""
        digest, known = hashlib.sha256(), dict[tuple[tuple[int, ...], torch.dtype], bytes]()

        def with_length(data: bytes) -> bytes:
            return len(data).to_bytes(4, "little") + data

        def add(kind: bytes, spec: TensorSpec) -> None:
            tail = known.get(key := (spec.shape, spec.dtype))
            if tail is None:
                sizes, dtype = ",".join(map(str, spec.shape)), str(spec.dtype).removeprefix("torch.")
                tail = known[key] = with_length(sizes.encode()) + with_length(dtype.encode())
            digest.update(kind + with_length(spec.name.encode()) + tail)

        for kind, specs in ((b"parameter", self.parameters), (b"buffer", self.buffers)):
            for spec in specs:
                add(with_length(kind), spec)
        for tensor in self.frozen:
            add(with_length(b"frozen"), tensor.spec)
            digest.update(with_length(tensor.digest))
        if self.word_bytes:
            digest.update(b"words" + self.word_bytes.to_bytes(4, "little"))
        return digest.digest()

    def viewed_in(self, dtype: torch.dtype | None) -> "ModelLayout":
        """Return the layout of a model that holds the fp32 parameters in another dtype; ``None``: this layout."""
        if dtype is None or self.word_bytes or all(spec.dtype != torch.float32 for spec in self.parameters):
            return self
        viewed = [replace(spec, dtype=dtype) if spec.dtype == torch.float32 else spec for spec in self.parameters]
        return replace(self, parameters=tuple(viewed))

    def position(self, name: str | None) -> int:
        """Return the position of the parameter of this name; −1 for ``None``. :class:`ValueError` if there is none."""
        return -1 if name is None else [spec.name for spec in self.parameters].index(name)

    def span(self, position: int) -> Span:
        """Return the span of parameter number ``position``."""
        return Span(self.offsets[position], self.offsets[position + 1])

    def whole_below(self, dense_below: int, most: float = math.inf) -> int:
        """Return the size below which a tensor is sent whole: ``dense_below``, if that leaves something to select.

        It is less if the smaller tensors are more than ``most`` elements together, or more than 65,536 and more than
        a twentieth of the model: adapters and experts may consist of nothing else.
        """
        small = np.sort([spec.numel for spec in self.parameters if spec.numel < dense_below])
        fitting = int(np.searchsorted(np.cumsum(small), min(most, max(_MOST_WHOLE, self.size // 20)), side="right"))
        return dense_below if fitting == small.size else int(small[fitting])

    def shard_spans(self, num_shards: int) -> tuple[Span, ...]:
        """Cut the layout into contiguous spans of equal length, within one element, and so of equal bytes.

        No element of several words is cut.
        """
        cuts = [self._uncut(self.size * shard // num_shards) for shard in range(num_shards + 1)]
        return tuple(Span(start, end) for start, end in pairwise(cuts))

    def _uncut(self, place: int) -> int:
        """Return the beginning of the element that a word is of."""
        position = bisect.bisect_right(self.offsets, place) - 1
        if not self.word_bytes or position >= len(self.parameters):
            return place
        words = self.parameters[position].dtype.itemsize // self.word_bytes
        return place - (place - self.offsets[position]) % words

    def overlapping(self, span: Span) -> Iterator[tuple[int, Span]]:
        """Yield (position, common span) of each parameter that shares elements with ``span``, in order."""
        for position in self.positions(span):
            common = self.span(position).intersect(span)
            if common.length:
                yield position, common

    def positions(self, span: Span) -> range:
        """Return the parameters between the first and the last one that share elements with ``span``."""
        first = max(0, bisect.bisect_right(self.offsets, span.start) - 1)
        return range(first, max(first, min(len(self.parameters), bisect.bisect_left(self.offsets, span.end))))

    def dtype_runs(self, span: Span) -> list[tuple[torch.dtype, Span]]:
        """Return the longest pieces of ``span`` over which the parameters have one dtype, in order.

        All of a feed has the dtype of its words.
        """
        pieces = [(dtype, run.intersect(span)) for dtype, run in self._dtype_runs]
        return [(dtype, piece) for dtype, piece in pieces if piece.length]

    @cached_property
    def _dtype_runs(self) -> list[tuple[torch.dtype, Span]]:
        runs: list[tuple[torch.dtype, Span]] = []
        if self.word_bytes:
            return [(self.value_dtype, Span(0, self.size))]
        whole = self.overlapping(Span(0, self.size))
        for dtype, found in groupby(whole, lambda each: self.parameters[each[0]].dtype):
            spans = [common for _, common in found]
            runs.append((dtype, Span(spans[0].start, spans[-1].end)))
        return runs


def digest_of(tensor: torch.Tensor) -> bytes:
    """Return the SHA-256 of a tensor's values, in its dtype and the order of its dimensions; about 1 GB a second.

    Of a sparse tensor, or one that consists of others, it is that of these one behind the other.
    """
    digest = hashlib.sha256()
    for part in _parts(tensor.detach()):
        flat = part.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that a tensor consists of: itself, if it is dense."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    return [tensor]


def layout_of(
    parameters: Iterable[tuple[str, torch.Tensor]],
    buffers: Iterable[tuple[str, torch.Tensor]] = (),
    aliases: dict[str, tuple[str, ...]] | None = None,
    frozen: Iterable[tuple[str, torch.Tensor]] = (),
    digest: Callable[[torch.Tensor], bytes] = digest_of,
) -> ModelLayout:
    """Build the layout of named tensors; ``aliases`` maps a name to other names of the same tensor.

    ``digest`` is :func:`digest_of`, or returns the same of a tensor whose values are not all here.

    A tensor without values, or of a dtype that cannot be trained, raises :class:`ValueError`.
    """

    def spec(name: str, tensor: torch.Tensor) -> TensorSpec:
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device, without values: call model.to_empty() and initialise it")
        return TensorSpec(name, tuple(tensor.shape), tensor.dtype, (aliases or {}).get(name, ()))

    return ModelLayout(
        tuple(spec(name, tensor) for name, tensor in parameters),
        tuple(spec(name, tensor) for name, tensor in buffers),
        tuple(FrozenTensor(spec(name, tensor), digest(tensor)) for name, tensor in frozen),
    )
