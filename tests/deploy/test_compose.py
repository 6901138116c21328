"""compose.yaml: valid, reached from this machine alone, of one mind with the image, the settings and the monitoring."""

from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from pscore.version import __version__
from psservice import settings
from psservice.settings import split_address

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus" / "prometheus.yml"
PROVISIONING = DEPLOY / "grafana" / "provisioning"


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def interpolated(text: str) -> str:
    """Replace the variables of a text by those of the ``.env`` that compose reads beside its file."""
    lines = [line for line in (DEPLOY / ".env").read_text().splitlines() if line and not line.startswith("#")]
    return Template(text).substitute(dict(line.split("=", 1) for line in lines))


COMPOSE = load(DEPLOY / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = [name for name in SERVICES if name.startswith("worker-")]


@pytest.fixture(name="server")
def server_settings(monkeypatch) -> settings.ServerSettings:
    """What the server of the file is told."""
    monkeypatch.setenv("PSSERVICE_CONFIG", str(DEPLOY / "psservice.yaml"))
    command = SERVICES["server"]["command"]
    assert command[0] == "serve"
    return settings.load(command[1:])


def test_it_is_a_compose_file():
    merged = interpolated(yaml.safe_dump(COMPOSE))  # the library neither merges anchors nor reads .env
    assert set(PyCompose.from_yaml(merged).service_names()) == {"server", *WORKERS, "prometheus", "grafana"}
    with pytest.raises(ValueError, match="cap_dropp"):
        PyCompose.from_yaml(merged.replace("cap_drop", "cap_dropp"))


def test_every_published_port_is_on_loopback():
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_servers_ports_are_those_of_its_settings(server):
    inside = {int(port.rpartition(":")[2]) for port in SERVICES["server"]["ports"]}
    assert inside == {split_address(server.listen)[1], split_address(server.metrics_listen)[1]}


def test_the_server_keeps_its_data_on_a_volume(server):
    (mount,) = SERVICES["server"]["volumes"]
    volume, _, target = mount.partition(":")
    assert volume in COMPOSE["volumes"]
    assert target == str(server.data_dir)


@pytest.mark.parametrize("name", WORKERS)
def test_workers_call_the_server_and_differ_in_their_number_alone(name, server):
    host, port = split_address(SERVICES[name]["environment"]["PSCLIENT_SERVER"])
    assert host in SERVICES
    assert port == split_address(server.listen)[1]
    assert SERVICES[name]["depends_on"] == {"server": {"condition": "service_healthy"}}
    script, *options = SERVICES[name]["command"]
    assert (ROOT / script).exists()
    assert options == ["--workers", str(len(WORKERS)), "--worker", name.removeprefix("worker-")]


@pytest.mark.parametrize("name", ["server", *WORKERS])
def test_images_are_built_here_and_carry_the_version(name):
    image, build = interpolated(SERVICES[name]["image"]), SERVICES[name]["build"]
    assert image == {"server": "localhost/sparseps", "quickstart": "localhost/sparseps-quickstart"}[build["target"]] + (
        f":{__version__}"
    )
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Containerfile"


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_images_of_others_are_pinned(name):
    tag = SERVICES[name]["image"].rpartition(":")[2]
    assert tag[0] in "v0123456789"
    assert "." in tag


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_what_is_mounted_exists(name):
    for mount in SERVICES[name]["volumes"]:
        source = mount.split(":")[0]
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source
            assert mount.endswith(":ro"), mount
        else:
            assert source in COMPOSE["volumes"], source


def test_prometheus_scrapes_the_server_and_loads_the_alerts(server):
    configuration = load(PROMETHEUS)
    (job,) = configuration["scrape_configs"]
    assert job["job_name"] == "psservice"
    assert job["static_configs"] == [{"targets": [f"server:{split_address(server.metrics_listen)[1]}"]}]
    for rules in configuration["rule_files"]:
        assert load(PROMETHEUS.parent / rules)["groups"]


def test_grafana_finds_prometheus_and_the_dashboard():
    (source,) = load(PROVISIONING / "datasources" / "prometheus.yaml")["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert host in SERVICES
    assert f"127.0.0.1:{port}:{port}" in SERVICES[host]["ports"]

    (provider,) = load(PROVISIONING / "dashboards" / "sparseps.yaml")["providers"]
    targets = {mount.split(":")[1]: mount.split(":")[0] for mount in SERVICES["grafana"]["volumes"]}
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert targets[home] == "./grafana/dashboard.json"
    assert str(Path(home).parent) == provider["options"]["path"]
