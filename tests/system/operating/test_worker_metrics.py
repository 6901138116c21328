"""A worker's own metrics: on a port if it was asked for, as the optimizer counts, and gone with the worker."""

import logging
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from tests.deploy.monitoring_tools import needs_promtool, promtool
from tests.system.tools import QUICK, make_data, make_model, optimizer_of, train_step

ANYWHERE = QUICK.model_copy(update={"metrics_listen": "127.0.0.1:0"})


@pytest.fixture
def server():
    with LocalServer() as running:
        yield running


def address_in(caplog):
    (line,) = [each.getMessage() for each in caplog.records if "has metrics at" in each.getMessage()]
    return line.rpartition(" ")[2]


def scraped(url):
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=30) as answer:
        return answer.read().decode()


def samples(text):
    return [each for family in text_string_to_metric_families(text) for each in family.samples]


def value(text, name, **labels):
    (found,) = [each.value for each in samples(text) if each.name == name and labels.items() <= each.labels.items()]
    return found


@pytest.mark.parametrize(("method", "steps"), [("dgs", 4), ("overlap", 4), ("outer", 2)])
def test_a_workers_metrics_are_what_its_optimizer_counts(server, caplog, method, steps):
    caplog.set_level(logging.INFO, "psclient")
    model = make_model()
    optimizer = optimizer_of(method, model, server=server, worker="w", settings=ANYWHERE)
    url = address_in(caplog)
    try:
        for seed in range(4):
            train_step(model, optimizer, *make_data(seed))
        optimizer.pull()  # with overlap, also the end of the last step
        text, totals = scraped(url), optimizer.totals
        for name in ("push_bytes", "pull_bytes", "samples", "upload_bytes", "refused"):
            assert value(text, f"psclient_{name}_total") == getattr(totals, name)
        assert steps - 1 <= value(text, "psclient_version") <= steps  # with overlap, of the reply before
        assert value(text, "psclient_step_seconds_count") == value(text, "psclient_steps_total") == steps
        assert 0 < value(text, "psclient_push_density") <= 1
        assert value(text, "psclient_phase_seconds_total", phase="wait") > 0
        own = {(each.labels["run"], each.labels["worker"]) for each in samples(text)}
        assert own == {(optimizer.run_id, "w")}
    finally:
        optimizer.close()
    with pytest.raises(OSError, match="refused"):
        scraped(url)


@needs_promtool
def test_promtool_finds_them_sound(server, caplog):
    caplog.set_level(logging.INFO, "psclient")
    model = make_model()
    with optimizer_of("dgs", model, server=server, worker="w", settings=ANYWHERE) as optimizer:
        train_step(model, optimizer, *make_data())
        checked = promtool("check", "metrics", stdin=scraped(address_in(caplog)))
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_nothing_listens_unless_it_was_asked_for(server, caplog):
    caplog.set_level(logging.INFO, "psclient")
    with optimizer_of("dgs", make_model(), server=server, worker="w") as optimizer:
        assert optimizer._engine.metrics is None
    assert not [each for each in caplog.records if "metrics" in each.getMessage()]


@pytest.mark.parametrize("address", ["9465", ":9465", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x"])
def test_what_is_no_address_is_an_error_that_says_so(server, address):
    settings = QUICK.model_copy(update={"metrics_listen": address})
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        optimizer_of("dgs", make_model(), server=server, worker="w", settings=settings)


def test_a_port_that_is_taken_is_an_error_and_the_next_optimizer_joins(server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = QUICK.model_copy(update={"metrics_listen": f"127.0.0.1:{taken.getsockname()[1]}"})
        with pytest.raises(ConfigurationError, match="PSCLIENT_METRICS_LISTEN"):
            optimizer_of("dgs", make_model(), server=server, worker="w", settings=settings)
    with optimizer_of("dgs", make_model(), server=server, worker="w") as optimizer:
        assert optimizer.run_id
