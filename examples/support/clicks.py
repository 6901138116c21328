"""Clicks in the format of Criteo's data sets, read as batches of tensors; and a generator of such files.

A line has a label (1 for a click), 13 counts and 26 hashed categories of 8 hexadecimal digits, separated by tabs;
any of them may be empty. The real files are Criteo's (Display Advertising Challenge, and the Terabyte Click Logs).
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

COUNTS, CATEGORIES = 13, 26
_VALUES = 50_000
"""Distinct values of a generated category, of which few are frequent."""


class Clicks(NamedTuple):
    """Some lines of a file.

    Attributes:
        labels: fp32 ``[n]``.
        counts: fp32 ``[n, 13]``, ``log(1 + count)``; 0 if missing.
        rows: int64 ``[n, 26]``, the row of the table that each category and value share by their hash.
    """

    labels: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, chosen: torch.Tensor | slice) -> "Clicks":
        """Return some of the lines."""
        return Clicks(*(column[chosen] for column in self))


def read(path: Path, table_rows: int) -> Clicks:
    """Read a file; :class:`ValueError` names the first line that is not as Criteo has them."""
    labels: list[float] = []
    counts: list[list[float]] = []
    rows: list[list[int]] = []
    with path.open(encoding="ascii") as lines:
        for number, line in enumerate(lines, 1):
            label, *fields = line.rstrip("\n").split("\t")
            if len(fields) != COUNTS + CATEGORIES or label not in ("0", "1"):
                raise ValueError(
                    f"{path}, line {number}: a label, {COUNTS} counts and {CATEGORIES} categories are wanted"
                )
            labels.append(float(label))
            counts.append([float(text) if text else 0.0 for text in fields[:COUNTS]])
            hashed = (f"{field}:{text}".encode() for field, text in enumerate(fields[COUNTS:]))
            rows.append([zlib.crc32(name) % table_rows for name in hashed])
    found = torch.tensor(counts, dtype=torch.float32, device="cpu").clamp_(min=0).log1p_()
    return Clicks(
        torch.tensor(labels, dtype=torch.float32, device="cpu"),
        found,
        torch.tensor(rows, dtype=torch.int64, device="cpu"),
    )


def batches(clicks: Clicks, size: int, generator: torch.Generator) -> Iterator[Clicks]:
    """Yield the whole batches of a random order."""
    order = torch.randperm(len(clicks), generator=generator, device="cpu")
    for first in range(0, len(clicks) - size + 1, size):
        yield clicks.part(order[first : first + size])


def generate(path: Path, lines: int, seed: int) -> None:
    """Write lines whose clicks follow a hidden model: a taste of each value, and of pairs of three categories."""
    random, hidden = np.random.default_rng(seed), np.random.default_rng(0)
    ranks = (_VALUES * random.random((lines, CATEGORIES)) ** 8).astype(np.int64)  # few values are frequent
    taste = hidden.normal(0, 0.5, (CATEGORIES, _VALUES))
    meets = hidden.normal(0, 0.6, (3, _VALUES, 4))
    counts = random.poisson(3.0, (lines, COUNTS))
    scores = taste[np.arange(CATEGORIES), ranks].sum(1) + 0.5 * (np.log1p(counts[:, 0]) - 1.2)
    pairs = [meets[field, ranks[:, field]] for field in range(3)]
    scores += (pairs[0] * pairs[1] + pairs[1] * pairs[2]).sum(1)
    labels = random.random(lines) < 1 / (1 + np.exp(-(scores - 1)))
    missing = random.random((lines, COUNTS + CATEGORIES)) < 0.02
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("w", encoding="ascii") as file:
        for number in range(lines):
            values = [str(count) for count in counts[number]]
            values += [f"{rank * 2654435761 % 2**32:08x}" for rank in ranks[number].tolist()]
            shown = ("" if gone else text for gone, text in zip(missing[number], values, strict=True))
            file.write(f"{labels[number]:d}\t" + "\t".join(shown) + "\n")
    partial.replace(path)


def auc(scores: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    """Return the chance that a click has a higher score than a line without, ties counted half."""
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores), np.float64)
    ranks[order] = np.arange(1, len(scores) + 1)
    values, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.bincount(place, ranks) / count)[place] if len(values) < len(scores) else ranks
    clicks = labels > 0.5
    positives, negatives = int(clicks.sum()), int((~clicks).sum())
    return float((ranks[clicks].sum() - positives * (positives + 1) / 2) / (positives * negatives))
