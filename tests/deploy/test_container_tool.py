"""The parts of ``make container-test`` that can be tried without a container."""

import configparser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.container_test import hostpip, manifests
from tools.container_test.machine import SKIPPED, SkippedError, TestFailedError, wait_until

STATEFUL = """
kind: StatefulSet
metadata: {name: shards}
spec:
  replicas: 2
  serviceName: service
  template:
    metadata: {labels: {app: x}}
    spec:
      containers:
        - name: server
          image: localhost/server
          ports: [{containerPort: 50051}]
          env:
            - {name: PLAIN, value: "1"}
            - {name: INDEX, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
            - {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
            - {name: ADDRESS, value: "$(NAME).service:$(PORT)"}
            - {name: PORT, value: "1"}
  volumeClaimTemplates:
    - metadata: {name: data}
      spec: {accessModes: [ReadWriteOnce]}
"""
JOB = """
kind: Job
metadata: {name: workers}
spec:
  completions: 3
  template:
    spec:
      restartPolicy: OnFailure
      containers: [{name: worker, image: localhost/worker}]
"""
CONFIGURATION = "kind: ConfigMap\nmetadata: {name: settings}\n"


def documents(*texts: str) -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for text in texts]


def test_every_ordinal_gets_a_pod_and_a_claim_of_its_own():
    plan = manifests.plan(documents(STATEFUL, CONFIGURATION, JOB))
    assert [pod.container_name for pod in plan.servers] == ["shards-0-server", "shards-1-server"]
    assert [pod.aliases for pod in plan.servers] == [("service", f"shards-{i}.service") for i in (0, 1)]
    for ordinal, played in enumerate(plan.servers):
        configuration, claim, pod = yaml.safe_load_all(played.text)
        assert configuration["metadata"]["name"] == "settings"
        assert claim["kind"] == "PersistentVolumeClaim"
        assert claim["metadata"]["name"] == f"data-shards-{ordinal}"
        assert {"claimName": claim["metadata"]["name"]} in [v["persistentVolumeClaim"] for v in pod["spec"]["volumes"]]
        (container,) = pod["spec"]["containers"]
        told = {variable["name"]: variable["value"] for variable in container["env"]}
        assert told == {
            "PLAIN": "1",
            "INDEX": str(ordinal),
            "NAME": f"shards-{ordinal}",
            "ADDRESS": f"shards-{ordinal}.service:$(PORT)",
            "PORT": "1",
        }  # no variable is known before its line
        assert "ports" not in container


def test_every_index_of_the_job_gets_a_pod_that_is_not_started_again():
    plan = manifests.plan(documents(STATEFUL, JOB))
    for index, played in enumerate(plan.workers):
        (pod,) = yaml.safe_load_all(played.text)
        assert pod["spec"]["restartPolicy"] == "Never"
        assert {"name": "JOB_COMPLETION_INDEX", "value": str(index)} in pod["spec"]["containers"][0]["env"]
    assert len(plan.workers) == 3


def test_an_overlay_without_workers_or_with_an_unknown_field_is_refused():
    with pytest.raises(TestFailedError, match="kind Job"):
        manifests.plan(documents(STATEFUL))
    with pytest.raises(TestFailedError, match=r"no spec\.nodeName"):
        manifests.plan(documents(STATEFUL.replace("metadata.name}", "spec.nodeName}"), JOB))


def test_pips_settings_and_the_folders_they_name_reach_the_build(tmp_path, monkeypatch):
    wheels, index = tmp_path / "wheels", tmp_path / "index"
    wheels.mkdir()
    (index / "simple").mkdir(parents=True)
    monkeypatch.setenv("PIP_FIND_LINKS", f"{wheels} {tmp_path / 'missing'}")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"https://packages.example/simple file://{index}/simple")
    options = hostpip.mounts(tmp_path)
    assert options[::2] == ["-v"] * (len(options) // 2)
    mounts = [option.split(":") for option in options[1::2]]
    assert all(mode == "ro" for _, _, mode in mounts)
    sources = {source: target for source, target, _ in mounts}
    assert sources[str(wheels)] == str(wheels)
    assert sources[str(index)] == str(index)  # an index's links lead beside it
    assert str(tmp_path / "missing") not in sources
    written = next(Path(source) for source, target in sources.items() if target == "/etc/pip.conf")
    settings = configparser.RawConfigParser()
    settings.read(written)
    assert settings["global"]["find-links"].split()[0] == str(wheels)
    assert settings["global"]["extra-index-url"].startswith("https://packages.example/simple ")


def test_waiting_ends_with_what_was_waited_for():
    with pytest.raises(TestFailedError, match="not within 0 s: the impossible"):
        wait_until(lambda: False, 0.0, "the impossible")


def test_a_machine_that_lacks_something_is_a_skip_and_says_what(monkeypatch, capsys):
    from tools.container_test import __main__, needs

    monkeypatch.setattr("sys.argv", ["container_test"])
    monkeypatch.setattr(needs.os, "geteuid", lambda: 0)
    monkeypatch.setattr(needs.shutil, "which", lambda name: None if name == "mmdebstrap" else f"/usr/bin/{name}")
    with pytest.raises(SkippedError, match="mmdebstrap"):
        needs.check()
    monkeypatch.setattr(__main__.signal, "signal", lambda number, handler: None)
    assert __main__.main() == SKIPPED
    assert "skipped: not installed: mmdebstrap" in capsys.readouterr().out
