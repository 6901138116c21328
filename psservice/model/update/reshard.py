"""An optimizer's state for shards with other borders than those that had it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pscore.model.layout import Span


@dataclass(frozen=True, slots=True)
class PieceMemory:
    """An optimizer's state, as ``torch.optim`` has it, of the part of a tensor that was stepped as one of ``shape``."""

    span: Span
    shape: tuple[int, ...]
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RuleMemory:
    """The state of one shard's rule, in terms that every shard understands; another ``kind`` cannot use it."""

    kind: str
    updates: int = 0
    samples: int = 0
    pieces: Sequence[PieceMemory] = ()


def reshard(pieces: Sequence[PieceMemory], span: Span, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the state of a tensor's piece, put together from the pieces of all shards that overlap it.

    A piece with the same borders keeps everything as it is. Of others, what has a value for each entry is cut; what
    counts steps is that of the furthest, because shards need not have applied the same pushes.
    """
    found = sorted((p for p in pieces if p.span.intersect(span).length), key=lambda piece: piece.span.start)
    if len(found) == 1 and found[0].span == span:
        return dict(found[0].state)
    furthest = max((piece.state for piece in found), key=lambda state: float(state.get("step", 0)), default={})
    state: dict[str, Any] = {}
    for name in dict.fromkeys(name for piece in found for name in piece.state):
        values = [(piece, piece.state[name]) for piece in found if name in piece.state]
        if all(_is_by_entry(piece, value) for piece, value in values):
            whole = torch.zeros(span.length, dtype=values[0][1].dtype)
            for piece, value in values:
                part = piece.span.intersect(span)
                entries = slice(part.start - piece.span.start, part.end - piece.span.start)
                whole[part.start - span.start : part.end - span.start] = value.reshape(-1)[entries]
            state[name] = whole.reshape(shape)
        else:
            state[name] = furthest.get(name, values[0][1])
    return state


def _is_by_entry(piece: PieceMemory, value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) == piece.shape
