"""Identities and flags of the control plane's processes."""

import dataclasses
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from . import pki

LOOPBACK = "127.0.0.1"
SERVICES = "10.0.0.0/16"
# Disabled controllers: an endpoint cannot have a loopback address, so they would only warn.
_OF_ENDPOINTS = [
    "-endpoints-controller",
    "-endpointslice-controller",
    "-endpointslice-mirroring-controller",
]
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclasses.dataclass(frozen=True)
class Identities:
    """Certificates of the API server, the token signer, the CA, and the clients by user."""

    server: pki.Pair
    signing: pki.Pair
    ca: pki.Pair
    clients: Mapping[str, pki.Pair]


ADMIN = "kubernetes-admin"
KUBELET_CLIENT = "kube-apiserver-kubelet-client"
USERS = {
    ADMIN: "kubeconfig",
    "system:kube-controller-manager": "controller-manager.kubeconfig",
    "system:kube-scheduler": "scheduler.kubeconfig",
}


def issue(authority: pki.Authority, address: str, services: str) -> Identities:
    """Issue all certificates; `address` is that of the API server, `services` as `apiserver`."""
    # the Service `kubernetes` has the first address of each range
    firsts = [str(ipaddress.ip_network(one)[1]) for one in services.split(",")]
    names = [address, *firsts, "localhost", "kubernetes.default.svc", "kubernetes.default"]
    clients = {
        user: authority.issue(user, groups=["system:masters"] if user == ADMIN else [])
        for user in [*USERS, KUBELET_CLIENT]
    }
    server = authority.issue("kube-apiserver", addresses=names)
    return Identities(server, authority.signing_key(), authority.ca, clients)


def etcd(folder: Path, client: str, peer: str) -> list[str]:
    """Return the flags of etcd, which listens at the URLs `client` and `peer`."""
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",  # the data ends with the process
        "--log-level=warn",
    ]


def apiserver(
    folder: Path, etcd: str, address: str, port: int, certs: Identities, services: str
) -> list[str]:
    """Return the flags of kube-apiserver at `address`; `folder` has the audit policy.

    `services` is a range of addresses, or one of each family, separated by a comma.

    An address that is not loopback becomes the endpoint of the Service `kubernetes`.
    """
    kubelet = certs.clients[KUBELET_CLIENT]
    reconciler = "none" if address == LOOPBACK else "lease"
    return [
        f"--etcd-servers={etcd}",
        f"--secure-port={port}",
        f"--bind-address={address}",
        f"--advertise-address={address}",
        f"--endpoint-reconciler-type={reconciler}",
        f"--tls-cert-file={certs.server.certificate}",
        f"--tls-private-key-file={certs.server.key}",
        f"--client-ca-file={certs.ca.certificate}",
        f"--service-account-key-file={certs.signing.certificate}",
        f"--service-account-signing-key-file={certs.signing.key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--kubelet-certificate-authority={certs.ca.certificate}",
        f"--kubelet-client-certificate={kubelet.certificate}",
        f"--kubelet-client-key={kubelet.key}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-cluster-ip-range={services}",
        f"--audit-policy-file={folder / 'audit.yaml'}",
        f"--audit-log-path={folder / 'audit.log'}",
    ]


def controller_manager(folder: Path, address: str, certs: Identities) -> list[str]:
    """Return the flags of kube-controller-manager, for an API server at `address`."""
    controllers = ["*", "-node-ipam-controller", *(_OF_ENDPOINTS if address == LOOPBACK else [])]
    return [
        f"--kubeconfig={folder / 'controller-manager.kubeconfig'}",
        f"--service-account-private-key-file={certs.signing.key}",
        f"--root-ca-file={certs.ca.certificate}",
        "--use-service-account-credentials",
        "--leader-elect=false",
        f"--controllers={','.join(controllers)}",
        "--secure-port=0",
        "--pvclaimbinder-sync-period=1s",
        "--horizontal-pod-autoscaler-sync-period=2s",
        "--kube-api-qps=100",
        "--kube-api-burst=200",
    ]


def scheduler(folder: Path) -> list[str]:
    return [
        f"--kubeconfig={folder / 'scheduler.kubeconfig'}",
        "--leader-elect=false",
        "--secure-port=0",
    ]
