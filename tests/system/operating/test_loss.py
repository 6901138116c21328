"""Losses that workers log: seen by operators, of every method, and no part of what a server recovers."""

import json
import urllib.request

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from tests.system.operating.asking import status
from tests.system.tools import QUICK, make_data, make_model, optimizer_of, train_step, wait_until


def told(address):
    """The loss of the only worker, as the shard has it."""
    (worker,) = status(address).workers
    return worker.loss if worker.HasField("loss") else None


def past(server):
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://{server.metrics_addresses[0]}/history.json", timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize("method", ["dgs", "overlap", "outer"])
def test_a_loss_goes_with_the_next_push_to_shard_0_alone(method):
    with LocalServer(shards=2) as server:
        model = make_model()
        optimizer = optimizer_of(method, model, server=server, worker="w")
        train_step(model, optimizer, *make_data())
        assert told(server.addresses[0]) is None
        for loss, seen in ((torch.tensor([2.5], requires_grad=True), 2.5), (-3, -3.0)):
            optimizer.log_loss(7.0)
            optimizer.log_loss(loss)
            for _ in range(3):
                train_step(model, optimizer, *make_data())
            wait_until(lambda seen=seen: told(server.addresses[0]) == seen, 30)
        assert told(server.addresses[1]) is None
        optimizer.close()


def test_what_is_no_loss_is_left_out_or_an_error():
    with LocalServer() as server:
        model = make_model()
        optimizer = optimizer_of("dgs", model, server=server, worker="w")
        optimizer.log_loss(1.0)
        train_step(model, optimizer, *make_data())
        for loss in (float("nan"), float("inf"), torch.tensor(-float("inf")), 1e300):
            optimizer.log_loss(loss)
            train_step(model, optimizer, *make_data())
        assert told(server.addresses[0]) == 1.0
        with pytest.raises(ConfigurationError, match="one element"):
            optimizer.log_loss(torch.zeros(2))
        optimizer.close()


def test_a_recovered_server_has_the_push_and_not_its_loss(tmp_path):
    with LocalServer(data_dir=tmp_path, fsync="always") as server:
        model = make_model()
        optimizer = psclient.DGS(model.parameters(), lr=0.1, model=model, server=server, worker="w", settings=QUICK)
        optimizer.log_loss(1.5)
        train_step(model, optimizer, *make_data())
        wait_until(lambda: 1.5 in past(server)["loss"], 60)
        server.processes[0].kill()
        server.restart()
        wait_until(lambda: len(past(server)["loss"]) > 0, 60)
        assert set(past(server)["loss"]) == {None}
        assert status(server.addresses[0]).version == 1
        train_step(model, optimizer, *make_data())
        assert told(server.addresses[0]) is None
        optimizer.close()
