"""Bearer keys: who calls. The tenant is the name of the file that holds the key.

key ─┬─ SHA-256 ─▶ compared with what a client sends
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
    """What is kept of one bearer key.

    Attributes:
        tenant: whose it is.
        digest: what a key that a client sends is compared with.
        secret: what the tenant's cache salt is derived from; it cannot be had from the digest.
    """

    tenant: str
    digest: bytes
    secret: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """All keys, by tenant. None at the gateway means: no key is needed."""

    by_tenant: tuple[Key, ...]

    def tenant_of(self, authorization: str | None) -> str | None:
        """The tenant of an `Authorization` header, None where it holds no known key.

        Every key is compared, each in constant time: the time says nothing about the keys.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        found = None
        for known in self.by_tenant:
            if hmac.compare_digest(known.digest, digest):
                found = known.tenant
        return found if scheme.lower() == "bearer" and key.strip() else None

    def secret_of(self, tenant: str) -> bytes | None:
        """What a tenant's salt is derived from; None if it has no key."""
        return next((key.secret for key in self.by_tenant if key.tenant == tenant), None)


class Salts:
    """The cache salts of one gateway process; `keys` gives the keys that hold now.

    A tenant with a key has the same salt at every gateway that holds the key. All others have one
    that this process has drawn, so that what they cached is found through this process alone.
    """

    def __init__(self, served_name: str, keys: Callable[[], Keys | None]) -> None:
        self._served_name = served_name
        self._keys = keys
        self._secret = secrets.token_bytes(SECRET_BYTES)

    def of(self, tenant: str) -> bytes:
        """32 bytes that keep a tenant's cache entries from another's."""
        keys = self._keys()
        secret = None if keys is None else keys.secret_of(tenant)
        return cache_salt(secret or self._secret, self._served_name, tenant)


def load_keys(directory: Path) -> Keys:
    """Read a mounted Secret. Files that are hidden, empty or oversized hold no key."""
    keys = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        key = path.read_bytes()[: MAX_KEY_BYTES + 1].strip()
        if 0 < len(key) <= MAX_KEY_BYTES:
            keys.append(Key(path.name, _digest(key), _secret(key)))
        else:
            logger.warning("a file holds no usable key", extra={"tenant": path.name})
    return Keys(tuple(keys))


def cache_salt(secret: bytes, served_name: str, tenant: str) -> bytes:
    """32 bytes that nobody can compute without the secret; every field is framed."""
    framed = b"".join(
        len(part).to_bytes(4, "little") + part
        for part in (b"triptych/cache-salt/2", served_name.encode(), tenant.encode())
    )
    return hmac.digest(secret, framed, "sha256")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _secret(key: bytes) -> bytes:
    return hmac.digest(key, b"triptych/cache-salt-secret/1", "sha256")
