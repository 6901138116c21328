"""A recommender: a small DLRM on clicks in Criteo's format, its embedding spread over the shards of a server.

The table has 10 million rows of 16. A step touches some thousands of them, and only these travel: gradients of
``nn.Embedding(sparse=True)`` stay rows on their way to the server, whose Adagrad steps them. Without ``--data`` the
clicks are generated. Trains with worker processes on this machine, and tests the server's model.
"""

import argparse
import multiprocessing
import time
from pathlib import Path

import torch
from support import clicks
from torch import nn

import psclient

COLUMNS, BATCH_SIZE, TEST_LINES, LR = 16, 128, 20_000, 0.02
TRAIN_SEED, TEST_SEED = 1, 2


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al., 2019): one table for all categories, by the hashing trick."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        weights = torch.empty(rows, COLUMNS).uniform_(-0.05, 0.05)
        self.table = nn.Embedding(rows, COLUMNS, sparse=True, _weight=weights)
        self.bottom = nn.Sequential(nn.Linear(clicks.COUNTS, 32), nn.ReLU(), nn.Linear(32, COLUMNS), nn.ReLU())
        vectors = clicks.CATEGORIES + 1
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1), persistent=False)
        interactions = vectors * (vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(COLUMNS * vectors + interactions, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, counts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the logit of a click, ``[n]``, from counts ``[n, 13]`` and rows of the table ``[n, 26]``."""
        vectors = torch.cat([self.bottom(counts)[:, None], self.table(rows)], 1)
        dots = vectors @ vectors.mT
        met = dots[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([vectors.flatten(1), met], 1)).squeeze(1)


def train(worker: int, options: argparse.Namespace, server: str) -> None:
    """Train on every n-th line of the file, as one of the workers."""
    torch.set_num_threads(1)  # the workers share the cores
    torch.manual_seed(0)
    own = clicks.read(options.data, options.rows).part(slice(worker, None, options.workers))
    model = DLRM(options.rows)
    optimizer = psclient.ServerAdagrad(
        model.parameters(), lr=LR, budget=options.budget, model=model, server=server, worker=f"worker-{worker}"
    )
    generator = torch.Generator().manual_seed(worker)
    seconds = steps = 0.0
    for epoch in range(options.epochs):
        for labels, counts, rows in clicks.batches(own, BATCH_SIZE, generator):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(counts, rows), labels)
            loss.backward()
            started = time.perf_counter()
            optimizer.step()
            seconds, steps = seconds + time.perf_counter() - started, steps + 1
        report = optimizer.report
        print(
            f"worker {worker}: epoch {epoch + 1} of {options.epochs}, loss {loss.item():.3f}, "
            f"version {optimizer.version}, step {1e3 * seconds / steps:.0f} ms, "
            f"pushes {report.push_bytes / 1e3:.0f} kB, pulls {report.pull_bytes / 1e3:.0f} kB"
        )
    optimizer.close()


def train_twin(options: argparse.Namespace) -> DLRM:
    """Train the same model on the same lines in this process: plain torch, all values, no server.

    torch's Adagrad takes rows too, and rows without a gradient would not change.
    """
    torch.set_num_threads(1)  # tensors are small; more threads would wait for one another
    torch.sparse.check_sparse_tensor_invariants.disable()  # else torch warns that it does not check
    torch.manual_seed(0)
    model, lines = DLRM(options.rows), clicks.read(options.data, options.rows)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(0)
    for _ in range(options.epochs):
        for labels, counts, rows in clicks.batches(lines, BATCH_SIZE, generator):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(counts, rows), labels).backward()
            optimizer.step()
    return model


def test_auc(options: argparse.Namespace, model: DLRM) -> float:
    """Return a model's area under the ROC curve, on lines that nobody trained on."""
    model.eval()
    found = clicks.read(options.test, options.rows)
    with torch.inference_mode():
        scores = torch.cat([model(part.counts, part.rows) for part in map(found.part, _thousands(len(found)))])
    return clicks.auc(scores.numpy(), found.labels.numpy())


def _thousands(count: int) -> list[slice]:
    return [slice(first, first + 1000) for first in range(0, count, 1000)]


def main() -> None:
    """Start a server and workers, and test what they have trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FILE", help="clicks in Criteo's format (default: generated)")
    parser.add_argument("--test", type=Path, metavar="FILE", help="others to test with (default: generated)")
    parser.add_argument("--rows", type=int, default=10_000_000, metavar="N", help="of the table (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="worker processes (default: %(default)s)")
    parser.add_argument("--shards", type=int, default=2, metavar="N", help="of the server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="passes (default: %(default)s)")
    parser.add_argument(
        "--budget",
        type=float,
        default=0.03,
        metavar="SHARE",
        help="of the dense bytes, each way (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/recommender"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--least", type=float, default=0.0, metavar="AUC", help="fail below this test AUC")
    parser.add_argument("--quick", action="store_true", help="a table of 200,000 rows, two workers, few lines")
    options = parser.parse_args()
    lines, test_lines = 160_000, TEST_LINES
    if options.quick:
        options.rows, options.workers, options.epochs, lines, test_lines = 200_000, 2, 1, 30_000, 5_000
    if (options.data is None) != (options.test is None):
        parser.error("--data and --test belong together")
    if options.data is None:
        options.data, options.test = options.out / f"train-{lines}.tsv", options.out / f"test-{test_lines}.tsv"
        for path, count, seed in ((options.data, lines, TRAIN_SEED), (options.test, test_lines, TEST_SEED)):
            if not path.exists():
                print(f"generating {path}, {count:,} lines")
                clicks.generate(path, count, seed)
    context = multiprocessing.get_context("spawn")
    with psclient.LocalServer(shards=options.shards) as server:
        workers = [
            context.Process(target=train, args=(worker, options, server.server)) for worker in range(options.workers)
        ]
        for process in workers:
            process.start()
        for process in workers:
            process.join()
        if any(process.exitcode for process in workers):
            raise SystemExit("a worker failed; its message is above")
        dense = 4 * (COLUMNS * options.rows)
        print(f"a dense push of the table alone has {dense / 1e6:,.0f} MB")
        model = DLRM(options.rows)
        model.load_state_dict(psclient.download(server.server))
        found = test_auc(options, model)
        print(f"test AUC of the server's model: {found:.3f}")
        if options.quick:
            started = time.perf_counter()
            twin = test_auc(options, train_twin(options))
            print(f"test AUC of plain torch on the same clicks: {twin:.3f} ({time.perf_counter() - started:.0f} s)")
        if found < options.least:
            raise SystemExit(f"the AUC is below {options.least}")


if __name__ == "__main__":
    main()
