"""Plans NetworkPolicies. They deny all ingress and egress except the following connections.

client ─8000─▶ gateway ─9000─▶ encoder, prefill, decode        operator ─9001─▶ all
               gateway ─443──▶ API server                       prefill ─9000─▶ encoder
               all ─53─▶ DNS                                     decode ─9000─▶ prefill, encoder
               all ───▶ the collector of spec.tracing
               gateway ─443, 80▶ the hosts of gateway.media
Job of model.cache, else all pods of an hf:// model ─443─▶ the hub
"""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import Any
from urllib.parse import urlsplit

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.api.gateway import Media
from vlm_operator.cluster import DEPLOYMENT
from vlm_operator.names import Role
from vlm_operator.pods.parts import selector
from vlm_operator.state import Observed

Rule = dict[str, Any]

NODE_LOCAL_DNS = "169.254.20.10/32"
# All addresses except private ranges, link-local ones (metadata services of nodes), and IPv4
# addresses in IPv6 notation: the API server reads ::ffff:0:0/96 as IPv4 and refuses it, so ::/32
# stands for it.
_INTERNET: tuple[Rule, ...] = (
    {
        "ipBlock": {
            "cidr": "0.0.0.0/0",
            "except": ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"],
        }
    },
    {"ipBlock": {"cidr": "::/0", "except": ["fc00::/7", "fe80::/10", "::/32"]}},
)


@dataclasses.dataclass(frozen=True)
class Network:
    """The operator's settings of the cluster's network.

    Attributes:
        operator_namespace: namespace whose pods may read /stats and /metrics.
        monitoring_namespace: a second such namespace; empty for none.
        model_sources: CIDRs of mirrors and proxies that pods with an `hf://` model may reach.
        policies: whether services get NetworkPolicies.
        api_server_ports: ports that gateways may reach at any address. They include the ports of
            the API server's Service and of its endpoints.
    """

    operator_namespace: str = names.OPERATOR_NAMESPACE
    monitoring_namespace: str = ""
    api_server_ports: tuple[int, ...] = (443, 6443)
    dns_namespace: str = "kube-system"
    dns_ports: tuple[int, ...] = (53,)
    model_sources: tuple[str, ...] = ()
    policies: bool = True


def network_policies(
    service: VLMService, network: Network, *, live_downloads: bool = False
) -> dict[str, Rule]:
    """Return the specs of the policies by role.

    With `model.cache`, only the pods of its Job reach the model's source. `live_downloads` is
    whether live workers or gateways download the model themselves.
    """
    if not network.policies:
        return {}
    flows = _flows(service)
    model = service.spec.model
    hub = live_downloads or (model.uri.startswith("hf://") and model.cache is None)
    policies = {
        role.value: {
            "podSelector": {"matchLabels": selector(service.name, role)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": _ingress(service, role, flows, network),
            "egress": _egress(service, role, flows, network, hub=hub),
        }
        for role in (*service.spec.pools.present, Role.GATEWAY)
    }
    if model.cache is not None:
        labels = {names.LABEL_SERVICE: service.name, names.LABEL_ROLE: names.MODEL_PART}
        operator = _namespace(network.operator_namespace)
        policies[names.MODEL_PART] = {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [operator], "ports": [_tcp(names.PORT_HTTP)]}],
            "egress": [_dns(network), *_hub(network)],
        }
    return policies


def live_downloads(observed: Observed) -> bool:
    """Whether pods of a live Deployment download their model themselves.

    They may restart until a rollout has replaced them.
    """
    return any(
        argument.startswith("--model=hf://")
        for item in observed.of_kind(DEPLOYMENT.kind)
        for container in item["spec"]["template"]["spec"]["containers"]
        for argument in container.get("args", ())
    )


def _flows(service: VLMService) -> list[tuple[Role, Role]]:
    """Return (client, server) of gRPC connections: gateway to all, consumers to producers."""
    pools = list(service.spec.pools.present)
    # a pool fetches from the pool before it: prefill embeddings, decode KV or embeddings
    return [*((Role.GATEWAY, role) for role in pools), *zip(pools[1:], pools, strict=False)]


def _ingress(
    service: VLMService, role: Role, flows: list[tuple[Role, Role]], network: Network
) -> list[Rule]:
    readers = [
        _namespace(one) for one in (network.operator_namespace, network.monitoring_namespace) if one
    ]
    rules: list[Rule] = [{"from": readers, "ports": [_tcp(names.PORT_HTTP)]}]
    if role is Role.GATEWAY:
        return [{"ports": [_tcp(names.PORT_GATEWAY)]}, *rules]
    callers = [_pods(service, source) for source, target in flows if target is role]
    rules.insert(0, {"from": callers, "ports": [_tcp(names.PORT_GRPC)]})
    consumers = [_pods(service, source) for source, target in _transfers(flows) if target is role]
    if consumers:
        rules.insert(1, {"from": consumers, "ports": [_tcp(names.PORT_DATA)]})
    return rules


def _egress(
    service: VLMService,
    role: Role,
    flows: list[tuple[Role, Role]],
    network: Network,
    *,
    hub: bool,
) -> list[Rule]:
    rules: list[Rule] = [_dns(network)]
    targets = [_pods(service, target) for source, target in flows if source is role]
    if targets:
        rules.append({"to": targets, "ports": [_tcp(names.PORT_GRPC)]})
    producers = [_pods(service, target) for source, target in _transfers(flows) if source is role]
    if producers:
        rules.append({"to": producers, "ports": [_tcp(names.PORT_DATA)]})
    if role is Role.GATEWAY:
        rules.append({"ports": [_tcp(port) for port in network.api_server_ports]})
        rules += _media(service.spec.gateway.media)
    if hub:
        rules += _hub(network)
    if service.spec.tracing is not None:
        rules.append(_collector(service.spec.tracing.endpoint))
    return rules


def _dns(network: Network) -> Rule:
    return {
        "to": [_namespace(network.dns_namespace), {"ipBlock": {"cidr": NODE_LOCAL_DNS}}],
        "ports": [
            rule
            for port in network.dns_ports
            for rule in ({"protocol": "UDP", "port": port}, _tcp(port))
        ],
    }


def _hub(network: Network) -> list[Rule]:
    rules: list[Rule] = [{"to": list(_INTERNET), "ports": [_tcp(443)]}]
    if network.model_sources:
        rules.append({"to": [{"ipBlock": {"cidr": cidr}} for cidr in network.model_sources]})
    return rules


def _media(media: Media) -> list[Rule]:
    """Return the rule for hosts of images: a policy knows no names, so it names addresses."""
    if not media.allowed_domains:
        return []
    networks: list[Rule] = [{"ipBlock": {"cidr": cidr}} for cidr in media.allowed_networks]
    ports = (443, 80) if media.allow_http else (443,)
    return [{"to": [*_INTERNET, *networks], "ports": [_tcp(port) for port in ports]}]


def _collector(url: str) -> Rule:
    """Return the rule for a collector: of a namespace, of an address, or else of any address."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    rule: Rule = {"ports": [_tcp(parts.port or (443 if parts.scheme == "https" else 80))]}
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        labels = host.split(".")  # NAME.NAMESPACE, NAME.NAMESPACE.svc, NAME.NAMESPACE.svc.DOMAIN
        in_cluster = len(labels) == 2 or labels[2:3] == ["svc"]
        return {"to": [_namespace(labels[1])], **rule} if in_cluster else rule
    return {"to": [{"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}], **rule}


def _transfers(flows: list[tuple[Role, Role]]) -> list[tuple[Role, Role]]:
    return [(source, target) for source, target in flows if source is not Role.GATEWAY]


def _namespace(name: str) -> Rule:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _pods(service: VLMService, role: Role) -> Rule:
    return {"podSelector": {"matchLabels": selector(service.name, role)}}


def _tcp(port: int) -> Rule:
    return {"protocol": "TCP", "port": port}
