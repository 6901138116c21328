"""The worker's settings: their sources, its name in a job, and siblings that it must not ignore."""

import pytest

import psclient
from psclient.errors import ConfigurationError
from psclient.settings import addresses, load, sibling_workers, worker_name

OVER_NODES = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "one"}
"""One ``torchrun`` over two nodes."""
ON_EACH_NODE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "one"}
RAY_ON_A_NODE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


def test_arguments_go_before_environment_before_yaml_before_defaults(monkeypatch, yaml):
    monkeypatch.setenv("PSCLIENT_CONFIG", str(yaml("dense_below: 1\nserver: 'yaml:1'\nworker: from-yaml\n")))
    monkeypatch.setenv("PSCLIENT_DENSE_BELOW", "2")
    monkeypatch.setenv("PSCLIENT_SERVER", "environment:1")
    settings = load(server="argument:1", worker=None)
    assert (settings.server, settings.dense_below, settings.worker) == ("argument:1", 2, "from-yaml")
    assert settings.value_type == "fp32"


def test_by_default_no_server_is_named():
    assert load().server == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("value_type", "fp8"),
        ("dense_below", "-1"),
        ("bucket_bytes", "0"),
        ("deadline_seconds", "0"),
        ("deadline_seconds", "1e10"),
        ("deadline_seconds", "inf"),
        ("patience_seconds", "soon"),
    ],
)
def test_a_bad_value_is_named_with_its_variable(monkeypatch, name, value):
    monkeypatch.setenv(f"PSCLIENT_{name.upper()}", value)
    with pytest.raises(ConfigurationError, match=f"PSCLIENT_{name.upper()}: "):
        load()


def test_an_unknown_selector_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="selector=: 'fancy' is not known; use one of exact"):
        load(selector="fancy")


def test_an_unknown_setting_is_named(yaml):
    with pytest.raises(ConfigurationError, match="no_such"):
        load(no_such=1)
    with pytest.raises(ConfigurationError, match="no_such"):
        load(config=yaml("no_such: 1\n"))


def test_a_config_file_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match=r"/no/such/client\.yaml"):
        load(config="/no/such/client.yaml")


@pytest.mark.parametrize("text", ["dense_below: [1\n", "- a\n- list\n"])
def test_a_config_file_that_cannot_be_read_is_a_configuration_error(yaml, text):
    with pytest.raises(ConfigurationError):
        load(config=yaml(text))


def test_each_shard_has_an_address():
    assert addresses("a:1") == ("a:1",)
    assert addresses(" a:1, b:2 ,[::1]:3,") == ("a:1", "b:2", "[::1]:3")


@pytest.mark.parametrize("server", ["", "host", "ps-{0..N-1}:1"])
def test_a_bad_address_is_a_configuration_error(server):
    with pytest.raises(ConfigurationError, match="server"):
        addresses(server)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "job-0"),
        ({"SLURM_PROCID": "3"}, "slurm-3"),
        ({"RANK": "7"}, "rank-7"),
        ({"RANK": "7", "JOB_COMPLETION_INDEX": "2"}, "job-2"),
        ({"JOB_COMPLETION_INDEX": "2", **OVER_NODES}, "rank-7"),
        ({"SLURM_PROCID": "1", **OVER_NODES}, "rank-7"),
        ({"SLURM_PROCID": "2", **ON_EACH_NODE}, "slurm-2-rank-1"),
        ({"SLURM_PROCID": "0", **RAY_ON_A_NODE}, "rank-3"),
    ],
)
def test_a_worker_is_named_by_its_place_in_the_job(environment, name):
    assert worker_name(load(), environment) == name
    assert worker_name(load(worker="mine"), environment) == "mine"


@pytest.mark.parametrize(
    ("environment", "index"),
    [
        ({"PSCLIENT_WORKER": "trainer-3", "RANK": "7"}, 3),
        ({"PSCLIENT_WORKER": "anna", "RANK": "7"}, 7),
        ({"PSCLIENT_WORKER": "gpu12"}, 12),
        ({"JOB_COMPLETION_INDEX": "2", "PSCLIENT_SERVER": "a:1"}, 2),
        ({"SLURM_PROCID": "5"}, 5),
        ({"SLURM_PROCID": "1", **OVER_NODES}, 7),
        ({"SLURM_PROCID": "2", **ON_EACH_NODE}, 9),
        ({"SLURM_PROCID": "0", **RAY_ON_A_NODE}, 3),
        ({}, 0),
    ],
)
def test_a_worker_has_a_number(monkeypatch, environment, index):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert psclient.worker_index() == index
    assert psclient.worker_index(worker="other-9") == 9


def test_a_worker_of_a_server_without_a_number_is_told_how_to_have_one(monkeypatch):
    monkeypatch.setenv("PSCLIENT_SERVER", "a:1")
    with pytest.raises(ConfigurationError, match="PSCLIENT_WORKER=trainer-0"):
        psclient.worker_index()


def test_without_a_job_the_name_is_unique():
    names = {worker_name(load(), {}) for _ in range(20)}
    assert len(names) == 20
    assert all(names)


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE"),
        ({"SLURM_NTASKS": "2"}, "SLURM_NTASKS"),
        ({"SLURM_NTASKS": "1", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "many"}, None),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX"),
    ],
)
def test_siblings_are_told_by_the_job(environment, variable):
    assert sibling_workers(environment) == variable
