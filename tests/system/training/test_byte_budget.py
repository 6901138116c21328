"""``budget=0.03``: every method keeps to 3 % of the dense bytes, up and down, on a real server with two shards."""

import pytest
import torch

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK
from tests.tiers import long_but

BUDGET = 0.03
STEPS, BEGINNING = 12, 4  # whole replies of the beginning are not counted
SETTINGS = QUICK.model_copy(update={"dense_below": 4096})

METHODS = {
    "dgs": (psclient.DGS, {"lr": 0.01}),
    "dgc": (psclient.DGC, {"lr": 0.01}),
    "gradient_dropping": (psclient.GradientDropping, {"lr": 0.01}),
    "ssgd": (psclient.SSGD, {"lr": 0.01}),
    "rmsprop": (psclient.ServerOptimizer, {"optimizer": "RMSprop", "options": {"lr": 1e-4}}),
    "server_rmsprop": (psclient.ServerRMSprop, {"lr": 1e-4}),
    "lazy_rmsprop": (psclient.ServerOptimizer, {"optimizer": "RMSprop", "options": {"lr": 1e-4}, "lazy": True}),
    "overlap": (psclient.DGS, {"lr": 0.01, "overlap": True}),
}


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128))


def train(model, optimizer, steps):
    reports = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(16, 256)).square().mean().backward()
        optimizer.step()
        reports.append(optimizer.report)
    return reports


@pytest.mark.parametrize("method", long_but(["dgs", "server_rmsprop", "overlap"], METHODS))
def test_pushes_and_replies_keep_to_the_budget(method):
    kind, options = METHODS[method]
    model = make_model()
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    with (
        LocalServer(2) as server,
        kind(
            model.parameters(), model=model, server=server, worker="first", settings=SETTINGS, budget=BUDGET, **options
        ) as optimizer,
    ):
        reports = train(model, optimizer, STEPS)[BEGINNING:]
        assert {report.reply_mode for report in reports} == {"topk"}
        for way in ("push_bytes", "pull_bytes"):
            mean = sum(getattr(report, way) for report in reports) / len(reports)
            assert 0.8 * BUDGET < mean / dense < 1.1 * BUDGET, way
        optimizer.pull()
        other = make_model()
        with kind(
            other.parameters(), model=other, server=server, worker="second", settings=SETTINGS, budget=BUDGET, **options
        ):
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(mine, theirs)


SPARSE = {name: METHODS[name] for name in ("dgs", "dgc", "gradient_dropping", "server_rmsprop")}


@pytest.mark.parametrize("method", SPARSE)
def test_a_sparse_method_has_this_budget_by_default(method):
    kind, options = SPARSE[method]
    model = make_model()
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    with kind(model.parameters(), model=model, settings=SETTINGS, **options) as optimizer:
        for report in train(model, optimizer, STEPS)[BEGINNING:]:
            assert 0.8 * BUDGET * dense < report.push_bytes < 1.1 * BUDGET * dense
            assert report.push_entries > 0.08 * dense / 4, "many entries of few bits"


@pytest.mark.parametrize(
    ("given", "settings"),
    [({"density": 0.01}, {}), ({}, {"value_type": "fp32"}), ({}, {"value_type": "int8"})],
    ids=["density", "fp32", "int8"],
)
def test_a_form_that_is_chosen_by_hand_has_no_budget(given, settings):
    model = make_model()
    elements = sum(parameter.numel() for parameter in model.parameters())
    settings = psclient.ClientSettings(server="local", dense_below=0, **settings)
    with psclient.DGS(model.parameters(), lr=0.01, model=model, settings=settings, **given) as optimizer:
        report = train(model, optimizer, 4)[-1]
        assert report.reply_mode == "exact"
        assert 0.008 * elements < report.push_entries < 0.012 * elements


def test_a_dense_method_takes_the_bits_that_fit():
    model = make_model()
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    with psclient.ASGD(model.parameters(), lr=0.01, model=model, settings=SETTINGS, budget=0.14) as optimizer:
        for report in train(model, optimizer, STEPS)[BEGINNING:]:
            assert report.push_bytes < 0.14 * dense
            assert report.pull_bytes < 0.14 * dense


def test_a_server_that_answers_exactly_does_so_all_the_same():
    model = make_model()
    with (
        LocalServer(down_mode="exact") as server,
        psclient.DGS(
            model.parameters(), lr=0.01, model=model, server=server, settings=SETTINGS, budget=BUDGET
        ) as optimizer,
    ):
        assert {report.reply_mode for report in train(model, optimizer, STEPS)} == {"exact"}


@pytest.mark.parametrize("method", long_but(["dgs"], ["dgs", "gradient_dropping", "rmsprop", "server_rmsprop"]))
def test_gradients_that_are_zero_here_and_there_keep_to_a_budget_that_sends_all(method):
    """A fifth of the units is dead: their gradients are zeros, whose places would cost more than they do."""
    kind, options = METHODS[method]
    model = make_model()
    with torch.no_grad():
        model[0].bias[::5] = -1e6
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    with kind(model.parameters(), model=model, settings=SETTINGS, budget=0.14, **options) as optimizer:
        for report in train(model, optimizer, STEPS)[BEGINNING:]:
            assert report.push_entries == dense // 4
            assert report.push_bytes < 0.14 * dense
            assert report.pull_bytes < 0.14 * dense
