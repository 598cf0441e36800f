"""The operator's settings, read once from argv and the environment."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

LEAST_LEASE_SECONDS = 6.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the operator's process. Settings of a service are in its VLMService.

    Attributes:
        namespaces: namespaces whose VLMServices are reconciled; empty for all.
        kubeconfig: path of a file; None for the pod's ServiceAccount.
        worker_image: image of services that name none.
        image_pull_policy: imagePullPolicy of every pod; empty leaves Kubernetes' default.
        identity: holder of the lease.
        lease_seconds: time after which other processes take over the lease of a lost leader. A
            leader starts no write in the last 5 seconds.
        bind: listen address of metrics and health checks.
        worker_bind: `--bind` of worker and gateway pods; Kubernetes replaces `$(POD_IP)`.
        metrics_port: port of `/metrics`, `/healthz` and `/readyz`; 0 selects a free one.
        cluster_domain: DNS domain of the cluster, used in `status.url`.
        api_server_ports: ports that NetworkPolicies let gateways reach.
        dns_namespace: namespace of the DNS pods that NetworkPolicies let all pods reach.
        dns_ports: ports of the DNS pods.
        monitoring_namespace: namespace whose pods NetworkPolicies let read /metrics; empty for
            none.
        resync_seconds: maximum time between two full turns of a service, and interval of the lists
            that find changes of VLMServices that no event reported.
        relist_seconds: interval at which informers list again; in between they resume watches.
        watch_seconds: duration of one watch of VLMServices; the next one resumes where it ended.
        silence_seconds: time without event or bookmark after which a watch counts as dead.
        spare_seconds: time that a rollout's new pod waits for a node before the rollout drains
            another pod for it.
        autoscaler_constants: JSON file with other constants of the autoscaler; None for its own.
            Unsupported: for experiments.
    """

    namespaces: tuple[str, ...] = ()
    kubeconfig: str | None = None
    worker_image: str = "localhost/triptych/worker:dev"
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
        found = os.environ if environ is None else environ  # noqa: TID251
        options = vars(_parser(found).parse_args(argv))
        options["namespaces"] = tuple(options["namespaces"])
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
        help="look after this namespace alone; repeatable; default: all")  # fmt: skip
    add("--kubeconfig", metavar="FILE", help="default: the pod's own ServiceAccount")
    add("--worker-image", default=default.worker_image, metavar="IMAGE",
        help="image of workers and gateways whose VLMService names none (%(default)s)")  # fmt: skip
    add("--image-pull-policy", default=default.image_pull_policy, metavar="POLICY",
        help="imagePullPolicy of every pod; default: Kubernetes' own")  # fmt: skip
    add("--worker-bind", default=default.worker_bind, metavar="ADDRESS",
        help="what pods pass to --bind (%(default)s)")  # fmt: skip
    add("--identity", default=environ.get("POD_NAME") or socket.gethostname(), metavar="NAME",
        help="holder of the Lease (POD_NAME, else the host name)")  # fmt: skip
    add("--lease-namespace", default=environ.get("POD_NAMESPACE") or default.lease_namespace,
        metavar="NS", help="default: POD_NAMESPACE")  # fmt: skip
    add("--lease-name", default=default.lease_name, metavar="NAME", help="default: %(default)s")
    add("--lease-seconds", type=_lease_seconds, default=default.lease_seconds, metavar="S",
        help="how long others wait for a leader that is gone (%(default)s)")  # fmt: skip
    add("--bind", default=environ.get("POD_IP") or default.bind, metavar="IP",
        help="address of metrics and health (POD_IP, else all)")  # fmt: skip
    add("--metrics-port", type=int, default=default.metrics_port, metavar="PORT",
        help="of /metrics, /healthz and /readyz (%(default)s)")  # fmt: skip
    add("--cluster-domain", default=default.cluster_domain, metavar="DOMAIN",
        help="suffix of status.url (%(default)s)")  # fmt: skip
    add("--api-server-port", dest="api_server_ports", action="append", type=_port, default=[],
        metavar="PORT",
        help="NetworkPolicies let gateways reach it; repeatable; default: 443, 6443")  # fmt: skip
    add("--dns-namespace", default=default.dns_namespace, metavar="NS",
        help="NetworkPolicies let pods ask its pods for names (%(default)s)")  # fmt: skip
    add("--dns-port", dest="dns_ports", action="append", type=_port, default=[], metavar="PORT",
        help="of the pods that answer them; repeatable; default: 53")  # fmt: skip
    add("--monitoring-namespace", default=default.monitoring_namespace, metavar="NS",
        help="NetworkPolicies let its pods read /metrics; default: none")  # fmt: skip
    add("--resync-seconds", type=float, default=default.resync_seconds, metavar="S",
        help="full turn of each service, list of VLMServices: so often (%(default)s)")  # fmt: skip
    add("--relist-seconds", type=float, default=default.relist_seconds, metavar="S",
        help="list children, pods and nodes again this often (%(default)s)")  # fmt: skip
    add("--watch-seconds", type=int, default=default.watch_seconds, metavar="S",
        help="one watch of VLMServices lasts so long (%(default)s)")  # fmt: skip
    add("--silence-seconds", type=int, default=default.silence_seconds, metavar="S",
        help="a watch that says nothing for so long is dead; above 60 (%(default)s)")  # fmt: skip
    add("--spare-seconds", type=float, default=default.spare_seconds, metavar="S",
        help="until a rollout drains a pod for one that has no node (%(default)s)")  # fmt: skip
    add("--autoscaler-constants", type=Path, metavar="FILE",
        help="JSON with other constants of the autoscaler; unsupported")  # fmt: skip
    add("--log-level", default=default.log_level, choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    add("--log-format", default=default.log_format, choices=["json", "plain"])
    return parser


def _port(text: str) -> int:
    """Parse a TCP or UDP port."""
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number from 1 to 65535")
    return int(text)


def _lease_seconds(text: str) -> float:
    """Parse the duration of the Lease; refuse one that leaves no time for a renewal."""
    seconds = float(text)
    if seconds < LEAST_LEASE_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is too short: at least {LEAST_LEASE_SECONDS:g}, since a write may take 5"
        )
    return seconds
