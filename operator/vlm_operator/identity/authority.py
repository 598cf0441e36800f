"""Keeps the operator's CAs in one Secret of its own namespace.

The Secret has `<serial>.crt` and `<serial>.key` of each CA. Only the leader writes it, and with a
precondition, so two operators never use two CAs. If somebody deletes it, the CAs in memory restore
it.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging

from vlm_operator import names
from vlm_operator.cluster import SECRET, Cluster, Manifest
from vlm_operator.errors import ClusterError, ConflictError, IdentityError
from vlm_operator.identity.certificates import Pair, digest, load, new_authority
from vlm_operator.identity.schedule import (
    AUTHORITY_SECONDS,
    LEAF_SECONDS,
    AuthorityPlan,
    plan_authorities,
)

logger = logging.getLogger(__name__)

READ_SECONDS = 300.0  # interval of the reads that find a changed or deleted Secret
_ATTEMPTS = 3  # writes that conflict with those of another process


@dataclasses.dataclass(frozen=True)
class Signer:
    """The CA that signs now, and the bundle of all trusted ones.

    Attributes:
        anchors: digest of `bundle`.
    """

    pair: Pair
    bundle: str
    anchors: str


class Authority:
    """The operator's CAs. All services of the process share it.

    Args:
        cluster: client that is fenced by the lease.
        namespace: the operator's.
        name: name of the Secret.
        leaf_seconds: life of the certificates that it signs.
        authority_seconds: life of a CA.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        name: str,
        leaf_seconds: float = LEAF_SECONDS,
        authority_seconds: float = AUTHORITY_SECONDS,
    ) -> None:
        self.leaf_seconds = leaf_seconds
        self._authority_seconds = authority_seconds
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._lock = asyncio.Lock()
        self._pairs: dict[str, Pair] = {}
        self._version: str | None = None  # resourceVersion; None if the Secret does not exist
        self._read_at = float("-inf")

    async def signer(self, *, now: float) -> Signer:
        """Return the CA that signs now; create or rotate it if that is due.

        Raises:
            IdentityError: the Secret is not readable, or the API server refused a call.
            ClusterError: the API server is unreachable.
        """
        async with self._lock:
            for _ in range(_ATTEMPTS):
                if not 0 <= now - self._read_at < READ_SECONDS:
                    await self._read(now=now)
                plan = self._plan(now)
                if not plan.create and self._version is not None:
                    return self._signer(plan)
                try:
                    await self._write(plan, now=now)
                except ConflictError:
                    self._read_at = float("-inf")  # another process wrote it: use that CA
            raise IdentityError(f"Secret {self._where}: other processes write it: stop them")

    @property
    def _where(self) -> str:
        return f"{self._namespace}/{self._name}"

    def _plan(self, now: float) -> AuthorityPlan:
        validities = [pair.validity for pair in self._pairs.values()]
        return plan_authorities(validities, leaf_seconds=self.leaf_seconds, now=now)

    def _signer(self, plan: AuthorityPlan) -> Signer:
        assert plan.signing is not None, "a plan without a CA creates one"
        bundle = "".join(self._pairs[serial].certificate for serial in plan.trusted)
        return Signer(self._pairs[plan.signing], bundle, digest(bundle))

    async def _read(self, *, now: float) -> None:
        try:
            live = await self._cluster.get(SECRET, self._namespace, self._name)
        except ClusterError as error:
            if error.status == 403:
                raise IdentityError(f"Secret {self._where}: {error}: grant get") from error
            raise
        if live is not None:
            self._pairs = self._parsed(live)
        self._version = None if live is None else live["metadata"]["resourceVersion"]
        self._read_at = now

    def _parsed(self, live: Manifest) -> dict[str, Pair]:
        data = {
            key: base64.b64decode(value).decode() for key, value in (live.get("data") or {}).items()
        }
        serials = [key.removesuffix(".crt") for key in data if key.endswith(".crt")]
        try:
            return {
                serial: load(data[f"{serial}.crt"], data[f"{serial}.key"]) for serial in serials
            }
        except (KeyError, ValueError) as error:
            fix = "restore it, or delete it so that the operator creates another CA"
            raise IdentityError(f"Secret {self._where}: no CA: {error}: {fix}") from error

    async def _write(self, plan: AuthorityPlan, *, now: float) -> None:
        """Write the trusted CAs, and a new one if it is due."""
        kept = {serial: self._pairs[serial] for serial in plan.trusted}
        if plan.create:
            fresh = new_authority(seconds=self._authority_seconds, now=now)
            kept[fresh.validity.serial] = fresh
        manifest = self._manifest(kept)
        try:
            if self._version is None:
                answer = await self._cluster.create(manifest)
            else:
                manifest["metadata"]["resourceVersion"] = self._version
                answer = await self._cluster.replace(manifest)
        except ClusterError as error:
            if error.status == 403:
                fix = "grant create and update"
                raise IdentityError(f"Secret {self._where}: {error}: {fix}") from error
            raise
        self._pairs, self._version = kept, answer["metadata"]["resourceVersion"]
        self._read_at = now
        logger.info("CA written", extra={"secret": self._where, "serials": sorted(kept)})

    def _manifest(self, pairs: dict[str, Pair]) -> Manifest:
        files = {f"{serial}.crt": pair.certificate for serial, pair in pairs.items()}
        files |= {f"{serial}.key": pair.key for serial, pair in pairs.items()}
        return {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.kind,
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "labels": {names.LABEL_APP_MANAGED_BY: names.MANAGER},
            },
            "type": "Opaque",
            "data": encoded(files),
        }


def encoded(files: dict[str, str]) -> dict[str, str]:
    """Return texts as `data` of a Secret."""
    return {key: base64.b64encode(text.encode()).decode() for key, text in files.items()}
