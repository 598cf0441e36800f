"""NetworkPolicies, evaluated: every needed flow is allowed, all others are denied."""

import ipaddress
import itertools
from typing import Any, NamedTuple

import pytest

from support.world import body, pool, service
from vlm_operator import names
from vlm_operator.plan.policies import Network, network_policies
from vlm_operator.pods.parts import object_labels

OPERATOR = "triptych-system"


class End(NamedTuple):
    """A pod, or an address outside the cluster."""

    name: str
    labels: dict[str, str]
    namespace: str
    address: str


def pod(role: str, of: str = "demo", namespace: str = "ns") -> End:
    return End(role, object_labels(of, role), namespace, "10.1.0.1")


OUTSIDE = {
    "client": End("client", {"app": "web"}, "ns", "10.1.0.9"),
    "stranger": End("stranger", {}, "other", "10.1.0.8"),
    "operator": End("operator", {}, OPERATOR, "10.1.0.7"),
    "dns": End("dns", {"k8s-app": "kube-dns"}, "kube-system", "10.96.0.10"),
    "api": End("api", {}, "", "10.96.0.1"),
    "metadata": End("metadata", {}, "", "169.254.169.254"),
    "internet": End("internet", {}, "", "93.184.216.34"),
}
PORTS = [53, 80, 443, 6443, 8000, 9000, 9001, 9002, 22]


def allowed(policies: dict[str, Any], source: End, target: End, port: int) -> bool:
    """What a network plugin would say, for TCP."""
    return _side(policies, source, target, port, "egress") and _side(
        policies, target, source, port, "ingress"
    )


def _side(policies: dict[str, Any], end: End, peer: End, port: int, direction: str) -> bool:
    own = [spec for spec in policies.values() if _selects(spec["podSelector"], end.labels)]
    own = own if end.namespace == "ns" else []
    if not own:
        return True
    key = "to" if direction == "egress" else "from"
    return any(
        _peers(rule.get(key), peer) and _ports(rule.get("ports"), port)
        for spec in own
        for rule in spec[direction]
    )


def _peers(peers: list[dict[str, Any]] | None, end: End) -> bool:
    return peers is None or any(_peer(peer, end) for peer in peers)


def _peer(peer: dict[str, Any], end: End) -> bool:
    if "ipBlock" in peer:
        block, address = peer["ipBlock"], ipaddress.ip_address(end.address)
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and not any(
            address in ipaddress.ip_network(item) for item in block.get("except", [])
        )
    if "namespaceSelector" in peer:
        if not _selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": end.namespace}):
            return False
    elif end.namespace != "ns":
        return False
    return _selects(peer.get("podSelector", {}), end.labels)


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def _ports(ports: list[dict[str, Any]] | None, port: int) -> bool:
    return ports is None or any(
        item["port"] == port and item["protocol"] == "TCP" for item in ports
    )


def needed(roles: list[str], *, hub: bool) -> set[tuple[str, str, int]]:
    found = {("client", "gateway", 8000), ("stranger", "gateway", 8000)}
    found |= {("operator", "gateway", 8000), ("api", "gateway", 8000), ("dns", "gateway", 8000)}
    found |= {("metadata", "gateway", 8000), ("internet", "gateway", 8000)}
    found |= {("gateway", role, 9000) for role in roles}
    found |= {("operator", role, 9001) for role in [*roles, "gateway"]}
    found |= {(role, "dns", 53) for role in [*roles, "gateway"]}
    for port in (443, 6443):
        found |= {("gateway", name, port) for name in OUTSIDE}
    if hub:
        found |= {(role, "internet", 443) for role in roles}
    chain = {
        ("encoder", "prefill", "decode"): [("prefill", "encoder"), ("decode", "prefill")],
        ("prefill", "decode"): [("decode", "prefill")],
        ("encoder", "decode"): [("decode", "encoder")],
        ("decode",): [],
    }[tuple(roles)]
    return found | {(*flow, port) for flow in chain for port in (9000, 9002)}


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize(
    "roles",
    [["encoder", "prefill", "decode"], ["prefill", "decode"], ["encoder", "decode"], ["decode"]],
    ids="-".join,
)
def test_every_needed_flow_is_allowed_and_all_others_are_denied(roles: list[str], hub: bool):
    model = {"uri": "hf://org/name", "revision": "abc"} if hub else {"uri": "pvc://shapes"}
    manifest = body({"model": model}, **{role: pool() for role in roles})
    policies = {
        str(k): v for k, v in network_policies(service(manifest), Network(OPERATOR)).items()
    }
    ends = {role: pod(role) for role in [*roles, "gateway"]} | OUTSIDE
    ends |= {f"other-{role}": pod(role, of="other") for role in names.POOL_ROLES}
    found = {
        (source, target, port)
        for source, target in itertools.permutations(ends, 2)
        for port in PORTS
        if (source in [*roles, "gateway"] or target in [*roles, "gateway"])
        and allowed(policies, ends[source], ends[target], port)
    }
    # another service's pods are pods like any other
    expected = needed(roles, hub=hub)
    expected |= {(f"other-{role}", "gateway", 8000) for role in names.POOL_ROLES}
    expected |= {("gateway", f"other-{r}", p) for r in names.POOL_ROLES for p in (443, 6443)}
    assert found == expected


def test_ports_and_namespaces_of_another_cluster_replace_the_usual_ones():
    network = Network(
        OPERATOR,
        monitoring_namespace="monitoring",
        api_server_ports=(16443,),
        dns_namespace="openshift-dns",
        dns_ports=(5353,),
    )
    manifest = body(decode=pool())
    policies = {str(k): v for k, v in network_policies(service(manifest), network).items()}
    gateway, decode = pod("gateway"), pod("decode")
    api = OUTSIDE["api"]
    assert allowed(policies, gateway, api, 16443)
    assert not allowed(policies, gateway, api, 443)
    assert not allowed(policies, decode, api, 16443)
    names_of = End("dns", {}, "openshift-dns", "10.96.0.10")
    assert allowed(policies, decode, names_of, 5353)
    assert not allowed(policies, decode, OUTSIDE["dns"], 53)
    prometheus = End("prometheus", {}, "monitoring", "10.1.0.6")
    for target in (gateway, decode):
        assert allowed(policies, prometheus, target, 9001)
        assert allowed(policies, OUTSIDE["operator"], target, 9001)
        assert not allowed(policies, OUTSIDE["stranger"], target, 9001)
    assert not allowed(policies, prometheus, decode, 9000)


def test_a_hub_model_may_come_from_the_internet_of_both_families_and_from_named_mirrors():
    model = {"uri": "hf://org/name", "revision": "abc"}
    network = Network(OPERATOR, model_sources=("10.9.0.0/16", "fd00:9::/32"))
    manifest = body({"model": model}, decode=pool())
    plain = {str(k): v for k, v in network_policies(service(manifest), Network(OPERATOR)).items()}
    named = {str(k): v for k, v in network_policies(service(manifest), network).items()}
    decode = pod("decode")
    for address in ("2606:4700::1", "93.184.216.34"):
        hub = End("hub", {}, "", address)
        assert allowed(plain, decode, hub, 443)
        assert not allowed(plain, decode, hub, 80)
    for address in ("fd00:9::1", "fe80::1", "::ffff:10.0.0.1", "10.9.0.7", "169.254.169.254"):
        assert not allowed(plain, decode, End("private", {}, "", address), 443)
    for address in ("fd00:9::1", "10.9.0.7"):
        assert allowed(named, decode, End("mirror", {}, "", address), 3128)
    assert not allowed(named, decode, End("other", {}, "", "10.8.0.7"), 443)


def test_the_api_server_takes_every_block_of_addresses():
    """It reads ::ffff:0:0/96 as IPv4, which is no part of ::/0."""
    model = {"uri": "hf://org/name", "revision": "abc"}
    policies = network_policies(service(body({"model": model})), Network(OPERATOR))
    peers = [peer for spec in policies.values() for r in spec["egress"] for peer in r.get("to", ())]
    blocks = [peer["ipBlock"] for peer in peers if "ipBlock" in peer]
    inner = [(block["cidr"], item) for block in blocks for item in block.get("except", ())]
    assert inner
    for outer, item in inner:
        one, other = ipaddress.ip_network(outer), ipaddress.ip_network(item)
        assert one.version == other.version
        assert one.prefixlen < other.prefixlen
        assert one.supernet_of(other)
        if isinstance(other, ipaddress.IPv6Network):
            assert other.network_address.ipv4_mapped is None


@pytest.mark.parametrize("http", [False, True])
def test_gateways_alone_reach_the_hosts_of_images(http: bool):
    media = {"allowedDomains": ["images.example"], "allowedNetworks": ["10.9.0.0/16"]}
    spec = body({"gateway": {"media": {**media, "allowHttp": http}}}, decode=pool())
    network = Network(OPERATOR, api_server_ports=(6443,))
    policies, gateway = network_policies(service(spec), network), pod("gateway")
    for end in (OUTSIDE["internet"], End("images", {}, "", "10.9.0.7")):
        assert allowed(policies, gateway, end, 443)
        assert allowed(policies, gateway, end, 80) is http
        assert not allowed(policies, pod("decode"), end, 443)
    for address in ("10.8.0.7", "169.254.169.254", "fd00::1"):
        assert not allowed(policies, gateway, End("private", {}, "", address), 443)


CACHED = {"uri": "hf://org/name", "revision": "a" * 40, "cache": {"claim": {"size": "1Gi"}}}


def test_with_a_cache_only_the_pods_of_its_job_reach_the_hub():
    ends = {role: pod(role) for role in ("encoder", "decode", "gateway")}
    job = pod(names.MODEL_PART)
    spec = service(body({"model": CACHED}, encoder=pool(), decode=pool()))
    policies = network_policies(spec, Network(OPERATOR))
    internet, operator = OUTSIDE["internet"], OUTSIDE["operator"]
    assert not allowed(policies, ends["decode"], internet, 443)
    assert allowed(policies, job, internet, 443)
    assert allowed(policies, job, OUTSIDE["dns"], 53)
    for port in (80, 9000):
        assert not allowed(policies, job, internet, port)
    for end in ends.values():
        assert not any(allowed(policies, job, end, port) for port in (9000, 9001, 9002))
        assert not any(allowed(policies, end, job, port) for port in (9000, 9001, 9002))
    assert allowed(policies, operator, job, 9001)
    assert not allowed(policies, OUTSIDE["stranger"], job, 9001)


def test_pods_that_download_keep_their_way_to_the_hub_while_they_live():
    spec = service(body({"model": CACHED}, decode=pool()))
    policies = network_policies(spec, Network(OPERATOR), live_downloads=True)
    assert allowed(policies, pod("decode"), OUTSIDE["internet"], 443)


def test_a_cluster_may_go_without_policies():
    assert network_policies(service(body()), Network(OPERATOR, policies=False)) == {}


@pytest.mark.parametrize(
    ("url", "reached", "refused"),
    [
        (
            "http://otel.observability:4318",
            [("observability", "10.1.9.1", 4318)],
            [("x", "10.1.9.2", 4318)],
        ),
        (
            "http://otel.observability.svc.corp.local",
            [("observability", "10.1.9.1", 80)],
            [("svc", "10.1.9.2", 80)],
        ),
        ("https://otel.example.com/v1", [("", "93.184.216.34", 443)], [("", "93.184.216.34", 80)]),
        ("http://10.9.0.7:4318", [("", "10.9.0.7", 4318)], [("", "10.9.0.8", 4318)]),
        ("http://[fd00:9::1]:4318", [("", "fd00:9::1", 4318)], [("", "fd00:9::2", 4318)]),
    ],
)
def test_all_pods_reach_the_collector_of_their_spans(url, reached, refused):
    plain = {"model": {"uri": "pvc://shapes"}}
    with_spans = {**plain, "tracing": {"endpoint": url}}
    before, after = (
        {
            str(role): rule
            for role, rule in network_policies(
                service(body(spec, decode=pool())), Network(OPERATOR)
            ).items()
        }
        for spec in (plain, with_spans)
    )
    for role in ("decode", "gateway"):
        for namespace, address, port in reached:
            end = End("collector", {}, namespace, address)
            assert allowed(after, pod(role), end, port)
            if role == "decode" or port != 443:  # the gateway reaches the API server's port
                assert not allowed(before, pod(role), end, port)
        for namespace, address, port in refused:
            assert not allowed(after, pod(role), End("other", {}, namespace, address), port)
