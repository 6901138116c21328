"""What the Containerfile promises, as far as it can be read; ``make container-test`` sees the rest in a real image."""

import io
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from pscore.version import __version__
from psservice import settings
from psservice.settings import ServerSettings, split_address

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
CONFIGURATION = ROOT / "deploy" / "psservice.yaml"
FINAL = ("server", "server-gpu", "quickstart")
PORTS = ("listen", "health_listen", "metrics_listen")


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name, with their values; its FROM first."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for part in DockerfileParser(fileobj=io.BytesIO(CONTAINERFILE.read_bytes())).structure:
        if part["instruction"] == "COMMENT":
            continue
        if part["instruction"] == "FROM":
            name = part["value"].split()[-1]
        found.setdefault(name, []).append((part["instruction"], part["value"]))
    return found


STAGES = stages()


def values(stage: str, instruction: str) -> list[str]:
    return [value for kind, value in STAGES[stage] if kind == instruction]


def environment(stage: str) -> dict[str, str]:
    return dict(word.split("=", 1) for value in values(stage, "ENV") for word in shlex.split(value))


@pytest.mark.parametrize("stage", FINAL)
def test_the_image_does_not_run_as_root(stage):
    assert values(stage, "USER")[-1] == "10001:10001"


@pytest.mark.parametrize(
    ("stage", "instruction"), [(s, i) for s in ("server", "quickstart") for i in ("ENTRYPOINT", "CMD")]
)
def test_signals_reach_the_process_and_no_shell(stage, instruction):
    (value,) = values(stage, instruction)
    assert all(isinstance(word, str) for word in json.loads(value))


def test_the_server_is_what_runs_and_sigterm_what_ends_it():
    assert json.loads(values("server", "ENTRYPOINT")[0]) == ["psservice"]
    assert json.loads(values("server", "CMD")[0]) == ["serve"]
    assert values("server", "STOPSIGNAL") == ["SIGTERM"]


def test_the_health_check_is_a_program_that_asks_the_health_port():
    (value,) = values("server", "HEALTHCHECK")
    *command, asked = json.loads(value.partition("CMD ")[2])
    assert command == ["psservice", "health"]
    told = yaml.safe_load(CONFIGURATION.read_text())["health_listen"]
    assert split_address(asked) == ("127.0.0.1", split_address(told)[1])


def test_compose_asks_for_health_as_the_image_does():
    options, _, command = values("server", "HEALTHCHECK")[0].partition("CMD ")
    asked = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["server"]["healthcheck"]
    assert asked.pop("test") == ["CMD", *json.loads(command)]
    assert {name.replace("_", "-"): str(value) for name, value in asked.items()} == dict(
        word.removeprefix("--").split("=") for word in options.split()
    )


def test_the_labels_name_the_version_of_this_source():
    labels = values("server", "LABEL")[0]
    assert 'org.opencontainers.image.version="${VERSION}"' in labels
    assert 'org.opencontainers.image.revision="${REVISION}"' in labels
    assert f"VERSION={__version__}" in values("server", "ARG")


def test_the_exposed_ports_are_those_of_the_settings():
    told = yaml.safe_load(CONFIGURATION.read_text())
    ports = [split_address(told[name])[1] for name in PORTS]
    assert [int(port) for port in values("server", "EXPOSE")[0].split()] == ports
    assert ports[0] == split_address(ServerSettings.model_fields["listen"].default)[1]


def test_the_settings_of_the_image_are_valid_and_let_nobody_in_unasked(monkeypatch):
    monkeypatch.setenv("PSSERVICE_CONFIG", str(CONFIGURATION))
    with pytest.raises(settings.SettingsError, match="--insecure"):
        settings.load([])
    loaded = settings.load(["--insecure"])
    assert [str(loaded.data_dir)] == json.loads(values("server", "VOLUME")[0])


def test_the_image_reads_the_settings_that_are_copied_into_it():
    assert f"deploy/{CONFIGURATION.name} {environment('server')['PSSERVICE_CONFIG']}" in values("server", "COPY")


@pytest.mark.parametrize("name", ["HOME", "NUMBA_CACHE_DIR"])
def test_what_is_written_at_run_time_goes_where_a_read_only_root_has_room(name):
    assert (Path(environment("server")[name]) / "x").is_relative_to("/tmp")


def test_the_image_for_gpus_takes_one_and_can_compile_where_the_root_is_read_only():
    assert STAGES["server-gpu"][0] == ("FROM", "server AS server-gpu")
    assert environment("server-gpu")["PSSERVICE_DEVICE"] == "cuda"
    assert Path(environment("server-gpu")["TRITON_CACHE_DIR"]).is_relative_to("/tmp")
    assert any("gcc" in value and "sparseps[gpu]" in value for value in values("server-gpu", "RUN"))


@pytest.mark.parametrize("stage", ["server", "quickstart"])
def test_nothing_is_compiled_or_fetched_by_the_system_in_an_image_for_cpus(stage):
    assert not [value for value in values(stage, "RUN") if re.search(r"\b(apt|apt-get|gcc|apk|dnf)\b", value)]


@pytest.mark.parametrize("stage", STAGES)
def test_no_step_is_for_one_processor_alone(stage):
    text = " ".join(value for _, value in STAGES[stage])
    assert not re.search(r"amd64|linux-gnu|manylinux|\.whl", text)
    if "x86_64" in text:
        assert re.search(r"x86_64\) \S+ ;; \*\) \S+ ;; esac", text)


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_that_must_stay_secret_is_an_argument_or_in_the_environment(stage):
    names = [value.partition("=")[0] for value in values(stage, "ARG")] + list(environment(stage))
    assert not [name for name in names if re.search("TOKEN|PASS|SECRET|KEY|CREDENTIAL", name, re.IGNORECASE)]


def test_what_is_copied_exists_and_is_let_into_the_build():
    kept = {line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for stage in STAGES:
        for value in values(stage, "COPY"):
            words = value.split()
            if not words[0].startswith("--from="):
                copied |= set(words[:-1])
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)


def test_docker_and_podman_leave_out_the_same():
    assert (ROOT / ".dockerignore").read_text() == (ROOT / ".containerignore").read_text()


def test_a_base_image_is_the_only_source_of_a_stage():
    assert values("build", "FROM")[0].split()[0] == "${BUILD_IMAGE}"
    assert values("base", "FROM")[0].split()[0] == "${BASE_IMAGE}"
    assert values("server", "FROM")[0].split()[0] == "scratch"
    assert {value.split()[0] for value in values("server", "COPY")[:3]} == {"--from=base", "--from=build"}
    assert values("quickstart", "FROM")[0].split()[0] == "server"
