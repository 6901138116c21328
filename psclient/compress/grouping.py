"""Which tensors are pushed together."""

from collections.abc import Sequence

from pscore.model.layout import ModelLayout

Groups = tuple[range, ...]
"""Positions of each group's tensors in the layout, the last group first, as its gradients come first."""


def by_size(sizes: Sequence[float], least: float) -> Groups:
    """Merge neighbours, last first, until a group has this size; sizes in the order of the layout."""
    groups: list[range] = []
    end, size = len(sizes), 0.0
    for position in reversed(range(len(sizes))):
        size += sizes[position]
        if size >= least or position == 0:
            groups.append(range(position, end))
            end, size = position, 0.0
    return tuple(groups)


class Grouping:
    """The groups of pushes: neighbours in the layout, until a group has ``bucket_bytes`` of gradients.

    Attributes:
        groups: in the order of sending; may be replaced between two pushes.
        densities: of single tensors, by position, if these have another than their param group.
    """

    def __init__(self, layout: ModelLayout, bucket_bytes: int) -> None:
        self.groups = by_size([spec.nbytes for spec in layout.parameters], bucket_bytes)
        self.densities: dict[int, float] = {}
