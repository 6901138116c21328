"""The words of a source, as a publisher reads them: all of them, or those that differ from a baseline's."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.errors import ConfigurationError
from psclient.publisher import compare_loops
from psclient.publisher.baseline import Baseline, Words
from psclient.publisher.source import Source, layout_of, named, octets_of, spec_of
from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice, merge

_BLOCK = 1 << 20  # words that are compared at a time
_SMALL = 1 << 16  # words of a tensor up to which it is compared together with its neighbours


class WordSource(Protocol):
    """Tensors that are to be published, all of them on one rank or not."""

    @property
    def layout(self) -> ModelLayout | None:
        """Of the tensors; ``None`` if it is not known before they are read, which is done once."""

    def fill(self, baseline: Baseline) -> None:
        """Write all words into a baseline, which then has the tensors' layout."""

    def differences(self, baseline: Baseline) -> Iterator[SparseSlice]:
        """Yield the words that differ from the baseline's, in order; raises :class:`ConfigurationError`."""


class OwnWords:
    """The words of tensors that are all here."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def layout(self) -> ModelLayout | None:
        """See :class:`WordSource`."""
        if isinstance(self._source, Iterator):
            return None
        return layout_of([spec_of(name, tensor) for name, tensor in named(self._source)])

    def fill(self, baseline: Baseline) -> None:
        """See :class:`WordSource`."""
        specs: list[TensorSpec] = []
        baseline.begin()
        for name, tensor in named(self._source):
            specs.append(spec_of(name, tensor))
            baseline.append(octets_of(tensor))
        baseline.fill(layout_of(specs))

    def differences(self, baseline: Baseline) -> Iterator[SparseSlice]:
        """See :class:`WordSource`."""
        start = 0
        for words in _joined(self._words(baseline)):
            yield from changed(words, baseline, start)
            start += words.size

    def _words(self, baseline: Baseline) -> Iterator[Words]:
        """Yield the words of each tensor, if it is the baseline's next one."""
        parameters, dtype = baseline.layout.parameters, baseline.words.dtype
        position = 0
        for name, tensor in named(self._source):
            spec = parameters[position] if position < len(parameters) else None
            if spec is None or (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.dtype):
                raise other_model(spec_of(name, tensor), spec)
            yield octets_of(tensor).view(dtype)
            position += 1
        if position < len(parameters):
            raise ConfigurationError(f"the source lacks {parameters[position].describe()}")


def _joined(tensors: Iterable[Words]) -> Iterator[Words]:
    """Join small tensors that follow one another, so that many cost no more than one that is as large as all."""
    small: list[Words] = []
    size = 0
    for words in tensors:
        if small and (words.size > _SMALL or size + words.size > _BLOCK):
            yield np.concatenate(small)
            small, size = [], 0
        if words.size > _SMALL:
            yield words
        else:
            small.append(words.copy())  # its memory may be handed out again
            size += words.size
    if small:
        yield np.concatenate(small)


def joined(segments: Iterable[SparseSlice]) -> Iterator[SparseSlice]:
    """Join ascending segments of small tensors, so that they travel as one chunk and not as one each."""
    parts: list[SparseSlice] = []
    for segment in segments:
        if parts and segment.span.end - parts[0].span.start > _BLOCK:
            yield _merged(parts)
            parts = []
        parts.append(segment)
    if parts:
        yield _merged(parts)


def _merged(parts: list[SparseSlice]) -> SparseSlice:
    found = merge(Span(parts[0].span.start, parts[-1].span.end), parts)
    assert found is not None
    return found


def other_model(found: TensorSpec, expected: TensorSpec | None) -> ConfigurationError:
    """Return the error of a tensor that the feed does not have there."""
    what = expected.describe() if expected is not None else "nothing more"
    return ConfigurationError(
        f"{found.describe()} stands where the feed has {what}; for another model start another feed"
    )


def changed(mine: Words, baseline: Baseline, start: int) -> Iterator[SparseSlice]:
    """Yield the words of neighbouring tensors that differ from the baseline's, in which they begin at ``start``."""
    for first in range(0, mine.size, _BLOCK):
        block = mine[first : first + _BLOCK]
        span = Span(start + first, start + first + block.size)
        places = differing(block, baseline.words[span.start : span.end])
        if places.size:
            found = torch.from_numpy(block[places]).view(baseline.layout.value_dtype)
            yield SparseSlice(span, torch.from_numpy(places), found)


def differing(mine: Words, held: Words) -> NDArray[np.int64]:
    """Return the places at which two arrays of words differ."""
    room = np.empty(mine.size + 1, np.int64)
    return room[: compare_loops.differing.on(mine.size)(mine, held, room)].copy()
