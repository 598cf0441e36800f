"""The bytes that requests may hold in a gateway, reserved before they are read. Pure.

Content-Length ─ admit ─▶ body, and what is decoded of it ─ prepared ─▶ prompt ─ answered ─▶ 0
                   └─ 429: the gateway, or the tenant, holds too much already
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Final

from vlm_worker.errors import OverloadedError

COPIES: Final = 2
"""Of a body while it is read and prepared: itself, and the images and texts that are made of it."""
TENANT_SHARE: Final = 0.5
"""Of the budget for one tenant, if there are several."""
RETRY_AFTER_SECONDS: Final = 1.0


class Kind(enum.StrEnum):
    """What the bytes are: bodies being read and prepared, images and texts being answered."""

    BODY = "body"
    PROMPT = "prompt"


class Bound(enum.StrEnum):
    """What refused a request."""

    MEMORY = "memory"
    TENANT_MEMORY = "tenant_memory"
    WAITING = "waiting"
    CONNECTIONS = "connections"


class FullError(OverloadedError):
    """A bound of this gateway is reached; `bound` says which, the message is for the client."""

    def __init__(self, message: str, bound: Bound) -> None:
        super().__init__(message, retry_after_seconds=RETRY_AFTER_SECONDS)
        self.bound = bound


class MemoryBudget:
    """The bytes of one gateway. `Held` is its only writer."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._of_kind: Counter[Kind] = Counter()
        self._of_tenant: Counter[str] = Counter()

    def used(self, kind: Kind) -> int:
        """Bytes of a kind that requests hold now."""
        return self._of_kind[kind]

    @property
    def used_in_all(self) -> int:
        """Bytes that requests hold now."""
        return self._of_kind.total()

    def hold(self, tenant: str, *, shared: bool) -> Held:
        """What one request will hold, nothing yet; `shared`: there are several tenants."""
        limit = int(self.num_bytes * TENANT_SHARE) if shared else self.num_bytes
        return Held(self, tenant, limit)

    def check(self, tenant: str, num_more: int, limit: int) -> None:
        """Raise FullError if so many more bytes of a tenant exceed a bound."""
        if self._of_tenant[tenant] + num_more > limit < self.num_bytes:
            raise FullError(
                f"Your requests hold {self._of_tenant[tenant]} of the {limit} bytes that one "
                "tenant may hold in this gateway: send fewer images at once.",
                Bound.TENANT_MEMORY,
            )
        if self.used_in_all + num_more > self.num_bytes:
            raise FullError(
                f"The requests in this gateway hold {self.used_in_all} of {self.num_bytes} bytes, "
                "too many for this one now.",
                Bound.MEMORY,
            )

    def move(self, tenant: str, kind: Kind, num_bytes: int) -> None:
        """Add bytes of a tenant and kind, or take them off."""
        self._of_kind[kind] += num_bytes
        self._of_tenant[tenant] += num_bytes
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]


class Held:
    """What one request holds, until `release`."""

    def __init__(self, budget: MemoryBudget, tenant: str, limit: int) -> None:
        self._budget = budget
        self._tenant = tenant
        self._limit = limit
        self._kind = Kind.BODY
        self.num_bytes = 0

    def admit(self, num_body_bytes: int) -> None:
        """Hold a body of so many bytes in all, with its copies.

        Raises:
            FullError: what is held stays as it was.
        """
        wanted = COPIES * num_body_bytes
        if wanted > self.num_bytes:
            self._budget.check(self._tenant, wanted - self.num_bytes, self._limit)
            self._set(Kind.BODY, wanted)

    def prepared(self, num_prompt_bytes: int) -> None:
        """The body is gone; its images and texts, which were admitted with it, stay."""
        self._set(Kind.PROMPT, min(num_prompt_bytes, self.num_bytes))

    def release(self) -> None:
        """Give everything back; idempotent."""
        self._set(self._kind, 0)

    def _set(self, kind: Kind, num_bytes: int) -> None:
        self._budget.move(self._tenant, self._kind, -self.num_bytes)
        self._budget.move(self._tenant, kind, num_bytes)
        self._kind, self.num_bytes = kind, num_bytes
