"""A server starts from an older copy of its directory: no worker keeps a replica that differs from its model."""

import json
import shutil
import signal

from psclient.rpc.local_server import LocalServer
from tests.system.durability.test_durability import optimize
from tests.system.tools import assert_same_parameters, make_data, make_model, train_step


def test_a_worker_whose_version_an_older_copy_has_passed_again_gets_the_whole_model(tmp_path):
    data, copy = tmp_path / "data", tmp_path / "copy"
    with LocalServer(data_dir=data, down_mode="exact") as server:
        models = [make_model(seed, batch_norm=False) for seed in (0, 1)]
        with optimize(models[0], server, worker="a") as first, optimize(models[1], server, worker="b") as second:

            def train(worker, steps):
                for seed in range(steps):
                    train_step(models[worker], (first, second)[worker], *make_data(seed))

            train(0, 5)
            train(1, 5)
            shutil.copytree(data, copy)
            train(1, 5)  # what the copy does not have
            server.processes[0].send_signal(signal.SIGKILL)
            server.processes[0].wait()
            shutil.rmtree(data)
            shutil.copytree(copy, data)
            server.restart()
            train(0, 8)  # the server passes the version that the second worker has
            train(1, 1)
            assert_same_parameters(models[1], server.server)


def test_a_copy_in_the_wrong_place_is_named_where_the_directory_counts_as_empty(tmp_path):
    log, data = tmp_path / "log", tmp_path / "data"
    misplaced = data / "shard-0-of-1" / "shard-0-of-1"
    misplaced.mkdir(parents=True)
    with log.open("w") as stream, LocalServer(log_to=stream, log_format="json", data_dir=data):
        pass
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert [line for line in lines if line["level"] == "WARNING" and str(misplaced) in json.dumps(line)]
    log.unlink()
    misplaced.rmdir()
    with log.open("w") as stream, LocalServer(log_to=stream, log_format="json", data_dir=data):
        pass
    assert str(data) not in log.read_text()
