"""Addresses of the API server, nodes, pods and Services: IPv4, IPv6 or both.

plane ─ bridge ┬ node 1 ─ its pods
               └ node 2 ─ its pods        Services have addresses that only kube-proxy knows
"""

import dataclasses
import enum


@dataclasses.dataclass(frozen=True)
class Family:
    """One address family; texts with {} take the index of a node."""

    plane: str
    node: str
    node_bits: int
    pods: str
    all_pods: str
    services: str
    dns: str
    anywhere: str


IPV4 = Family(
    plane="10.231.0.1",
    node="10.231.0.1{}",
    node_bits=24,
    pods="10.232.{}.0/24",
    all_pods="10.232.0.0/16",
    services="10.0.0.0/16",
    dns="10.0.0.10",
    anywhere="0.0.0.0/0",
)
IPV6 = Family(
    plane="fd00:231::1",
    node="fd00:231::1{}",
    node_bits=64,
    pods="fd00:232:0:{}::/64",
    all_pods="fd00:232::/48",
    services="fd00:10::/112",
    dns="fd00:10::a",
    anywhere="::/0",
)


class Network(enum.Enum):
    """The families of a cluster; the first is that of the API server and of most Services."""

    ipv4 = (IPV4,)
    ipv6 = (IPV6,)
    dual = (IPV4, IPV6)

    @property
    def primary(self) -> Family:
        return self.value[0]

    @property
    def services(self) -> str:
        """As the API server takes the ranges."""
        return ",".join(family.services for family in self.value)

    @property
    def all_pods(self) -> str:
        """As kube-proxy takes the ranges."""
        return ",".join(family.all_pods for family in self.value)
