"""Workers that train the same batches in the same order are told so, once; others are not."""

import logging

import pytest

import psclient
from tests.system.tools import QUICK, make_data, make_model, train_step, wait_until

LEASE_SECONDS = 0.5


@pytest.fixture
def server():
    with psclient.LocalServer(lease_seconds=LEASE_SECONDS) as server:
        yield server


def worker(server, name, seeds, overlap=False):
    model = make_model()
    optimizer = psclient.ASGD(
        model.parameters(), lr=0.01, model=model, server=server, worker=name, overlap=overlap, settings=QUICK
    )
    for seed in seeds:
        train_step(model, optimizer, *make_data(seed=seed, count=16))
    return optimizer


def warned(caplog):
    return sorted(record.args[0] for record in caplog.records if "the same batches" in record.msg)


@pytest.mark.parametrize("overlap", [False, True])
def test_workers_with_the_same_batches_are_told_once_and_others_are_not(server, caplog, overlap):
    caplog.set_level(logging.WARNING)
    with (
        worker(server, "other", range(10, 16)),
        worker(server, "constant", [7] * 6),
        worker(server, "constant too", [7] * 6),
        worker(server, "one", range(6), overlap),
        worker(server, "two", range(6), overlap),
    ):
        wait_until(lambda: len(warned(caplog)) >= 2)
        with worker(server, "three", range(6)):
            wait_until(lambda: len(warned(caplog)) >= 3)
    assert warned(caplog) == ["one", "three", "two"]
    text = next(record.getMessage() for record in caplog.records if "the same batches" in record.msg)
    assert "torch.manual_seed(seed + psclient.worker_index())" in text


def test_evaluation_is_no_batch(server, caplog):
    models = [make_model(), make_model()]
    optimizers = [
        psclient.ASGD(model.parameters(), lr=0.01, model=model, server=server, worker=name, settings=QUICK)
        for model, name in zip(models, "ab", strict=True)
    ]
    for number, model in enumerate(models):
        model.eval()
        for seed in range(6):
            model(make_data(seed=seed, count=16)[0])
        model.train()
        for seed in range(6):
            train_step(model, optimizers[number], *make_data(seed=10 * number + 20 + seed, count=16))
    with worker(server, "c", range(30, 36)):
        wait_until(lambda: warned(caplog) == ["b", "c"])
    for optimizer in optimizers:
        optimizer.close()
