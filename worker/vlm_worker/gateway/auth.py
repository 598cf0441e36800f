"""Bearer keys: who calls. The tenant is the name of the file that holds the key."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
MAX_KEY_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The digests of all keys, by tenant. None at the gateway means: no key is needed."""

    by_tenant: tuple[tuple[str, bytes], ...]

    def tenant_of(self, authorization: str | None) -> str | None:
        """The tenant of an `Authorization` header, None where it holds no known key.

        Every key is compared, each in constant time: the time says nothing about the keys.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        found = None
        for tenant, known in self.by_tenant:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found if scheme.lower() == "bearer" and key.strip() else None


def load_keys(directory: Path) -> Keys:
    """Read a mounted Secret. Files that are hidden, empty or oversized hold no key."""
    keys = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        key = path.read_bytes()[: MAX_KEY_BYTES + 1].strip()
        if 0 < len(key) <= MAX_KEY_BYTES:
            keys.append((path.name, _digest(key)))
        else:
            logger.warning("a file holds no usable key", extra={"tenant": path.name})
    return Keys(tuple(keys))


def cache_salt(served_name: str, tenant: str) -> bytes:
    """32 bytes that keep one tenant's cache entries from another's; alike on every gateway."""
    framed = b"".join(
        len(part).to_bytes(4, "little") + part
        for part in (b"triptych/cache-salt/1", served_name.encode(), tenant.encode())
    )
    return hashlib.sha256(framed).digest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
