"""A suffix is all that a further run in a namespace needs: names, labels, selectors and addresses follow it."""

import re
import shutil

import pytest

from tests.deploy import manifests
from tests.deploy.manifests import KUBERNETES, OVERLAYS, container, environment, one, pods
from tests.tiers import long_but

INSTANCE = "app.kubernetes.io/instance"
PLAIN = [name for name in OVERLAYS if not manifests.suffix(name)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of ``deploy/`` with a run called ``-b`` of every overlay."""
    folder = tmp_path_factory.mktemp("runs") / "deploy"
    shutil.copytree(KUBERNETES.parent, folder, symlinks=True)
    for name in PLAIN:
        run = folder / "kubernetes" / "overlays" / f"{name}-b"
        run.mkdir()
        head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        (run / "kustomization.yaml").write_text(f"{head}nameSuffix: -b\nresources: [../{name}]\n")
    return folder / "kubernetes"


@pytest.fixture
def runs(copy, monkeypatch):
    """Returns the names of two overlays that are the same but for the second one's suffix."""
    monkeypatch.setattr(manifests, "KUBERNETES", copy)
    return lambda overlay: (overlay, f"{overlay}-b")


def labels_of(overlay):
    return [template["metadata"]["labels"] for _, template in pods(overlay)]


def selectors_of(overlay):
    """Every selector of pods in an overlay, with the object that it is in."""

    def walk(value, name):
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("podSelector", "labelSelector", "selector") and "matchLabels" in (inner or {}):
                    yield name, inner["matchLabels"]
                else:
                    yield from walk(inner, name)
        elif isinstance(value, list):
            for inner in value:
                yield from walk(inner, name)

    for each in manifests.build(overlay):
        name = (each["kind"], each["metadata"]["name"])
        if each["kind"] == "Service":
            yield name, each["spec"]["selector"]
        elif each["kind"] != "ServiceMonitor":  # of all runs of the namespace
            yield from walk(each.get("spec", {}), name)


@pytest.mark.parametrize("overlay", long_but(["cpu-dev", "production"], PLAIN))
def test_no_name_and_no_selector_is_anothers(overlay, runs):
    first, second = runs(overlay)
    names = [{(each["kind"], each["metadata"]["name"]) for each in manifests.build(run)} for run in (first, second)]
    assert len(names[0]) == len(names[1])
    assert not names[0] & names[1]
    for run, other in ((first, second), (second, first)):
        found = list(selectors_of(run))
        assert {kind for (kind, _), _ in found} >= {"Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"}
        for name, selector in found:
            assert selector[INSTANCE] == one(run, "Service", "psservice")["metadata"]["name"], name
            assert not any(selector.items() <= labels.items() for labels in labels_of(other)), name


@pytest.mark.parametrize("overlay", long_but(["cpu-dev", "production"], PLAIN))
def test_every_pod_calls_its_own_runs_servers(overlay, runs):
    _, second = runs(overlay)
    stateful = one(second, "StatefulSet", "psservice")
    assert (stateful["metadata"]["name"], stateful["spec"]["serviceName"]) == ("psservice-b", "psservice-b")
    for _, template in pods(second):
        assert environment(second, template)["PSCLIENT_SERVER"] == "dns:///psservice-b:50051"
    coordinator = environment(second, manifests.server(second))["PSSERVICE_COORDINATOR"]
    assert coordinator.split("/")[0] == "psservice-b-0.psservice-b:50051"


@pytest.mark.parametrize("overlay", long_but(["cpu-dev", "production"], PLAIN))
def test_every_pod_has_its_own_runs_settings_and_secrets(overlay, runs):
    first, second = runs(overlay)
    kinds = {"configMap": "ConfigMap", "secret": "Certificate"}
    names = {(each["kind"], each["metadata"]["name"]) for each in manifests.build(second)}
    secrets = {each["spec"]["secretName"] for each in manifests.build(second) if each["kind"] == "Certificate"}
    assert not secrets & {e["spec"]["secretName"] for e in manifests.build(first) if e["kind"] == "Certificate"}
    for _, template in pods(second):
        spec = template["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in names
        for source in container(template)["envFrom"]:
            if "configMapRef" in source:
                assert ("ConfigMap", source["configMapRef"]["name"]) in names
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert (kinds["configMap"], volume["configMap"]["name"]) in names
            if "secret" in volume and secrets:  # else an operator's, for all runs
                assert volume["secret"]["secretName"] in secrets
    for each in manifests.build(second):
        if each["kind"] == "Certificate":
            assert ("Issuer", each["spec"]["issuerRef"]["name"]) in names
        if each["kind"] == "Issuer" and "ca" in each["spec"]:
            assert each["spec"]["ca"]["secretName"] in secrets
        if each["kind"] == "TrainJob":
            assert (each["spec"]["runtimeRef"]["kind"], each["spec"]["runtimeRef"]["name"]) in names


def test_the_overlay_that_shows_it_has_one_setting():
    lines = (KUBERNETES / "overlays" / "named-run" / "kustomization.yaml").read_text().splitlines()
    assert len([line for line in lines if re.search("cifar", line)]) == 1
    assert one("named-run", "Service", "psservice")["metadata"]["name"] == "psservice-cifar"


def test_the_name_of_the_servers_certificate_is_no_name_of_a_run(runs):
    _, second = runs("mtls")
    assert environment(second, manifests.server(second))["PSSERVICE_TLS_SERVER_NAME"] == "psservice"
    assert "psservice" in one(second, "Certificate", "psservice-tls")["spec"]["dnsNames"]
