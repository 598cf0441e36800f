"""Accounts for the memory of requests in a gateway, before it is allocated. Pure.

Content-Length ─ admit ─▶ body ─ decode ─▶ body and its values ─ prepared ─▶ prompt ─ answered ─▶ 0
                   └────────────────┴─ 429: the gateway's or the tenant's limit is reached

`declare` adds the other memory of the process.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from typing import Final

from vlm_worker.core.process_memory import ProcessMemory
from vlm_worker.errors import OverloadedError
from vlm_worker.settings.values import MIN_MEMORY_BYTES

COPIES: Final = 2
"""Copies of a body in memory: the body itself, and the images and texts decoded from it."""
CHARACTER_BYTES: Final = 5
"""Memory for each byte of JSON text, temporary copies included. A decoded string takes four bytes a
character if it contains a wide one."""
VALUE_BYTES: Final = 512
"""Memory of a decoded JSON value, sized for an object with one key, and of its parsed form."""
TENANT_SHARE: Final = 0.5
"""Share of the budget that one tenant may use, if several tenants have keys."""
CONNECTION_BYTES: Final = 320 << 10
"""Memory of a client connection: two request heads, read-ahead and an unsent answer (64 KiB each),
and the objects of the request that is served."""
TLS_BYTES: Final = 448 << 10
"""More memory of a connection with TLS: asyncio's read buffer of 256 KiB, two buffers of OpenSSL
(17 KiB each) and up to 128 KiB that are encrypted and not sent."""
RETRY_AFTER_SECONDS: Final = 1.0


class Kind(enum.StrEnum):
    """Use of the bytes: bodies in preparation; what prepared requests hold until they end."""

    BODY = "body"
    PROMPT = "prompt"


class Bound(enum.StrEnum):
    """The limit that rejected a request."""

    MEMORY = "memory"
    TENANT_MEMORY = "tenant_memory"
    WAITING = "waiting"
    TENANT_CHECKS = "tenant_checks"
    TENANT_FETCHES = "tenant_fetches"
    CONNECTIONS = "connections"


class FullError(OverloadedError):
    """A limit of this gateway, `bound`, is reached. The message is fit for the client."""

    def __init__(self, message: str, bound: Bound) -> None:
        super().__init__(message, retry_after_seconds=RETRY_AFTER_SECONDS)
        self.bound = bound


class MemoryBudget:
    """The memory of all requests of one gateway, in bytes. Only `MemoryReservation` writes it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._of_kind: Counter[Kind] = Counter()
        self._of_tenant: Counter[str] = Counter()

    def used_by(self, tenant: str) -> int:
        return self._of_tenant[tenant]

    def used(self, kind: Kind) -> int:
        return self._of_kind[kind]

    @property
    def used_in_all(self) -> int:
        return self._of_kind.total()

    def hold(self, tenant: str, *, shared: bool) -> MemoryReservation:
        """Start the account of one request, at 0 bytes. `shared`: several tenants have keys."""
        limit = int(self.num_bytes * TENANT_SHARE) if shared else self.num_bytes
        return MemoryReservation(self, tenant, limit)

    def check(self, tenant: str, num_additional: int, limit: int) -> None:
        """Raise FullError if `num_additional` bytes of a tenant would exceed a limit."""
        if self._of_tenant[tenant] + num_additional > limit < self.num_bytes:
            raise FullError(
                f"Your requests hold {self._of_tenant[tenant]} of the {limit} bytes that one "
                "tenant may hold in this gateway: send fewer images at once.",
                Bound.TENANT_MEMORY,
            )
        if self.used_in_all + num_additional > self.num_bytes:
            raise FullError(
                f"The requests in this gateway hold {self.used_in_all} of {self.num_bytes} bytes, "
                "too many for this one now.",
                Bound.MEMORY,
            )

    def move(self, tenant: str, kind: Kind, num_bytes: int) -> None:
        """Add `num_bytes`, which may be negative, to a tenant and a kind."""
        self._of_kind[kind] += num_bytes
        self._of_tenant[tenant] += num_bytes
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]


class MemoryReservation:
    """The account of one request, until `release`."""

    def __init__(self, budget: MemoryBudget, tenant: str, limit: int) -> None:
        self._budget = budget
        self._tenant = tenant
        self._limit = limit
        self._kind = Kind.BODY
        self.num_bytes = 0

    def admit(self, num_body_bytes: int) -> None:
        """Raise the account to a body of `num_body_bytes`, with its copies.

        Raises:
            FullError: a limit is reached; the account is unchanged.
        """
        num_bytes = COPIES * num_body_bytes
        if num_bytes > self.num_bytes:
            self._budget.check(self._tenant, num_bytes - self.num_bytes, self._limit)
            self._set(Kind.BODY, num_bytes)

    def decode(self, num_text_bytes: int, num_values: int) -> None:
        """Add the decoded form of a body's JSON without its images, before it is decoded.

        Raises as `add` does.
        """
        self.add(CHARACTER_BYTES * num_text_bytes + VALUE_BYTES * num_values)

    def add(self, num_bytes: int) -> None:
        """Add bytes before they are allocated.

        If the tenant has no other request here, only the limit of the gateway applies. So a single
        request of a tenant proceeds.

        Raises:
            FullError: a limit is reached; the account is unchanged.
        """
        is_alone = self._budget.used_by(self._tenant) == self.num_bytes
        limit = self._budget.num_bytes if is_alone else self._limit
        self._budget.check(self._tenant, num_bytes, limit)
        self._set(Kind.BODY, self.num_bytes + num_bytes)

    def fetch(self, num_bytes: int) -> None:
        """Add bytes of an image that is fetched, before they are kept.

        Raises:
            FullError: a limit is reached; the account is unchanged.
        """
        self._budget.check(self._tenant, num_bytes, self._limit)
        self._set(Kind.BODY, self.num_bytes + num_bytes)

    def prepared(self, num_prompt_bytes: int) -> None:
        """Reduce the account to what a running request holds, once the body is freed."""
        self._set(Kind.PROMPT, min(num_prompt_bytes, self.num_bytes))

    def release(self) -> None:
        """Set the account to 0; idempotent."""
        self._set(self._kind, 0)

    def _set(self, kind: Kind, num_bytes: int) -> None:
        self._budget.move(self._tenant, self._kind, -self.num_bytes)
        self._budget.move(self._tenant, kind, num_bytes)
        self._kind, self.num_bytes = kind, num_bytes


def connection_bytes(num_connections: int, *, tls: bool = False) -> int:
    """Return the memory of connections, without the bodies of their requests."""
    return (CONNECTION_BYTES + tls * TLS_BYTES) * num_connections


def declare(
    num_request_bytes: int,
    num_connections: int,
    *,
    tls: bool = False,
    resident_bytes: int,
    kept_bytes: int,
    limit_bytes: int | None,
) -> ProcessMemory:
    """Return the memory that a gateway's process may use, by part.

    `resident_bytes` is its resident memory when it is ready. `kept_bytes` are freed memory that
    malloc keeps, messages to workers, and what the gateway knows of their caches.

    Requests get `num_request_bytes`, or less if the container's `limit_bytes` leave less, but at
    least 128 MiB. So the sum may exceed a limit that is too small for a gateway.
    """
    rest = ProcessMemory(
        connections=connection_bytes(num_connections, tls=tls),
        process=resident_bytes,
        kept=kept_bytes,
    )
    if limit_bytes is not None:
        num_request_bytes = min(num_request_bytes, max(limit_bytes - rest.total, MIN_MEMORY_BYTES))
    return dataclasses.replace(rest, requests=num_request_bytes)
