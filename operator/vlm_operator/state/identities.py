"""Identities of pods: who issues their certificates, and what the operator remembers of them.

A service's pods of one revision have one issuer. The operator may not read Secrets, so it keeps the
facts about each certificate in `status.identity`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.cluster import epoch_seconds, timestamp
from vlm_operator.names import Role

OPERATOR_CA = "OperatorCA"
_CERT_MANAGER = "CertManager:"


@dataclasses.dataclass(frozen=True)
class IssuerName:
    """An issuer of cert-manager."""

    kind: str
    group: str
    name: str

    @property
    def text(self) -> str:
        return f"{_CERT_MANAGER}{self.kind}.{self.group}/{self.name}"


def issuer_of(identity: str) -> IssuerName | None:
    """Read cert-manager's issuer from `Resolved.identity`; None if it is another one."""
    if not identity.startswith(_CERT_MANAGER):
        return None
    kind_and_group, _, name = identity.removeprefix(_CERT_MANAGER).partition("/")
    kind, _, group = kind_and_group.partition(".")
    return IssuerName(kind, group, name)


def secret_name(service: str, role: Role, identity: str) -> str:
    """Name the Secret of a role: one per issuer, because pods trust the issuer of their own."""
    name = f"{service}-{role}-identity"
    if identity == OPERATOR_CA:
        return names.bounded(name)
    return names.bounded(f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}")


def spiffe_id(namespace: str, service: str, role: Role) -> str:
    """Return the URI of a role's certificate, by which peers authorise it."""
    return f"spiffe://{names.GROUP}/ns/{namespace}/vlmservice/{service}/{role}"


def dns_name(namespace: str, service: str, role: Role) -> str:
    """Return the DNS name of a role's certificate, which gRPC clients expect of a server."""
    return f"{role}.{service}.{namespace}.triptych.internal"


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The present certificate of one role, without its key.

    Attributes:
        secret: name of its Secret.
        identity: its issuer, as in `Resolved.identity`.
        serial: hexadecimal serial number; "" if cert-manager has not issued it yet.
        not_before: start of its validity, in seconds since the epoch.
        not_after: end of its validity.
        version: resourceVersion of the Secret after our write. Another one means that somebody
            changed the Secret. "" for cert-manager's.
        anchors: digest of the trust anchors in the Secret; "" for cert-manager's.
    """

    role: Role
    secret: str
    identity: str
    serial: str
    not_before: float
    not_after: float
    version: str = ""
    anchors: str = ""

    def to_status(self) -> dict[str, str]:
        fields = {
            "secret": self.secret,
            "role": self.role.value,
            "issuer": self.identity,
            "serial": self.serial,
            "notBefore": timestamp(self.not_before),
            "notAfter": timestamp(self.not_after),
            "secretVersion": self.version,
            "anchors": self.anchors,
        }
        return {name: value for name, value in fields.items() if value}


@dataclasses.dataclass(frozen=True)
class IdentityState:
    """The certificates of a service after one turn.

    Attributes:
        failures: causes by Secret, with a fix; empty if all are issued.
        pending: Secrets that cert-manager has not issued yet.
    """

    certificates: tuple[Certificate, ...] = ()
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pending: tuple[str, ...] = ()
    wrote: bool = False


def stored_certificates(status: Mapping[str, Any]) -> dict[str, Certificate]:
    """Read `status.identity` by Secret. A malformed item counts as absent: it is issued again."""
    found = {}
    for item in status.get("identity") or ():
        try:
            found[item["secret"]] = Certificate(
                role=Role(item["role"]),
                secret=item["secret"],
                identity=item["issuer"],
                serial=item.get("serial", ""),
                not_before=epoch_seconds(item["notBefore"]),
                not_after=epoch_seconds(item["notAfter"]),
                version=item.get("secretVersion", ""),
                anchors=item.get("anchors", ""),
            )
        except (KeyError, TypeError, ValueError):
            continue
    return found


def first_to_expire(certificates: Iterable[Certificate]) -> Certificate | None:
    return min(certificates, key=lambda item: item.not_after, default=None)
