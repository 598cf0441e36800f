"""Authenticates bearer keys. A tenant is the name of the file that contains its key.

key ─┬─ SHA-256 ─▶ compared with the digest of a client's key
     └─ HMAC ────▶ secret ─ HMAC(model, tenant) ─▶ the tenant's cache salt (decision 0027)
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
MAX_KEY_BYTES = 4096
SECRET_BYTES = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The stored part of one bearer key.

    Attributes:
        tenant: the tenant that owns the key.
        digest: SHA-256 of the key, 32 bytes.
        secret: input of the tenant's cache salt, 32 bytes; not derivable from the digest.
    """

    tenant: str
    digest: bytes
    secret: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKeys:
    """All keys. If the gateway has None instead of this object, requests need no key."""

    by_tenant: tuple[Key, ...]

    def tenant_of(self, authorization: str | None) -> str | None:
        """Return the tenant of an `Authorization` header; None if it contains no known key.

        All keys are compared, each in constant time, so that the duration reveals no key.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        found = None
        for known in self.by_tenant:
            if hmac.compare_digest(known.digest, digest):
                found = known.tenant
        return found if scheme.lower() == "bearer" and key.strip() else None

    def secret_of(self, tenant: str) -> bytes | None:
        """Return the input of a tenant's salt; None if the tenant has no key."""
        return next((key.secret for key in self.by_tenant if key.tenant == tenant), None)


class Salts:
    """The cache salts of one gateway process; `keys` returns the keys that are valid now.

    A tenant with a key has the same salt at every gateway that has the key. The salt of any other
    tenant derives from a random secret of this process. Only requests through this process can hit
    its cache entries.
    """

    def __init__(self, served_name: str, keys: Callable[[], ApiKeys | None]) -> None:
        self._served_name = served_name
        self._keys = keys
        self._secret = secrets.token_bytes(SECRET_BYTES)

    def of(self, tenant: str) -> bytes:
        """Return the salt, 32 bytes, that separates a tenant's cache entries from all others."""
        keys = self._keys()
        secret = None if keys is None else keys.secret_of(tenant)
        return cache_salt(secret or self._secret, self._served_name, tenant)


def load_keys(directory: Path) -> ApiKeys:
    """Read a mounted Secret. Hidden, empty and oversized files are skipped."""
    keys = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        key = path.read_bytes()[: MAX_KEY_BYTES + 1].strip()
        if 0 < len(key) <= MAX_KEY_BYTES:
            keys.append(Key(path.name, _digest(key), _secret(key)))
        else:
            logger.warning("a file holds no usable key", extra={"tenant": path.name})
    return ApiKeys(tuple(keys))


def cache_salt(secret: bytes, served_name: str, tenant: str) -> bytes:
    """Return 32 bytes: HMAC-SHA-256 over the fields, each after its length.

    Without the secret the salt cannot be computed.
    """
    framed = b"".join(
        len(part).to_bytes(4, "little") + part
        for part in (b"triptych/cache-salt/2", served_name.encode(), tenant.encode())
    )
    return hmac.digest(secret, framed, "sha256")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _secret(key: bytes) -> bytes:
    return hmac.digest(key, b"triptych/cache-salt-secret/1", "sha256")
