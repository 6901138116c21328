"""A run of two shards that an operator's commands are given to."""

import pytest

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, make_data, make_model, train_step


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory):
    """A run of two shards with a data directory; each test leaves it serving."""
    with LocalServer(shards=2, health_listen="127.0.0.1:0", data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture
def worker(two_shards):
    """A model and its optimizer, after one step."""
    model = make_model(batch_norm=False)
    with_dgs = psclient.DGS(
        model.parameters(), lr=0.1, density=0.01, model=model, server=two_shards.server, worker="w", settings=QUICK
    )
    train_step(model, with_dgs, *make_data())
    yield model, with_dgs
    with_dgs.close()
