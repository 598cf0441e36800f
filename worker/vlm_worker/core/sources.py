"""Which addresses a worker may fetch from. Pure.

A caller of Prefill or Decode names the address of a producer. Without a check, the worker would
connect to any address that the caller likes, from inside the cluster.

    address ─▶ check_address: could it be a worker of ours? ─▶ Hello ─▶ check_hello: is it one?
                                                                         └▶ leases, fetches
"""

from __future__ import annotations

import dataclasses
import ipaddress

from vlm_worker.errors import GoneError, IncompatibleError


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """What all producers of this worker have in common.

    Attributes:
        served_name, compat: what their Hello says; those of this worker.
        pod_ip: this worker's own address in its cluster. Empty outside of one: addresses are what
            somebody gave the gateway, host names and any port among them.
        grpc_port: of every worker in the cluster.
    """

    served_name: str
    compat: str
    pod_ip: str = ""
    grpc_port: int = 0

    def check_address(self, address: str) -> None:
        """Raise IncompatibleError unless a worker of the service may be there."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            found = ipaddress.ip_address(host)
        except ValueError:
            if self.pod_ip or not host:
                raise _refused(address, "pods are reached by their IP addresses") from None
            return
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        if found.is_link_local or found.is_multicast or found.is_unspecified:
            raise _refused(address, "no worker has a link-local, multicast or unspecified address")
        if not self.pod_ip:
            return
        if found.is_loopback and not ipaddress.ip_address(self.pod_ip).is_loopback:
            raise _refused(address, "no other pod has a loopback address")
        if port != str(self.grpc_port):
            raise _refused(address, f"workers of this service listen at port {self.grpc_port}")

    def check_hello(
        self, address: str, *, model: str, compat: str, boot_id: bytes, wanted: bytes
    ) -> None:
        """Raise unless who answers there serves what this worker serves, in the life `wanted`.

        Raises:
            IncompatibleError: another model or compat set.
            GoneError: another life.
        """
        if model != self.served_name:
            raise _refused(address, f"it serves {model!r}, not {self.served_name!r}")
        if compat != self.compat:
            raise _refused(address, f"its compat is {compat!r}, not {self.compat!r}")
        if boot_id != wanted:
            raise GoneError(f"the handle is from another life of the worker at {address}")


def _refused(address: str, reason: str) -> IncompatibleError:
    return IncompatibleError(f"the source {address!r} is not used: {reason}")
