"""An optimizer is one worker's place in a run, and cannot be copied: it says so, and what to do instead."""

import copy
import io
import pickle

import pytest
import torch

from psclient.errors import CopyRefusedError
from psclient.rpc.local_server import LocalServer
from tests.system.tools import make_data, make_model, optimizer_of, train_step

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of what holds it": lambda optimizer: copy.deepcopy({"optimizer": optimizer}),
    "pickle": pickle.dumps,
    "torch.save": lambda optimizer: torch.save(optimizer, io.BytesIO()),
}


@pytest.fixture(scope="module")
def server():
    with LocalServer(down_mode="exact") as running:
        yield running


@pytest.mark.parametrize("kind", COPIES)
def test_copying_is_refused_and_training_goes_on(server, kind):
    model = make_model()
    with optimizer_of("dgs", model, server=server, worker=kind) as optimizer:
        with pytest.raises(CopyRefusedError, match=r"DGS.*state_dict\(\).*new optimizer"):
            COPIES[kind](optimizer)
        before = optimizer.version
        train_step(model, optimizer, *make_data())
        assert optimizer.version == before + 1


def test_its_state_can_be_copied(server):
    model = make_model()
    with optimizer_of("dgs", model, server=server) as optimizer:
        train_step(model, optimizer, *make_data())
        copied = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copied)
        train_step(model, optimizer, *make_data())
