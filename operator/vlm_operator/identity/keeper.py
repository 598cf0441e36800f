"""Keeps the certificates of one service: Secrets of the operator's CA, or cert-manager's objects.

certificates in status ─▶ due? ─▶ unchanged? (JSON patch of tests) ─▶ issue ─▶ apply the Secret
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.cluster import CERTIFICATE, SECRET, Cluster, Manifest, epoch_seconds
from vlm_operator.errors import (
    ENDS_TURN,
    ClusterError,
    DiffersError,
    IdentityError,
    NameConflictError,
    NamespaceEndsError,
)
from vlm_operator.identity.authority import Authority, Signer, encoded
from vlm_operator.identity.certificates import issue
from vlm_operator.identity.schedule import LEAF_SECONDS, Cause, due
from vlm_operator.metrics import IDENTITY_FAILURES, IDENTITY_ISSUED
from vlm_operator.names import Role
from vlm_operator.plan.deployments import owner_reference
from vlm_operator.pods.parts import object_labels
from vlm_operator.state.identities import (
    OPERATOR_CA,
    Certificate,
    IdentityState,
    IssuerName,
    dns_name,
    issuer_of,
    secret_name,
    spiffe_id,
    stored_certificates,
)

logger = logging.getLogger(__name__)

TLS_TYPE = "kubernetes.io/tls"
RETRY_SECONDS = 10.0  # between two attempts to issue one certificate
LABEL_IDENTITY = f"{names.GROUP}/identity"
"""Label of the operator's Secrets; the admission policy lets it write no others."""
_SERIAL = f"{names.GROUP}/serial"
Wanted = tuple[Role, str]  # role, and its issuer as in `Resolved.identity`


class IdentityKeeper:
    """Keeps the certificates of one service. Its state only saves work.

    Args:
        cluster: client that is fenced by the lease.
        authority: the operator's CAs.
        check_seconds: interval in which each Secret is compared with what was written.
        poll_seconds: interval in which cert-manager's Certificates are read.
    """

    def __init__(
        self, cluster: Cluster, authority: Authority, *, check_seconds: float, poll_seconds: float
    ) -> None:
        self._cluster = cluster
        self._authority = authority
        self._check_seconds = check_seconds
        self._poll_seconds = poll_seconds
        self._known: dict[str, Certificate] | None = None
        self._checked: dict[str, float] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        self._pending: set[str] = set()
        self._wrote = False

    async def keep(
        self, service: VLMService, wanted: Iterable[Wanted], status: Manifest, *, now: float
    ) -> IdentityState:
        """Issue what is due, for the roles of all live revisions.

        A failure of one certificate does not prevent the others.

        Raises:
            UnavailableError, ConflictError, LeaseLostError: the turn ends; the next one continues.
        """
        if self._known is None:
            self._known = stored_certificates(status)
        self._wrote = False
        names_wanted = set()
        for role, identity in sorted(set(wanted)):
            secret = secret_name(service.name, role, identity)
            names_wanted.add(secret)
            failed = self._failed.get(secret)
            if failed is not None and 0 <= now - failed[0] < RETRY_SECONDS:
                continue
            try:
                await self._keep_one(service, role, identity, secret, now=now)
                self._failed.pop(secret, None)
            except NamespaceEndsError:
                break
            except ENDS_TURN:
                raise
            except (ClusterError, IdentityError, NameConflictError) as error:
                IDENTITY_FAILURES.inc()
                self._failed[secret] = (now, str(error))
        for secret in self._known.keys() - names_wanted:
            del self._known[secret]
        return IdentityState(
            certificates=tuple(self._known[name] for name in sorted(self._known)),
            failures={
                name: message
                for name, (_, message) in sorted(self._failed.items())
                if name in names_wanted
            },
            pending=tuple(sorted(self._pending & names_wanted)),
            wrote=self._wrote,
        )

    async def _keep_one(
        self, service: VLMService, role: Role, identity: str, secret: str, *, now: float
    ) -> None:
        assert self._known is not None
        issuer = issuer_of(identity)
        if issuer is not None:
            if now - self._checked.get(secret, float("-inf")) >= self._poll_seconds:
                await self._request(service, role, secret, identity, issuer)
                self._checked[secret] = now
            return
        signer = await self._authority.signer(now=now)
        known = self._known.get(secret)
        cause = due(known, anchors=signer.anchors, now=now)
        if cause is None and known is not None:
            if now - self._checked.get(secret, float("-inf")) < self._check_seconds:
                return
            cause = await self._changed(service.namespace, known)
        if cause is not None:
            self._known[secret] = await self._issue(service, role, secret, signer, now=now)
            self._wrote = True
            IDENTITY_ISSUED.labels(cause=cause.value).inc()
            logger.info(
                "certificate issued",
                extra={"secret": f"{service.namespace}/{secret}", "cause": cause.value},
            )
        self._checked[secret] = now

    async def _changed(self, namespace: str, known: Certificate) -> Cause | None:
        """Return whether somebody deleted or changed a Secret since the operator wrote it."""
        expected = {"/metadata/resourceVersion": known.version}
        try:
            found = await self._cluster.metadata_if(SECRET, namespace, known.secret, expected)
        except DiffersError:
            return Cause.CHANGED
        return Cause.LOST if found is None else None

    async def _issue(
        self, service: VLMService, role: Role, secret: str, signer: Signer, *, now: float
    ) -> Certificate:
        """Issue a certificate and write its Secret.

        Raises:
            NameConflictError: a Secret of that name is not this service's.
        """
        namespace = service.namespace
        expected = {"/type": TLS_TYPE, "/metadata/ownerReferences/0/uid": service.uid}
        try:
            found = await self._cluster.metadata_if(SECRET, namespace, secret, expected)
        except DiffersError:
            raise NameConflictError(SECRET.kind, secret, None) from None
        pair = issue(
            signer.pair,
            namespace=namespace,
            service=service.name,
            role=role,
            seconds=self._authority.leaf_seconds,
            now=now,
        )
        manifest = _manifest(SECRET.api_version, SECRET.kind, service, role, secret)
        manifest["metadata"]["annotations"] = {_SERIAL: pair.validity.serial}
        if found is not None:
            manifest["metadata"]["uid"] = found["uid"]
        files = {"ca.crt": signer.bundle, "tls.crt": pair.certificate, "tls.key": pair.key}
        manifest |= {"type": TLS_TYPE, "data": encoded(files)}
        answer = await self._cluster.apply(manifest, manager=names.MANAGER)
        return Certificate(
            role=role,
            secret=secret,
            identity=OPERATOR_CA,
            serial=pair.validity.serial,
            not_before=pair.validity.not_before,
            not_after=pair.validity.not_after,
            version=answer["metadata"]["resourceVersion"],
            anchors=signer.anchors,
        )

    async def _request(
        self, service: VLMService, role: Role, secret: str, identity: str, issuer: IssuerName
    ) -> None:
        """Apply the Certificate of a role, and read from the answer what cert-manager issued."""
        assert self._known is not None
        manifest = certificate_manifest(service, role, secret, issuer)
        try:
            answer = await self._cluster.apply(manifest, manager=names.MANAGER)
        except ClusterError as error:
            if error.status == 404:
                text = f"Certificate {secret}: the cluster has no cert-manager: install it"
                raise IdentityError(text) from error
            raise
        status = answer.get("status", {})
        ready: Manifest = next(
            (i for i in status.get("conditions", ()) if i["type"] == "Ready"), {}
        )
        if "notAfter" in status:
            self._known[secret] = Certificate(
                role=role,
                secret=secret,
                identity=identity,
                serial="",
                not_before=epoch_seconds(status["notBefore"]),
                not_after=epoch_seconds(status["notAfter"]),
            )
        if ready.get("status") == "True":
            self._pending.discard(secret)
            return
        self._pending.add(secret)
        if ready.get("status") == "False" and ready.get("reason") not in _IN_PROGRESS:
            message = ready.get("message", "")
            raise IdentityError(f"Certificate {secret}: cert-manager: {message}")


_IN_PROGRESS = ("DoesNotExist", "Issuing", "Pending")


def certificate_manifest(
    service: VLMService, role: Role, secret: str, issuer: IssuerName
) -> Manifest:
    """Return the Certificate by which cert-manager writes the Secret of a role."""
    manifest = _manifest(CERTIFICATE.api_version, CERTIFICATE.kind, service, role, secret)
    labels = manifest["metadata"]["labels"]
    manifest["spec"] = {
        "secretName": secret,
        "secretTemplate": {"labels": dict(labels)},
        "duration": f"{round(LEAF_SECONDS / 3600)}h0m0s",
        "renewBefore": f"{round(LEAF_SECONDS / 3 / 3600)}h0m0s",
        "privateKey": {
            "algorithm": "ECDSA",
            "size": 256,
            "encoding": "PKCS8",
            "rotationPolicy": "Always",
        },
        "usages": ["digital signature", "server auth", "client auth"],
        "uris": [spiffe_id(service.namespace, service.name, role)],
        "dnsNames": [dns_name(service.namespace, service.name, role)],
        "issuerRef": dataclasses.asdict(issuer),
    }
    return manifest


def _manifest(api_version: str, kind: str, service: VLMService, role: Role, name: str) -> Manifest:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": {**object_labels(service.name, role), LABEL_IDENTITY: role.value},
            "ownerReferences": [owner_reference(service)],
        },
    }
