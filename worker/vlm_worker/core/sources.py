"""Checks the producers that a worker may fetch from. Pure.

The caller of Prefill or Decode names the address of a producer. Without a check, a caller could
make the worker connect to any address in the cluster.

    address ─▶ check_address: may it be a worker of the service? ─▶ Hello ─▶ check_hello: is it one?
                                                                              └▶ leases, fetches
"""

from __future__ import annotations

import dataclasses
import ipaddress

from vlm_worker.errors import GoneError, IncompatibleError


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """The properties that all producers of this worker share.

    Attributes:
        served_name, compat: must be in their Hello; equal to those of this worker.
        pod_ip: the address of this worker's pod. Empty outside of a cluster: there, addresses come
            from the gateway's settings and may have host names and any port.
        grpc_port: the gRPC port of every worker in the cluster.
    """

    served_name: str
    compat: str
    pod_ip: str = ""
    grpc_port: int = 0

    def check_address(self, address: str) -> None:
        """Raise IncompatibleError unless `address` may be of a worker of the service."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            if self.pod_ip or not host:
                raise _refused(address, "pods are reached by their IP addresses") from None
            return
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        if ip.is_link_local or ip.is_multicast or ip.is_unspecified:
            raise _refused(address, "no worker has a link-local, multicast or unspecified address")
        if not self.pod_ip:
            return
        if ip.is_loopback and not ipaddress.ip_address(self.pod_ip).is_loopback:
            raise _refused(address, "no other pod has a loopback address")
        if port != str(self.grpc_port):
            raise _refused(address, f"workers of this service listen at port {self.grpc_port}")

    def check_hello(
        self, address: str, *, model: str, compat: str, boot_id: bytes, wanted: bytes
    ) -> None:
        """Check the Hello of a producer: model, compatibility set and incarnation.

        `wanted` is the boot id of the incarnation that made the handle.

        Raises:
            IncompatibleError: another model or compatibility set.
            GoneError: another incarnation.
        """
        if model != self.served_name:
            raise _refused(address, f"it serves {model!r}, not {self.served_name!r}")
        if compat != self.compat:
            raise _refused(address, f"its compat is {compat!r}, not {self.compat!r}")
        if boot_id != wanted:
            raise GoneError(f"the handle is from another incarnation of the worker at {address}")


def _refused(address: str, reason: str) -> IncompatibleError:
    return IncompatibleError(f"the source {address!r} is not used: {reason}")
