"""``nn.Embedding(sparse=True)`` and ``nn.EmbeddingBag`` through real servers: rows travel, the model is the same.

The recipe of docs/guide/embeddings.md is run here.
"""

import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ConfigurationError
from tests.system.tools import QUICK, assert_same_parameters, same
from tests.tiers import long_but

ROWS, COLUMNS, BATCH, WORDS = 3000, 16, 32, 3
TOUCHED = 2 * BATCH * WORDS * COLUMNS + 3 * WORDS * COLUMNS + 3  # entries of a step: two tables', and the layer's


class Tower(nn.Module):
    """An embedding and a bag over the same words, and a linear layer."""

    def __init__(self, sparse, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.bag = nn.EmbeddingBag(500, COLUMNS, mode="sum", sparse=sparse)
        self.out = nn.Linear(WORDS * COLUMNS, 3)

    def forward(self, words):
        found = self.table(words) + self.bag(words % 500)[:, None]
        return self.out(found.flatten(1))


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    words = (torch.rand(BATCH, WORDS, generator=generator) ** 3 * ROWS).long()  # some often, most hardly ever
    return words, torch.randint(0, 3, (BATCH,), generator=generator)


def train(model, optimizer, steps, first=0, *, dense=False):
    """``dense``: hand the same gradients over as whole tables."""
    for step in range(first, first + steps):
        words, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words), labels).backward()
        for parameter in model.parameters():
            if dense and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce().to_dense()
        optimizer.step()


METHODS = {
    "asgd": partial(psclient.ASGD, lr=0.5),
    "rounds": partial(psclient.ASGD, lr=0.5, rounds=psclient.Rounds()),
    "ssgd": partial(psclient.SSGD, lr=0.5, momentum=0.0),
    "adagrad": partial(psclient.ServerAdagrad, lr=0.05, density=1.0),
    "sgd on the server": partial(psclient.ServerOptimizer, optimizer="SGD", options={"lr": 0.5}),
}


@pytest.mark.parametrize("method", long_but(["rounds", "adagrad"], METHODS))
def test_rows_train_as_the_whole_table_does_bit_for_bit(method):
    models = [Tower(sparse=True) for _ in range(2)]
    for dense, model in zip((True, False), models, strict=True):
        with (
            psclient.LocalServer(shards=2) as server,
            METHODS[method](model.parameters(), model=model, server=server, settings=QUICK) as optimizer,
        ):
            train(model, optimizer, 6, dense=dense)
            optimizer.pull()
            assert (optimizer.totals.push_entries <= 6 * TOUCHED) != dense
    assert same(*models)


def test_with_overlap_rows_leave_during_backward(server):
    """When a reply comes decides what the next gradients are computed at: so the sum of what was pushed is compared."""
    model = Tower(sparse=True)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = psclient.ASGD(model.parameters(), lr=0.5, overlap=True, model=model, server=server, settings=QUICK)
    for step in range(6):
        train(model, optimizer, 1, step)
        for name, parameter in model.named_parameters():
            expected[name] -= 0.5 * parameter.grad.to_dense()
    optimizer.pull()
    assert optimizer.totals.push_entries <= 6 * TOUCHED
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-5)
    assert_same_parameters(model, server.server)


@pytest.mark.long
def test_rmsprop_applies_the_decay_of_its_squares_when_a_row_is_touched_again():
    models = [Tower(sparse) for sparse in (False, True)]
    for model in models:
        with psclient.ServerRMSprop(
            model.parameters(), lr=0.01, alpha=0.6, density=1.0, model=model, settings=QUICK
        ) as optimizer:
            train(model, optimizer, 30)
    for dense, by_rows in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(by_rows, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method",
    [partial(psclient.DGS, momentum=0.7), partial(psclient.DGC, momentum=0.5), psclient.GradientDropping],
    ids=["dgs", "dgc", "dropping"],
)
def test_sparse_methods_send_touched_rows_only_and_learn(method, server):
    model = Tower(sparse=True)
    before = nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).item()
    optimizer = method(model.parameters(), lr=0.05, density=0.05, model=model, server=server, settings=QUICK)
    untouched = torch.ones(ROWS, dtype=torch.bool)
    for step in range(40):
        untouched[batch(step % 3)[0]] = False
        train(model, optimizer, 1, step % 3)
        assert optimizer.report.push_entries <= TOUCHED
    assert torch.equal(model.table.weight[untouched], Tower(sparse=True).table.weight[untouched])
    assert nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).item() < 0.7 * before
    assert_same_parameters(model, server.server)


def test_the_recipe_of_the_page_trains(server):
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(100_000, 16, mode="sum", sparse=True), nn.Linear(16, 1))
    optimizer = psclient.ServerAdagrad(model.parameters(), lr=0.02, model=model, server=server, settings=QUICK)
    words = torch.randint(0, 100_000, (64, 8), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(words).squeeze(1), torch.ones(64))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.report.push_entries <= 64 * 8 * 16 + 17


@pytest.mark.long
@pytest.mark.parametrize("options", [{"density": 1.0}, {"budget": 0.03}], ids=["all", "budget"])
def test_the_bytes_of_a_step_are_those_of_its_rows_however_long_the_table(options):
    """A budget that carries more than the rows sends them as they are."""
    counts = []
    for rows in (100_000, 1_000_000):
        torch.manual_seed(0)
        model = nn.EmbeddingBag(rows, COLUMNS, mode="sum", sparse=True)
        with psclient.ServerAdagrad(model.parameters(), model=model, settings=QUICK, **options) as optimizer:
            words = torch.randperm(100_000, generator=torch.Generator().manual_seed(1))[:512].reshape(64, 8)
            for _ in range(2):
                optimizer.zero_grad()
                model(words * (rows // 100_000)).sum().backward()
                optimizer.step()
            report = optimizer.report
            assert report.push_entries == report.pull_entries == 512 * COLUMNS
            assert report.push_bytes >= 4 * report.push_entries
            counts.append((report.push_bytes, report.pull_bytes))
    for few, many in zip(*counts, strict=True):
        assert few <= many <= 1.02 * few  # some bits more say which rows


def test_a_weight_decay_is_refused_before_anything_is_sent(server):
    model = Tower(sparse=True)
    groups = [{"params": [model.table.weight, model.bag.weight]}, {"params": model.out.parameters()}]
    make = partial(psclient.ASGD, lr=0.1, weight_decay=0.1, model=model, server=server, settings=QUICK)
    optimizer = make(groups)
    with pytest.raises(ConfigurationError, match=r"'table.weight'.*weight_decay=0"):
        train(model, optimizer, 1)
    assert optimizer.version == 0
    optimizer.close()
    groups[0]["weight_decay"] = 0.0
    optimizer = make(groups)
    train(model, optimizer, 1)
    assert optimizer.version == 1


def test_gradients_of_several_backward_calls_add_up():
    models = [Tower(sparse=True) for _ in range(2)]
    for dense, model in zip((True, False), models, strict=True):
        with (
            psclient.LocalServer() as server,
            psclient.ASGD(model.parameters(), lr=0.5, model=model, server=server, settings=QUICK) as optimizer,
        ):
            for step in range(3):
                words, labels = batch(step)
                nn.functional.cross_entropy(model(words), labels).backward()
            if dense:
                for table in (model.table, model.bag):
                    table.weight.grad = table.weight.grad.coalesce().to_dense()
            optimizer.step(samples=3 * BATCH)
    assert same(*models)


class Tied(nn.Module):
    """A table that is read by rows and multiplied whole: torch makes its gradient dense."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.out = nn.Linear(COLUMNS, ROWS, bias=False)
        self.out.weight = self.table.weight

    def forward(self, words):
        return self.out(self.table(words).mean(1))


def test_a_tied_table_has_a_whole_gradient_and_rows_where_it_is_only_read():
    models = [Tied(sparse) for sparse in (True, False)]
    for model in models:
        with (
            psclient.LocalServer() as server,
            psclient.ASGD(model.parameters(), lr=0.5, model=model, server=server, settings=QUICK) as optimizer,
        ):
            for step, whole in enumerate((True, False, True)):
                words, _ = batch(step)
                optimizer.zero_grad()
                (model(words).square() if whole else model.table(words)).mean().backward()
                assert model.table.weight.grad.is_sparse == (model.table.sparse and not whole)
                optimizer.step()
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, expected)


def clip(parameters, most):
    """As docs/guide/embeddings.md has it."""
    found = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            found.append(parameter.grad.values())
        elif parameter.grad is not None:
            found.append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(found)
    for each in found:
        each.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


@pytest.mark.parametrize("method", ["the lines of the page", "clip_norm of DGC"])
def test_rows_are_clipped_as_the_whole_table_is(method):
    models, norms = [Tower(sparse) for sparse in (True, False)], []
    for model in models:
        make = psclient.ASGD
        if method == "clip_norm of DGC":
            make = partial(psclient.DGC, momentum=0.0, density=1.0, clip_norm=0.05)
        with (
            psclient.LocalServer() as server,
            make(model.parameters(), lr=0.5, model=model, server=server, settings=QUICK) as optimizer,
        ):
            before = [each.detach().clone() for each in model.parameters()]
            words, labels = batch(0)
            nn.functional.cross_entropy(model(words), labels).backward()
            if make is psclient.ASGD:
                clip(model.parameters(), 0.05)
            optimizer.step()
            pairs = zip(model.parameters(), before, strict=True)
            norms.append(torch.nn.utils.get_total_norm([each.detach() - was for each, was in pairs]).item())
    assert norms == pytest.approx([0.5 * 0.05] * 2, rel=1e-3)
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, expected)


TERMINATED = """
import sys, torch, psclient
from tests.system.tools import QUICK
from tests.system.training.test_sparse_embeddings import Tower, train
torch.set_num_threads(1)
model = Tower(sparse=True)
optimizer = psclient.GradientDropping(
    model.parameters(), lr=0.5, density=1e-4, model=model, server=sys.argv[1], settings=QUICK
)
train(model, optimizer, 4)
torch.save(model.state_dict(), sys.argv[2])
optimizer.flush() if sys.argv[3] == "flush" else None
print("trained", flush=True)
sys.stdin.read()
"""


def test_sigterm_pushes_what_rows_are_owed(tmp_path):
    saved = []
    for number, how in enumerate(("flush", "SIGTERM")):
        with psclient.LocalServer(down_mode="exact") as server:
            worker = subprocess.Popen(
                [sys.executable, "-c", TERMINATED, server.server, str(tmp_path / str(number)), how],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert worker.stdout.readline() == b"trained\n"
            if how == "SIGTERM":
                worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=60)
            assert worker.returncode == (128 + signal.SIGTERM if how == "SIGTERM" else 0)
            saved.append((torch.load(tmp_path / str(number)), psclient.download(server.server)))
    (before, flushed), (same_before, terminated) = saved
    for name, values in flushed.items():
        assert torch.equal(before[name], same_before[name])
        assert not torch.equal(values, before[name]), "rows were owed"
        assert torch.equal(terminated[name], values)
