"""What a worker's log says of joining: where it is, and whose parameters it trains."""

import logging

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, make_data, make_model, train_step


def join(server, worker, seed=0):
    model = make_model(seed)
    arguments = {"lr": 0.1, "model": model, "server": server.server, "worker": worker, "settings": QUICK}
    return model, psclient.ASGD(model.parameters(), **arguments)


def test_one_line_says_where_a_worker_is_and_whose_parameters_it_trains(caplog):
    caplog.set_level(logging.INFO, "psclient")
    with LocalServer(run_id="digits") as server:
        model, optimizer = join(server, "w0")
        with optimizer:
            assert said(caplog) == [
                f"worker w0 has joined run digits at {server.server}, version 0: its model was uploaded"
            ]
            train_step(model, optimizer, *make_data())
            _, late = join(server, "w1", seed=1)
            with late:
                assert said(caplog)[1:] == [
                    f"worker w1 has joined run digits at {server.server}, version 1: the server's parameters are taken "
                    "over"
                ]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_run_that_others_have_trained_and_left_is_a_warning(caplog):
    with LocalServer(run_id="digits") as server:
        model, optimizer = join(server, "w0")
        with optimizer:
            train_step(model, optimizer, *make_data())
        _, late = join(server, "w1", seed=1)
        with late:
            assert not late.finished
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "this worker goes on with run digits, which others have trained to version 1 and left"
    )
    assert "--data-dir" in warnings[0]


def test_a_finished_run_is_a_warning(caplog):
    with LocalServer(run_id="digits", end_versions=1) as server:
        model, optimizer = join(server, "w0")
        with optimizer:
            train_step(model, optimizer, *make_data())
        _, late = join(server, "w1")
        with late:
            assert late.finished
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("run digits is finished, at version 1")


def said(caplog):
    return [record.message for record in caplog.records if "has joined" in record.message]
