"""A shard that lost its disk while no worker lived, and shard 0's disk: what is gone is named, early, by its name."""

import logging
import shutil
import signal

import pytest

import psclient
from psclient.errors import ServerNotReadyError
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl.client import call
from tests.system.tools import QUICK, make_data, make_model, train_step

IMPATIENT = QUICK.model_copy(update={"connect_seconds": 3.0})


def optimize(model, server, worker, settings=QUICK):
    return psclient.ASGD(
        model.parameters(), lr=0.1, model=model, server=server.server, worker=worker, settings=settings
    )


def lose(server, data, shard):
    server.processes[shard].send_signal(signal.SIGKILL)
    server.processes[shard].wait()
    shutil.rmtree(data / f"shard-{shard}-of-2")
    server.restart(shard)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_new_worker_says_at_once_which_shard_has_lost_the_model_and_what_helps(lost, tmp_path, caplog):
    with LocalServer(shards=2, data_dir=tmp_path) as server:
        model = make_model(batch_norm=False)
        with optimize(model, server, "first") as optimizer:
            train_step(model, optimizer, *make_data())
        lose(server, tmp_path, lost)
        with caplog.at_level(logging.WARNING, "psclient"), pytest.raises(ServerNotReadyError) as failed:
            optimize(make_model(batch_norm=False), server, "second", IMPATIENT)
        name, other = (f"shard {index} at {server.addresses[index]}" for index in (lost, 1 - lost))
        assert f"{name} has no model" in str(failed.value)
        assert other not in str(failed.value)
        assert "backup" in str(failed.value)
        (warning,) = [message for message in caplog.messages if "has no model" in message]  # once, and before the end
        assert name in warning
        assert caplog.messages.index(warning) == 0


def test_the_first_upload_of_a_run_warns_of_nothing(tmp_path, caplog):
    with LocalServer(shards=2, data_dir=tmp_path) as server, caplog.at_level(logging.WARNING, "psclient"):
        models = [make_model(batch_norm=False) for _ in range(2)]
        with optimize(models[0], server, "first"), optimize(models[1], server, "second"):
            assert not [message for message in caplog.messages if "no model" in message]


def test_a_worker_that_fills_shard_0_again_makes_the_server_say_what_is_gone(tmp_path):
    log = (tmp_path / "log").open("w+")
    with log, LocalServer(shards=2, data_dir=tmp_path / "data", log_to=log) as server:
        model = make_model(batch_norm=False)
        with optimize(model, server, "only") as optimizer:
            for _ in range(3):
                train_step(model, optimizer, *make_data())
            assert "had lost its data" not in (tmp_path / "log").read_text()
            lose(server, tmp_path / "data", 0)
            train_step(model, optimizer, *make_data())
            status = call(server.addresses[0], "GetStatus", pb.GetStatusRequest(), 10)
            assert status.samples < 4 * len(make_data()[1])
        assert "shard 0 had lost its data" in (tmp_path / "log").read_text()
