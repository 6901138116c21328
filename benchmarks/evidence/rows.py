"""Rows or entries of an embedding's gradient, compared at equal bytes; ``python -m benchmarks.evidence.rows``.

A small DLRM (``examples/recommender.py``) trains on generated clicks with one worker and Adagrad, in this process
alone. Of the touched rows of each step a share of the bytes is sent: the entries of largest magnitude, or the rows of
largest norm. What is not sent stays in a residual until its row is touched again. Values have 8 bits in the count of
bytes, a place takes the entropy of where it lies.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import recommender
from support import clicks

ROWS, BATCH, LEARNING_RATE, VALUE_BITS = 200_000, 128, 0.02, 8
TEST_LINES = 10_000

Choose = Callable[[torch.Tensor, float], torch.Tensor]
"""Marks the entries that are sent of the touched rows, ``[t, c]``, at a share of the bytes of all."""


def place_bits(share: float) -> float:
    """Return the entropy of whether one of many is chosen, for each that is."""
    return -(math.log2(share) + (1 - share) / share * math.log2(1 - share)) if share < 1 else 0.0


def bits_of_all(rows: int, columns: int) -> float:
    """Return the bits of all touched rows: a place each, and their values."""
    return rows * (place_bits(rows / ROWS) + columns * VALUE_BITS)


def by_entries(values: torch.Tensor, share: float) -> torch.Tensor:
    """Mark the entries of largest magnitude: each has a place of its own."""
    rows, columns = values.shape
    left, low, high = share * bits_of_all(rows, columns), 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        each = place_bits(middle * rows / ROWS) + VALUE_BITS if middle else 0.0
        low, high = (middle, high) if middle * rows * columns * each < left else (low, middle)
    k = max(1, int(low * values.numel()))
    marks = torch.zeros(values.numel(), dtype=torch.bool, device="cpu")
    marks[values.abs().flatten().topk(k).indices] = True
    return marks.view_as(values)


def by_rows(values: torch.Tensor, share: float) -> torch.Tensor:
    """Mark the rows of largest norm: a place a row."""
    k = max(1, int(share * len(values)))
    marks = torch.zeros(len(values), dtype=torch.bool, device="cpu")
    marks[values.norm(dim=1).topk(k).indices] = True
    return marks[:, None].expand_as(values)


def train(data: clicks.Clicks, test: clicks.Clicks, choose: Choose, share: float, seed: int) -> tuple[float, float]:
    """Train one pass; return AUC and loss of other lines."""
    torch.manual_seed(seed)
    model = recommender.DLRM(ROWS)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)
    residual = torch.zeros_like(model.table.weight)
    generator = torch.Generator().manual_seed(seed)
    for labels, counts, rows in clicks.batches(data, BATCH, generator):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(counts, rows), labels).backward()  # type: ignore[no-untyped-call]
        gradient = model.table.weight.grad
        assert gradient is not None
        whole = gradient.coalesce()
        touched = whole.indices()[0]
        values = residual[touched] + whole.values()
        marks = choose(values, share) if share < 1 else torch.ones_like(values, dtype=torch.bool)
        residual[touched] = torch.where(marks, 0.0, values)
        sent = torch.where(marks, values, 0.0)
        model.table.weight.grad = torch.sparse_coo_tensor(touched[None], sent, gradient.shape, check_invariants=False)
        optimizer.step()
    with torch.inference_mode():
        scores = model(test.counts, test.rows)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, test.labels).item()
    return clicks.auc(scores.numpy(), test.labels.numpy()), loss


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each form, share and seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence.rows", description=__doc__)
    parser.add_argument("--lines", type=int, default=60_000, help="default: %(default)s")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.1], help="of the bytes")
    parser.add_argument("--seeds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/rows"), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = []
    for name, lines, seed in (("train", options.lines, 1), ("test", TEST_LINES, 2)):
        path = options.out / f"{name}-{lines}.tsv"
        if not path.exists():
            clicks.generate(path, lines, seed)
        found.append(clicks.read(path, ROWS))
    data, test = found
    print("share  form     seed  AUC    loss")
    for share in options.shares:
        for name, choose in (("rows", by_rows), ("entries", by_entries))[: 1 if share == 1 else 2]:
            for seed in range(options.seeds):
                auc, loss = train(data, test, choose, share, seed)
                print(f"{share:<5g}  {name if share < 1 else 'all':<7}  {seed}     {auc:.4f} {loss:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
