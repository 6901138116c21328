"""Workers at other sites: an address for each shard, open to them alone, and TLS up to the shard itself."""

from pscore.net.addresses import expand
from tests.deploy import manifests
from tests.deploy.manifests import ROOT, build, container, environment, one

SITES = "sites"


def services():
    found = {each["metadata"]["name"]: each["spec"] for each in build(SITES) if each["kind"] == "Service"}
    del found["psservice"]
    return found


def test_each_shard_has_an_address_that_leads_to_it_alone():
    shards = one(SITES, "StatefulSet", "psservice")["spec"]["replicas"]
    assert sorted(services()) == [f"psservice-site-{index}" for index in range(shards)]
    labels = manifests.server(SITES)["metadata"]["labels"]
    for index in range(shards):
        pod = {**labels, "apps.kubernetes.io/pod-index": str(index)}
        leading = [name for name, spec in services().items() if spec["selector"].items() <= pod.items()]
        assert leading == [f"psservice-site-{index}"]


def test_a_balancer_passes_bytes_on():
    ports = {port["name"]: port["containerPort"] for port in container(manifests.server(SITES))["ports"]}
    for spec in services().values():
        assert (spec["type"], spec["externalTrafficPolicy"]) == ("LoadBalancer", "Local")
        assert spec["publishNotReadyAddresses"] is True
        assert [(port["port"], port["targetPort"]) for port in spec["ports"]] == [(ports["grpc"], "grpc")]
    assert {"PSSERVICE_TLS_CERT", "PSSERVICE_TLS_CLIENT_CA"} <= environment(SITES, manifests.server(SITES)).keys()


def test_the_sites_addresses_stand_once_and_nobody_else_comes_in():
    sites = manifests.sizes(SITES)["sites"]
    assert all(spec["loadBalancerSourceRanges"] == [sites] for spec in services().values())
    policy = one(SITES, "NetworkPolicy", "psservice-sites")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= manifests.server(SITES)["metadata"]["labels"].items()
    assert policy["ingress"] == [
        {"from": [{"ipBlock": {"cidr": sites}}], "ports": [{"protocol": "TCP", "port": 50051}]}
    ]


def test_the_page_names_a_shard_for_each_address():
    page = (ROOT / "docs" / "operate" / "deploy.md").read_text()
    (line,) = [each for each in page.splitlines() if "PSCLIENT_SERVER=ps-" in each]
    address = line.partition("PSCLIENT_SERVER=")[2].split()[0]
    assert len(expand(address)) == len(services())
