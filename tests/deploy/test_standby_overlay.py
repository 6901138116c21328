"""A standby for each shard: it follows its own shard, is found by workers once it serves, and is never beside it."""

import pytest

from pscore.net.addresses import expand, split
from pscore.net.alternatives import alternatives
from psservice.rpc.caller import Role
from psservice.rpc.certificate_names import CertificateNames
from psservice.rpc.health_and_reflection import LIVENESS
from psservice.settings import ServerSettings
from tests.deploy import manifests
from tests.deploy.manifests import container, environment, one
from tests.deploy.test_manifests import certificates_of, roles_of

STANDBY = "standby-psservice"


def template_of(name):
    return one("standby", "StatefulSet", name)["spec"]["template"]


def settings_of(name, shard, monkeypatch):
    variables = environment("standby", template_of(name), shard)
    del variables["PSSERVICE_CONFIG"]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    return ServerSettings(data_dir="/data", durability="journal")


def hosts_of(name):
    """The names that the pods of a StatefulSet have in DNS."""
    stateful = one("standby", "StatefulSet", name)
    names = [f"{stateful['metadata']['name']}-{index}" for index in range(stateful["spec"]["replicas"])]
    return [f"{each}.{stateful['spec']['serviceName']}" for each in names]


@pytest.mark.parametrize("shard", [0, 1])
def test_each_standby_follows_the_shards_and_knows_its_own(shard, monkeypatch):
    settings = settings_of(STANDBY, shard, monkeypatch)
    assert container(template_of(STANDBY))["args"] == ["standby"]
    assert [split(each)[0] for each in expand(settings.standby_of)] == hosts_of("psservice")
    assert (settings.shard_index, settings.num_shards) == (shard, len(hosts_of(STANDBY)))
    assert len(hosts_of(STANDBY)) == len(hosts_of("psservice"))
    assert settings.tls_server_name == "psservice"


@pytest.mark.parametrize("name", ["psservice", STANDBY])
def test_every_shard_finds_the_shard_0_that_serves(name, monkeypatch):
    coordinator = settings_of(name, 1, monkeypatch).coordinator
    found = [split(each)[0] for each in alternatives(coordinator)]
    assert found == [hosts_of("psservice")[0], hosts_of(STANDBY)[0]]


def test_shards_wait_for_their_standbys_and_a_promoted_one_waits_for_none(monkeypatch):
    assert settings_of("psservice", 0, monkeypatch).replicate == "ack"
    monkeypatch.delenv("PSSERVICE_REPLICATE")
    assert settings_of(STANDBY, 0, monkeypatch).replicate == "behind"


def test_a_standby_may_replicate(tmp_path, monkeypatch):
    settings = settings_of(STANDBY, 0, monkeypatch)
    mounts = {mount["name"]: mount["mountPath"] for mount in container(template_of(STANDBY))["volumeMounts"]}
    secrets = {v["name"]: v["secret"]["secretName"] for v in template_of(STANDBY)["spec"]["volumes"] if "secret" in v}
    assert {path.parent.as_posix() for path in (settings.source_ca, settings.source_cert, settings.source_key)} == {
        mounts["tls"]
    }
    names = {each["spec"]["secretName"]: each["spec"]["dnsNames"] for each in certificates_of("standby")}
    caller = roles_of("standby", tmp_path).caller(CertificateNames(tuple(names[secrets["tls"]])))
    assert caller.role is Role.ADMIN


def test_one_service_leads_workers_to_both_and_one_policy_lets_both_call_each_other():
    policy = one("standby", "NetworkPolicy", "psservice")["spec"]
    peers = [peer["podSelector"]["matchLabels"] for peer in policy["ingress"][0]["from"]]
    called = [peer["podSelector"]["matchLabels"] for peer in policy["egress"][0]["to"]]
    for name in ("psservice", STANDBY):
        labels = template_of(name)["metadata"]["labels"].items()
        assert one("standby", "Service", "psservice")["spec"]["selector"].items() <= labels
        assert policy["podSelector"]["matchLabels"].items() <= labels
        assert any(peer.items() <= labels for peer in peers)
        assert any(peer.items() <= labels for peer in called)


def test_budgets_and_sets_have_pods_of_their_own():
    for name, other in (("psservice", STANDBY), (STANDBY, "psservice")):
        mine, others = (template_of(each)["metadata"]["labels"].items() for each in (name, other))
        for kind in ("StatefulSet", "PodDisruptionBudget"):
            selector = one("standby", kind, name)["spec"]["selector"]["matchLabels"].items()
            assert selector <= mine
            assert not selector <= others
        for constraint in template_of(name)["spec"]["topologySpreadConstraints"]:
            assert not constraint["labelSelector"]["matchLabels"].items() <= others


def test_a_standby_is_in_no_zone_and_on_no_node_of_its_shard():
    terms = template_of(STANDBY)["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert {term["topologyKey"] for term in terms} == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
    for term in terms:
        assert term["matchLabelKeys"] == ["apps.kubernetes.io/pod-index"]
        assert term["labelSelector"]["matchLabels"].items() <= template_of("psservice")["metadata"]["labels"].items()


def test_a_rolling_update_does_not_wait_for_a_standby_to_serve():
    assert container(template_of(STANDBY))["readinessProbe"]["grpc"]["service"] == LIVENESS
    assert "service" not in container(template_of("psservice"))["readinessProbe"]["grpc"]


def test_the_number_of_the_last_shard_fits():
    sizes = manifests.sizes("standby")
    assert int(sizes["last_shard"]) == int(sizes["shards"]) - 1
