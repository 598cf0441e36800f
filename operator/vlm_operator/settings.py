"""The operator's settings, read once from argv and the environment."""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

MIN_LEASE_SECONDS = 6.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the operator's process; `--help` describes each.

    Settings of a service are in its VLMService.
    """

    namespaces: tuple[str, ...] = ()
    kubeconfig: str | None = None
    worker_image: str = "localhost/triptych/worker:dev"
    gateway_image: str = ""
    image_pull_policy: str = ""
    identity: str = "operator"
    lease_namespace: str = "triptych-system"
    lease_name: str = "triptych-operator"
    lease_seconds: float = 15.0
    bind: str = "::"
    worker_bind: str = "::"
    metrics_port: int = 8080
    cluster_domain: str = "cluster.local"
    api_server_ports: tuple[int, ...] = (443, 6443)
    dns_namespace: str = "kube-system"
    dns_ports: tuple[int, ...] = (53,)
    monitoring_namespace: str = ""
    model_sources: tuple[str, ...] = ()
    network_policies: bool = True
    identity_mode: str = "OperatorCA"
    identity_check_seconds: float = 300.0
    resync_seconds: float = 60.0
    relist_seconds: float = 1800.0
    watch_seconds: int = 300
    silence_seconds: int = 70
    spare_seconds: float = 120.0
    autoscaler_constants: Path | None = None
    log_level: str = "INFO"
    log_format: str = "json"

    @classmethod
    def read(cls, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
        """Parse a command line; if it is invalid, exit with a message and status 2."""
        environment = os.environ if environ is None else environ  # noqa: TID251
        options = vars(_parser(environment).parse_args(argv))
        for name in ("namespaces", "model_sources"):
            options[name] = tuple(options[name])
        for name in ("api_server_ports", "dns_ports"):
            options[name] = tuple(options[name]) or getattr(cls, name)
        return cls(**options)


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="vlm-operator", description="Run VLMServices as encoder, prefill and decode pools."
    )
    add = parser.add_argument
    add("--namespace", dest="namespaces", action="append", default=[], metavar="NS",
        help="namespace whose VLMServices are reconciled; repeatable; default: all")  # fmt: skip
    add("--kubeconfig", metavar="FILE", help="credentials; default: the pod's ServiceAccount")
    add("--worker-image", default=default.worker_image, metavar="IMAGE",
        help="image of workers whose VLMService names none (%(default)s)")  # fmt: skip
    add("--gateway-image", default=default.gateway_image, metavar="IMAGE",
        help="image of gateways whose VLMService names none; default: --worker-image")  # fmt: skip
    add("--image-pull-policy", default=default.image_pull_policy, metavar="POLICY",
        help="imagePullPolicy of every pod; default: that of Kubernetes")  # fmt: skip
    add("--worker-bind", default=default.worker_bind, metavar="ADDRESS",
        help="--bind of worker and gateway pods; $(POD_IP) is replaced (%(default)s)")  # fmt: skip
    add("--identity", default=environ.get("POD_NAME") or socket.gethostname(), metavar="NAME",
        help="holder of the Lease (POD_NAME, else the host name)")  # fmt: skip
    add("--lease-namespace", default=environ.get("POD_NAMESPACE") or default.lease_namespace,
        metavar="NS", help="namespace of the Lease; default: POD_NAMESPACE")  # fmt: skip
    add("--lease-name", default=default.lease_name, metavar="NAME",
        help="name of the Lease (%(default)s)")  # fmt: skip
    add("--lease-seconds", type=_lease_seconds, default=default.lease_seconds, metavar="S",
        help="time after which another process replaces a lost leader; the leader "
        "starts no write in the last 5 seconds (%(default)s)")  # fmt: skip
    add("--bind", default=environ.get("POD_IP") or default.bind, metavar="IP",
        help="listen address of metrics and health checks (POD_IP, else all)")  # fmt: skip
    add("--metrics-port", type=int, default=default.metrics_port, metavar="PORT",
        help="port of /metrics, /healthz and /readyz; 0: a free one (%(default)s)")  # fmt: skip
    add("--cluster-domain", default=default.cluster_domain, metavar="DOMAIN",
        help="DNS domain of the cluster, for status.url (%(default)s)")  # fmt: skip
    add("--api-server-port", dest="api_server_ports", action="append", type=_port, default=[],
        metavar="PORT",
        help="port that NetworkPolicies let gateways reach; repeatable (443, 6443)")  # fmt: skip
    add("--dns-namespace", default=default.dns_namespace, metavar="NS",
        help="namespace of the DNS pods, for NetworkPolicies (%(default)s)")  # fmt: skip
    add("--dns-port", dest="dns_ports", action="append", type=_port, default=[], metavar="PORT",
        help="port of the DNS pods, for NetworkPolicies; repeatable; default: 53")  # fmt: skip
    add("--monitoring-namespace", default=default.monitoring_namespace, metavar="NS",
        help="namespace whose pods NetworkPolicies let read /metrics; default: none")  # fmt: skip
    add("--model-source", dest="model_sources", action="append", type=_cidr, default=[],
        metavar="CIDR", help="addresses of a mirror, bucket or proxy that NetworkPolicies let pods "
        "which download a model reach; repeatable; default: none")  # fmt: skip
    add("--no-network-policies", dest="network_policies", action="store_false",
        help="create no NetworkPolicies for services; delete existing ones")  # fmt: skip
    add("--identity-mode", default=default.identity_mode, choices=["OperatorCA", "Off"],
        help="issuer of certificates, if spec.identity names none (%(default)s)")  # fmt: skip
    add("--identity-check-seconds", type=float, default=default.identity_check_seconds, metavar="S",
        help="interval in which each Secret of certificates is compared with what was written, by "
        "a patch without a change (%(default)s)")  # fmt: skip
    add("--resync-seconds", type=float, default=default.resync_seconds, metavar="S",
        help="maximum time between full turns of a service, and interval of the lists that "
        "find changes of VLMServices without an event (%(default)s)")  # fmt: skip
    add("--relist-seconds", type=float, default=default.relist_seconds, metavar="S",
        help="interval of the lists of children, pods and nodes (%(default)s)")  # fmt: skip
    add("--watch-seconds", type=int, default=default.watch_seconds, metavar="S",
        help="duration of one watch of VLMServices (%(default)s)")  # fmt: skip
    add("--silence-seconds", type=int, default=default.silence_seconds, metavar="S",
        help="time without event or bookmark after which a watch counts as broken; above 60 "
        "(%(default)s)")  # fmt: skip
    add("--spare-seconds", type=float, default=default.spare_seconds, metavar="S",
        help="time that a new pod waits for a node before the rollout drains another pod for it "
        "(%(default)s)")  # fmt: skip
    add("--autoscaler-constants", type=Path, metavar="FILE",
        help="JSON with other constants of the autoscaler; not supported")  # fmt: skip
    add("--log-level", default=default.log_level, choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    add("--log-format", default=default.log_format, choices=["json", "plain"])
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number from 1 to 65535")
    return int(text)


def _cidr(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: write for example 10.1.2.0/24") from None


def _lease_seconds(text: str) -> float:
    """Refuse a duration that leaves no time for a renewal."""
    seconds = float(text)
    if seconds < MIN_LEASE_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is too short: at least {MIN_LEASE_SECONDS:g}, since a write may take 5"
        )
    return seconds
