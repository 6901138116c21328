"""Settings that cannot be meant: unknown names with the nearest known one, URLs where a file is meant."""

import pytest

import psclient
from psclient.cli import main as psclient_main
from psclient.errors import ConfigurationError
from psclient.settings import load as load_client
from psservice.cli.main import main as psservice_main
from psservice.settings import SettingsError
from psservice.settings import load as load_server

SERVICE_LINKS = {
    "SERVICE_HOST": "10.96.0.7",
    "SERVICE_PORT": "50051",
    "SERVICE_PORT_GRPC": "50051",
    "PORT": "tcp://10.96.0.7:50051",
    "PORT_50051_TCP": "tcp://10.96.0.7:50051",
    "PORT_50051_TCP_PROTO": "tcp",
    "PORT_50051_TCP_PORT": "50051",
    "PORT_50051_TCP_ADDR": "10.96.0.7",
    "0_SERVICE_HOST": "10.96.0.8",
    "METRICS_PORT": "tcp://10.96.0.9:9464",
    "METRICS_PORT_9464_TCP_ADDR": "10.96.0.9",
}
"""What Kubernetes puts into a Pod for the Services psservice, psservice-0 and psservice-metrics, behind the prefix."""


def test_a_mistyped_variable_is_refused_with_the_nearest_name(monkeypatch):
    monkeypatch.setenv("PSSERVICE_DATADIR", "/data")
    with pytest.raises(SettingsError, match=r"PSSERVICE_DATADIR: .*did you mean PSSERVICE_DATA_DIR"):
        load_server([])
    load_client()
    monkeypatch.setenv("PSCLIENT_SEVER", "ps:1")
    with pytest.raises(ConfigurationError, match=r"PSCLIENT_SEVER: .*did you mean PSCLIENT_SERVER"):
        load_client()


def test_every_mistyped_variable_is_named_at_once(monkeypatch):
    monkeypatch.setenv("PSSERVICE_DATADIR", "/data")
    monkeypatch.setenv("PSSERVICE_QWERTYUIOP", "1")
    with pytest.raises(SettingsError, match=r"(?s)PSSERVICE_DATADIR.*PSSERVICE_QWERTYUIOP: .*docs/reference/settings"):
        load_server([])


def test_a_variable_of_a_service_that_kubernetes_sets_is_none_of_ours(monkeypatch):
    for name, value in SERVICE_LINKS.items():
        monkeypatch.setenv(f"PSSERVICE_{name}", value)
        monkeypatch.setenv(f"PSCLIENT_{name}", value)
    assert load_server([]).listen == "127.0.0.1:50051"
    assert load_client().server == ""


def test_a_port_that_is_no_service_link_is_a_mistake(monkeypatch):
    monkeypatch.setenv("PSSERVICE_PORT", "50061")
    with pytest.raises(SettingsError, match=r"PSSERVICE_PORT: there is no such setting"):
        load_server([])


def test_the_programs_refuse_it_before_they_do_anything(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PSSERVICE_LEASE_SECOND", "3")
    monkeypatch.setenv("PSCLIENT_TOKENFILE", "token")
    for main, words, status in (
        (psservice_main, ["serve"], 2),
        (psservice_main, ["status", "127.0.0.1:9"], 2),
        (psclient_main, ["save", "127.0.0.1:9", "--out", str(tmp_path / "out")], 1),
    ):
        assert main(words) == status
        printed = capsys.readouterr().err
        assert "did you mean PS" in printed
        assert "Traceback" not in printed


def test_the_library_refuses_it(monkeypatch):
    monkeypatch.setenv("PSCLIENT_SEVER", "ps:1")
    with pytest.raises(ConfigurationError, match=r"PSCLIENT_SERVER"):
        psclient.ClientSettings()


@pytest.mark.parametrize("name", ["data_dir", "init", "final_model", "tokens"])
@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket", "file:///data", "https://host/x"])
def test_a_url_is_no_file_of_this_machine(name, url, monkeypatch, yaml):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(SettingsError, match=f"{flag}: '{url}' is a URL"):
        load_server([f"{flag}={url}"])
    with pytest.raises(SettingsError, match=f"{name} in .*: '{url}' is a URL"):
        load_server([f"--config={yaml(f'{name}: {url}')}"])
    monkeypatch.setenv(f"PSSERVICE_{name.upper()}", url)
    with pytest.raises(SettingsError, match=f"PSSERVICE_{name.upper()}: '{url}' is a URL"):
        load_server([])


def test_a_value_is_named_where_it_was_given(monkeypatch, yaml):
    config = yaml("lease_seconds: 0\n")
    with pytest.raises(SettingsError, match=r"^--lease-seconds: "):
        load_server(["--config", str(config), "--lease-seconds", "0"])
    with pytest.raises(SettingsError, match=f"^lease_seconds in {config}: "):
        load_server(["--config", str(config)])
    monkeypatch.setenv("PSSERVICE_LEASE_SECONDS", "0")
    with pytest.raises(SettingsError, match=r"^PSSERVICE_LEASE_SECONDS: "):
        load_server(["--config", str(config)])


def test_an_unknown_key_of_a_file_is_named_with_the_nearest_one(yaml):
    config = yaml("data-dir: /data\nlease_secs: 3\n")
    with pytest.raises(SettingsError, match=f"(?s)data-dir in {config}: .*did you mean data_dir.*did you mean lease"):
        load_server(["--config", str(config)])
    with pytest.raises(ConfigurationError, match=f"sever in {yaml('sever: x')}: .*did you mean server"):
        load_client(config=yaml("sever: x"))


def test_an_unknown_argument_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="sever=: there is no such setting; did you mean server="):
        psclient.ClientSettings(sever="ps:1")
    with pytest.raises(ConfigurationError, match="dense_below=: "):
        psclient.ClientSettings(dense_below=-1)
    with pytest.raises(ConfigurationError, match="deadline_seconds=: "):
        psclient.ClientSettings(deadline_seconds="soon")


def test_flags_that_belong_together_are_named_as_they_are_typed():
    for flags in (["--tls-cert=c.pem"], ["--tls-client-ca=ca.pem"]):
        with pytest.raises(SettingsError, match="--tls-cert and --tls-key"):
            load_server(flags)
    with pytest.raises(SettingsError, match="--shard-index 2 needs --num-shards above it"):
        load_server(["--shard-index=2", "--num-shards=2"])
