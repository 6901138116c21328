"""Every overlay builds, is valid, and says in one place what it says in another."""

import functools
import json
import re
import sys

import pytest
import yaml

from psclient.settings import ClientSettings
from pscore.version import __version__
from psservice.rpc.caller import Role
from psservice.rpc.calls import RULES
from psservice.rpc.certificate_names import CertificateNames
from psservice.rpc.certificate_roles import read_certificate_roles
from psservice.settings import ServerSettings, split_address
from tests.deploy import manifests
from tests.deploy.manifests import KUBERNETES, OVERLAYS, ROOT, SECURE, build, container, environment, one, pods
from tests.tiers import long_but
from tools import generate_configmap, generate_prometheus_rule

OLDEST, NEWEST = "1.29.0", "1.37.0"
"""Of Kubernetes: what docs/operate/deploy.md asks for, and the last one that the schemas are of."""

KNOWN_ELSEWHERE = {
    "Certificate": {"secretName", "duration", "privateKey", "usages", "dnsNames", "issuerRef", "isCA", "commonName"},
    "Issuer": {"selfSigned", "ca"},
    "ServiceMonitor": {"selector", "endpoints"},
    "PrometheusRule": {"groups"},
    "JobSet": {"failurePolicy", "network", "replicatedJobs"},
    "TrainingRuntime": {"mlPolicy", "template"},
    "TrainJob": {"runtimeRef", "trainer"},
}
"""Kinds of other projects, of which Kubernetes' schemas know nothing, and the fields of their specs that are used."""

VERSIONS = {
    "Certificate": "cert-manager.io/v1",
    "Issuer": "cert-manager.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
LEAST_SECONDS_FOR_A_SNAPSHOT = 120
NO_SETTINGS = ("WORLD_SIZE", "BACKUP_URL", "SPARSEPS_SERVICE", "SPARSEPS_LAST_SHARD")
"""Variables of scripts, and those that others are put together from."""

BY_HAND = ("mtls-secret", "sites", "kind-second-run")
"""Overlays whose Secrets an operator makes."""


@functools.cache
def validate_text(document):
    from kubernetes_validate import validate as check

    for version in (OLDEST, NEWEST):
        check(json.loads(document), version, strict=True)


def validate(document):
    """Hold an object against the schemas of Kubernetes; one that is in several overlays once, as it takes its time."""
    validate_text(json.dumps(document, sort_keys=True))


def settings_of(overlay, monkeypatch, tmp_path, shard=0):
    """Load the settings of a shard as its process does: the ConfigMap as file, then the pod's environment."""
    config = one(overlay, "ConfigMap", "psservice")["data"]["psservice.yaml"]
    (tmp_path / "psservice.yaml").write_text(config)
    variables = environment(overlay, manifests.server(overlay), shard)
    mount = next(m for m in container(manifests.server(overlay))["volumeMounts"] if m["name"] == "config")
    assert variables.pop("PSSERVICE_CONFIG") == f"{mount['mountPath']}/psservice.yaml"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return ServerSettings(config=tmp_path / "psservice.yaml")


def ports_of(policy):
    return {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", [])}


@pytest.mark.parametrize("generator", [generate_configmap, generate_prometheus_rule])
def test_generated_files_are_up_to_date(generator, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [generator.__name__, "--check"])
    assert generator.main() == 0, capsys.readouterr().err
    old = tmp_path / "old.yaml"
    old.write_text(generator.TARGET.read_text() + "# changed by hand\n")
    monkeypatch.setattr(generator, "TARGET", old)
    assert generator.main() == 1
    assert "old.yaml is out of date" in capsys.readouterr().err


@pytest.mark.parametrize("overlay", long_but(["cpu-dev", "production"], OVERLAYS))
def test_every_object_is_valid(overlay):
    for each in build(overlay):
        kind = each["kind"]
        if kind in VERSIONS:
            assert each["apiVersion"] == VERSIONS[kind]
            assert set(each["spec"]) <= KNOWN_ELSEWHERE[kind], each
        else:
            validate(each)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_jobs_inside_other_kinds_are_valid_jobs(overlay):
    for each in build(overlay):
        if each["kind"] not in ("JobSet", "TrainingRuntime"):
            continue
        spec = each["spec"] if each["kind"] == "JobSet" else each["spec"]["template"]["spec"]
        for job in spec["replicatedJobs"]:
            assert set(job) <= {"name", "replicas", "template"}
            metadata = {"name": "job", **job["template"].get("metadata", {})}
            validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["template"]["spec"]})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_is_in_one_namespace(overlay):
    for each in build(overlay):
        assert each["metadata"].get("namespace") == "sparseps", each["metadata"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_deleting_an_overlay_deletes_no_model(overlay):
    """A namespace takes everything in it along, and with a claim goes its volume."""
    kinds = {each["kind"] for each in build(overlay)}
    assert not kinds & {"Namespace", "PersistentVolumeClaim", "PersistentVolume", "StorageClass"}
    retention = one(overlay, "StatefulSet", "psservice")["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert retention == {"whenDeleted": "Retain", "whenScaled": "Retain"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_settings_load_and_no_key_is_unknown(overlay, monkeypatch, tmp_path):
    config = yaml.safe_load(one(overlay, "ConfigMap", "psservice")["data"]["psservice.yaml"])
    assert set(config) < set(ServerSettings.model_fields)
    shards = one(overlay, "StatefulSet", "psservice")["spec"]["replicas"]
    for shard in range(shards):
        settings = settings_of(overlay, monkeypatch, tmp_path, shard)
        assert (settings.shard_index, settings.num_shards) == (shard, shards)
        assert settings.compute_threads >= 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_variable_is_a_setting(overlay):
    fields = {"PSSERVICE_": ServerSettings.model_fields, "PSCLIENT_": ClientSettings.model_fields}
    for _, template in pods(overlay):
        for name in environment(overlay, template):
            if name not in NO_SETTINGS and not name.startswith("OTEL_"):
                prefix = name[: name.index("_") + 1]
                assert name.removeprefix(prefix).lower() in fields[prefix], name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_those_of_the_settings(overlay, monkeypatch, tmp_path):
    settings = settings_of(overlay, monkeypatch, tmp_path)
    addresses = {"grpc": settings.listen, "health": settings.health_listen, "metrics": settings.metrics_listen}
    expected = {name: split_address(address)[1] for name, address in addresses.items()}
    assert {split_address(address)[0] for address in addresses.values()} == {"0.0.0.0"}
    spec = container(manifests.server(overlay))
    assert {port["name"]: port["containerPort"] for port in spec["ports"]} == expected
    service = one(overlay, "Service", "psservice")["spec"]
    assert {port["name"]: port["port"] for port in service["ports"]} == expected
    assert all(port["targetPort"] == port["name"] for port in service["ports"])
    assert {spec[probe]["grpc"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        expected["health"]
    }
    policy = one(overlay, "NetworkPolicy", "psservice")
    assert ports_of(policy) == set(expected.values())
    (address,) = re.findall(r":(\d+)$", environment(overlay, manifests.server(overlay))["PSCLIENT_SERVER"])
    assert int(address) == expected["grpc"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_a_server_that_does_not_answer_is_restarted(overlay):
    from psservice.process.server import LIVENESS

    spec = container(manifests.server(overlay))
    for probe in ("startupProbe", "livenessProbe"):
        assert spec[probe]["grpc"]["service"] == LIVENESS
    assert "service" not in spec["readinessProbe"]["grpc"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_the_shards_and_nothing_else(overlay):
    labels = manifests.server(overlay)["metadata"]["labels"]
    selectors = [
        one(overlay, "StatefulSet", "psservice")["spec"]["selector"]["matchLabels"],
        one(overlay, "Service", "psservice")["spec"]["selector"],
        one(overlay, "PodDisruptionBudget", "psservice")["spec"]["selector"]["matchLabels"],
        one(overlay, "NetworkPolicy", "psservice")["spec"]["podSelector"]["matchLabels"],
        *(
            each["labelSelector"]["matchLabels"]
            for each in manifests.server(overlay)["spec"]["topologySpreadConstraints"]
        ),
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        for template in manifests.workers(overlay):
            assert not selector.items() <= template["metadata"]["labels"].items()
    for template in manifests.workers(overlay):
        policy = one(overlay, "NetworkPolicy", "workers")["spec"]["podSelector"]["matchLabels"]
        assert policy.items() <= template["metadata"]["labels"].items()
        callers = one(overlay, "NetworkPolicy", "psservice")["spec"]["ingress"][0]["from"]
        assert any(
            caller["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items() for caller in callers
        )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_referred_to_exists(overlay):
    named = {(each["kind"], each["metadata"]["name"]) for each in build(overlay)}
    secrets = {each["spec"]["secretName"] for each in build(overlay) if each["kind"] == "Certificate"}
    pages = "".join((ROOT / "docs" / "operate" / f"{page}.md").read_text() for page in ("deploy", "backups"))
    by_hand = re.findall(r"create secret generic ([a-z-]+)", pages)
    claims = {"psservice-init"} if overlay == "reshard" else set()
    claimed: dict[str, set[str]] = {}
    for each in build(overlay):
        if each["kind"] == "StatefulSet":
            service = each["spec"]["serviceName"]
            assert ("Service", service) in named
            assert one(overlay, "Service", service)["spec"]["clusterIP"] == "None"
            component = each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
            claimed[component] = {claim["metadata"]["name"] for claim in each["spec"]["volumeClaimTemplates"]}
    for _, template in pods(overlay):
        spec = template["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in named
        volumes = {volume["name"] for volume in spec["volumes"]}
        volumes |= claimed.get(template["metadata"]["labels"]["app.kubernetes.io/component"], set())
        assert {mount["name"] for mount in container(template)["volumeMounts"]} == volumes
        for source in container(template)["envFrom"]:
            if "secretRef" in source:
                assert source["secretRef"]["name"] in by_hand
            else:
                assert ("ConfigMap", source["configMapRef"]["name"]) in named
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in named
            if "secret" in volume:
                assert volume["secret"]["secretName"] in (by_hand if overlay in BY_HAND else secrets)
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
    for each in build(overlay):
        if each["kind"] == "Certificate":
            assert ("Issuer", each["spec"]["issuerRef"]["name"]) in named
        if each["kind"] == "TrainJob":
            assert (each["spec"]["runtimeRef"]["kind"], each["spec"]["runtimeRef"]["name"]) in named


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_files_that_are_named_lie_in_a_mounted_volume(overlay):
    for _, template in pods(overlay):
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container(template)["volumeMounts"]}
        for name, value in environment(overlay, template).items():
            if value.startswith("/"):
                mount = next((path for path in mounts if value == path or value.startswith(path + "/")), None)
                assert mount is not None, f"{name}={value}"
                assert mounts[mount] == (mount != "/data")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted(overlay):
    for _, template in pods(overlay):
        spec, inside = template["spec"], container(template)["securityContext"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["fsGroup"]) == (10001, 10001)
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert inside == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
        assert not any("hostPath" in volume for volume in spec["volumes"])
    assert one(overlay, "ServiceAccount", "sparseps")["automountServiceAccountToken"] is False


def test_the_namespace_enforces_the_restricted_standard():
    namespace = yaml.safe_load((KUBERNETES / "namespace.yaml").read_text())
    assert (namespace["kind"], namespace["metadata"]["name"]) == ("Namespace", "sparseps")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_have_this_version(overlay):
    for _, template in pods(overlay):
        image = container(template)["image"]
        tag = "(-gpu)?" if overlay == "gpu" else ""
        assert re.fullmatch(rf"localhost/sparseps(-quickstart)?:{re.escape(__version__)}{tag}", image)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_has_time_to_end(overlay, monkeypatch, tmp_path):
    settings = settings_of(overlay, monkeypatch, tmp_path)
    grace_seconds = manifests.server(overlay)["spec"]["terminationGracePeriodSeconds"]
    assert grace_seconds >= settings.drain_seconds + LEAST_SECONDS_FOR_A_SNAPSHOT
    for template in manifests.workers(overlay):
        assert template["spec"]["terminationGracePeriodSeconds"] > 2 * ClientSettings().deadline_seconds


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_shards_start_together_and_leave_one_by_one(overlay):
    stateful = one(overlay, "StatefulSet", "psservice")["spec"]
    assert stateful["podManagementPolicy"] == "Parallel"
    assert stateful["updateStrategy"]["type"] == "RollingUpdate"
    assert stateful["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    assert one(overlay, "Service", "psservice")["spec"]["publishNotReadyAddresses"] is True
    assert one(overlay, "PodDisruptionBudget", "psservice")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_numbers_stand_once(overlay):
    data = manifests.sizes(overlay)
    assert one(overlay, "StatefulSet", "psservice")["spec"]["replicas"] == int(data["shards"])
    for template in manifests.workers(overlay):
        assert environment(overlay, template)["WORLD_SIZE"] == data["workers"]
    for each in build(overlay):
        if each["kind"] == "Job":
            assert (each["spec"]["completions"], each["spec"]["parallelism"]) == (int(data["workers"]),) * 2
        if each["kind"] == "JobSet":
            (group,) = each["spec"]["replicatedJobs"]
            assert group["replicas"] == 1  # a second Job would count its workers from 0 again
            job = group["template"]["spec"]
            assert (job["completions"], job["parallelism"]) == (int(data["workers"]),) * 2
        if each["kind"] == "TrainJob":
            assert each["spec"]["trainer"]["numNodes"] == int(data["workers"])
    assert not [each for each in build(overlay) if each["metadata"]["name"] == "sizes"]
    assert bool(manifests.workers(overlay)) == ("workers" in data)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_workers_have_numbers(overlay):
    for each in build(overlay):
        jobs = {
            "Job": [each.get("spec")],
            "JobSet": [job["template"]["spec"] for job in each.get("spec", {}).get("replicatedJobs", [])],
        }
        for job in jobs.get(each["kind"], []):
            assert job["completionMode"] == "Indexed"
            assert job["podReplacementPolicy"] == "Failed"


@pytest.mark.parametrize("overlay", SECURE)
def test_only_cpu_dev_lets_everybody_in(overlay, monkeypatch, tmp_path):
    settings = settings_of(overlay, monkeypatch, tmp_path)
    assert not settings.insecure
    assert settings.tls_client_ca is not None
    for template in [manifests.server(overlay), *manifests.workers(overlay)]:
        variables = environment(overlay, template)
        assert {"PSCLIENT_TLS_CA", "PSCLIENT_TLS_CERT", "PSCLIENT_TLS_KEY"} <= set(variables)


def roles_of(overlay, tmp_path):
    """What the shards' file says of certificates, from where they read it."""
    template = manifests.server(overlay)
    path = environment(overlay, template)["PSSERVICE_CERTIFICATE_ROLES"]
    mount = next(m for m in container(template)["volumeMounts"] if path.startswith(f"{m['mountPath']}/"))
    assert "subPath" not in mount  # the kubelet would never bring a change
    volume = next(v for v in template["spec"]["volumes"] if v["name"] == mount["name"])
    data = one(overlay, "ConfigMap", volume["configMap"]["name"])["data"]
    (tmp_path / "roles").write_text(data[path.rpartition("/")[2]])
    return read_certificate_roles(tmp_path / "roles")


@pytest.mark.parametrize("overlay", SECURE)
def test_a_workers_certificate_is_a_workers_and_no_administrators(overlay, tmp_path):
    roles = roles_of(overlay, tmp_path)
    names = {each["spec"]["secretName"]: each["spec"]["dnsNames"] for each in certificates_of("mtls")}
    suffix = manifests.suffix(overlay)
    for template in manifests.workers(overlay):
        secrets = [volume["secret"]["secretName"] for volume in template["spec"]["volumes"] if "secret" in volume]
        assert secrets == ["psclient-tls" if overlay in BY_HAND else f"psclient-tls{suffix}"]
    for secret, role in (
        ("psservice-tls", Role.ADMIN),
        ("psclient-tls", Role.WORKER),
        ("psreader-tls", Role.READER),
        ("psadmin-tls", Role.ADMIN),
    ):
        assert roles.caller(CertificateNames(tuple(names[secret]))).role is role
    if overlay not in BY_HAND:
        assert {each["spec"]["secretName"] for each in certificates_of(overlay)} == {
            f"{name}{suffix}" for name in names
        }


def test_a_backup_calls_as_an_administrator_as_an_export_has_to(tmp_path):
    roles = roles_of("backups", tmp_path)
    names = {each["spec"]["secretName"]: each["spec"]["dnsNames"] for each in certificates_of("backups")}
    (template,) = (template for kind, template in manifests.pods("backups") if kind == "CronJob")
    (secret,) = (volume["secret"]["secretName"] for volume in template["spec"]["volumes"] if "secret" in volume)
    role = roles.caller(CertificateNames(tuple(names[secret]))).role
    called = ("GetStatus", "ListCheckpoints", "PinCheckpoint", "ReadCheckpoint", "TakeSnapshot")
    assert all(role >= RULES[name].role for name in called)


def certificates_of(overlay):
    """The certificates of shards and callers that cert-manager makes."""
    return [each for each in build(overlay) if each["kind"] == "Certificate" and "isCA" not in each["spec"]]


def test_a_gpu_overlay_asks_for_gpus(monkeypatch, tmp_path):
    assert settings_of("gpu", monkeypatch, tmp_path).device == "cuda"
    assert container(manifests.server("gpu"))["image"].endswith("-gpu")
    for _, template in pods("gpu"):
        assert container(template)["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert template["spec"]["runtimeClassName"] == "nvidia"
        assert template["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    (worker,) = manifests.workers("gpu")
    (shm,) = (volume for volume in worker["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(worker)["volumeMounts"]


def test_prometheus_reads_the_shards_and_has_the_rules():
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
    assert one("monitoring", "PrometheusRule", "psservice")["spec"] == rules
    spec = one("monitoring", "ServiceMonitor", "psservice")["spec"]
    service = one("monitoring", "Service", "psservice")
    assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {end["port"] for end in spec["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    jobs = set(re.findall(r'job="([^"]+)"', json.dumps(rules).replace('\\"', '"')))
    assert jobs == {service["metadata"]["name"]}  # the operator calls a job as its Service
    board = one("monitoring", "ConfigMap", "psservice-dashboard")
    assert json.loads(board["data"]["dashboard.json"])["panels"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_base_alone_refuses_to_start():
    """Who may call is decided by an overlay; forgetting it must not open the shards to everybody."""
    config = KUBERNETES / "base" / "psservice.yaml"
    with pytest.raises(ValueError, match="would let anybody in"):
        ServerSettings(config=config)
