"""The identity of a peer, and who may call what. Pure: no files, no sockets, no clock.

certificate ─▶ ServiceIdentity ─▶ refusal(method, peer, own) ─▶ None, or why the call is refused

An identity is one URI in the certificate. The role is a part of it, so a certificate of an encoder
is no certificate of a gateway. gRPC compares DNS names only, so each identity has one too.
"""

from __future__ import annotations

import dataclasses
import re
import ssl
from collections.abc import Mapping
from typing import Any, Final, Self

from vlm_worker.types import Role

CALLERS: Final[Mapping[str, frozenset[Role]]] = {
    "Hello": frozenset({Role.GATEWAY, Role.PREFILL, Role.DECODE}),
    "WatchLoad": frozenset({Role.GATEWAY}),
    "Cancel": frozenset({Role.GATEWAY}),
    "RenewLeases": frozenset({Role.GATEWAY, Role.PREFILL, Role.DECODE}),
    "ReleaseLease": frozenset({Role.GATEWAY, Role.PREFILL, Role.DECODE}),
    "Encode": frozenset({Role.GATEWAY}),
    # a decode worker of a service without a prefill pool computes prompts too
    "FetchEmbedding": frozenset({Role.PREFILL, Role.DECODE}),
    "Prefill": frozenset({Role.GATEWAY}),
    "Prefetch": frozenset({Role.GATEWAY}),
    "FetchKV": frozenset({Role.DECODE}),
    "Reserve": frozenset({Role.GATEWAY}),
    "Decode": frozenset({Role.GATEWAY}),
}
"""The roles that may call each method; a method without an entry is refused to all."""

_URI: Final = re.compile(
    r"spiffe://triptych\.dev/ns/(?P<namespace>[a-z0-9.-]+)"
    r"/vlmservice/(?P<service>[a-z0-9.-]+)/(?P<role>[a-z]+)"
)


class IdentityError(ValueError):
    """A certificate, or a directory of one, that cannot be used; the text names the fix."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceIdentity:
    """One role of one service."""

    namespace: str
    service: str
    role: Role

    @classmethod
    def of_uri(cls, uri: str) -> Self:
        """Parse the URI of a certificate. Raises IdentityError."""
        match = _URI.fullmatch(uri)
        if match is None or match["role"] not in set(Role):
            raise IdentityError(f"{uri!r} is no identity of a service: it must read like {_FORM}")
        return cls(match["namespace"], match["service"], Role(match["role"]))

    @property
    def uri(self) -> str:
        return f"spiffe://triptych.dev/ns/{self.namespace}/vlmservice/{self.service}/{self.role}"

    @property
    def dns_name(self) -> str:
        """The name that gRPC compares."""
        return f"{self.role}.{self.service}.{self.namespace}.triptych.internal"

    def is_same_service(self, other: ServiceIdentity) -> bool:
        return (self.namespace, self.service) == (other.namespace, other.service)


_FORM: Final = "spiffe://triptych.dev/ns/NAMESPACE/vlmservice/SERVICE/ROLE"


@dataclasses.dataclass(frozen=True, slots=True)
class Certificate:
    """A verified certificate. Times are in Unix seconds; `serial` is hexadecimal."""

    identity: ServiceIdentity
    serial: str
    not_before: float
    not_after: float

    @classmethod
    def of_peer(cls, fields: Mapping[str, Any] | None) -> Self:
        """Read what `ssl.SSLObject.getpeercert` returns.

        Raises:
            IdentityError: it has no URI, several, or another one.
        """
        names = (fields or {}).get("subjectAltName", ())
        uris = [value for kind, value in names if kind == "URI"]
        if fields is None or len(uris) != 1:
            raise IdentityError(f"a certificate must have exactly one URI, it has {len(uris)}")
        identity = ServiceIdentity.of_uri(uris[0])
        if ("DNS", identity.dns_name) not in names:
            raise IdentityError(f"the certificate must have the DNS name {identity.dns_name}")
        return cls(
            identity,
            str(fields["serialNumber"]),
            ssl.cert_time_to_seconds(fields["notBefore"]),
            ssl.cert_time_to_seconds(fields["notAfter"]),
        )

    def problem(self, *, role: Role, now: float) -> str | None:
        """Why a process with this role cannot use it as its own now; None if it can."""
        if self.identity.role is not role:
            return (
                f"tls.crt is of the role {self.identity.role}, this process is {role}: "
                "mount the Secret of its own role"
            )
        if now >= self.not_after:
            return "tls.crt has expired: renew the Secret (cert-manager or the operator does)"
        if now < self.not_before:
            return "tls.crt is not valid yet: compare the clocks of this node and of the issuer"
        return None


def refusal(method: str, peer: ServiceIdentity, own: ServiceIdentity) -> str | None:
    """Why `peer` may not call a method of `own`; None if it may."""
    allowed = CALLERS.get(method, frozenset())
    if peer.is_same_service(own) and peer.role in allowed:
        return None
    roles = " or ".join(sorted(role.value for role in allowed)) or "no role"
    return (
        f"{peer.uri} may not call {method}: it needs the role {roles} "
        f"of the service {own.service} in the namespace {own.namespace}"
    )
