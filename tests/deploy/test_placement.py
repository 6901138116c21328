"""What a cluster decides: where pods go, what they may use, what the cluster calls things, and whom they may call."""

import re

import pytest

from tests.deploy import manifests
from tests.deploy.manifests import KUBERNETES, OVERLAYS, container, environment, one, pods

ZONE, NODE = "topology.kubernetes.io/zone", "kubernetes.io/hostname"


def constraints(overlay):
    spec = manifests.server(overlay)["spec"]
    return {each["topologyKey"]: each["whenUnsatisfiable"] for each in spec["topologySpreadConstraints"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_shards_prefer_zones_and_nodes_of_their_own(overlay):
    wanted = {ZONE: "DoNotSchedule" if overlay == "production" else "ScheduleAnyway", NODE: "ScheduleAnyway"}
    assert constraints(overlay) == wanted


def test_shards_may_be_kept_apart_as_a_condition():
    spec = manifests.server("production")["spec"]
    (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == NODE
    labels = manifests.server("production")["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_say_what_they_take_of_a_nodes_disk(overlay):
    units = {"Gi": 1 << 30, "Mi": 1 << 20}

    def size(text):
        return int(text[:-2]) * units[text[-2:]]

    for _, template in pods(overlay):
        resources = container(template)["resources"]
        asked, allowed = (size(resources[name]["ephemeral-storage"]) for name in ("requests", "limits"))
        volumes = [v["emptyDir"] for v in template["spec"]["volumes"] if "emptyDir" in v]
        written = sum(size(each["sizeLimit"]) for each in volumes if each.get("medium") != "Memory")
        assert written < allowed, "the log needs room too"
        assert asked <= allowed


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_shard_that_is_not_ready_keeps_no_node_from_its_drain(overlay):
    for each in manifests.build(overlay):
        if each["kind"] == "PodDisruptionBudget":
            assert each["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_what_a_cluster_calls_things_stands_in_one_file():
    text = (KUBERNETES / "components" / "cluster" / "cluster.env").read_text()
    names = dict(re.findall(r"^(\w+)=(\S+)$", text, re.MULTILINE))
    stateful = one("production", "StatefulSet", "psservice")["spec"]
    (claim,) = stateful["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == names["STORAGE_CLASS"]
    assert stateful["template"]["spec"]["priorityClassName"] == names["PRIORITY_CLASS"]
    account = one("production", "ServiceAccount", "sparseps")
    assert account["imagePullSecrets"] == [{"name": names["PULL_SECRET"]}]
    for _, template in pods("production"):
        assert template["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert not [each for each in manifests.build("production") if each["metadata"]["name"] == "cluster"]


def test_traces_pass_the_policies():
    variables = environment("production", manifests.server("production"))
    assert variables["PSSERVICE_TRACING"] == "true"
    (worker,) = manifests.workers("production")
    assert environment("production", worker)["PSCLIENT_TRACING"] == "true"
    host, port = re.fullmatch(r"http://([^:]+):(\d+)", variables["OTEL_EXPORTER_OTLP_ENDPOINT"]).groups()
    policy = one("production", "NetworkPolicy", "psservice-tracing")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= manifests.server("production")["metadata"]["labels"].items()
    (rule,) = policy["egress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": int(port)}]
    namespace = rule["to"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert host.split(".")[1] == namespace
