"""States of an image's windows before the tower's first full layer, by content. Pure.

    key   sha256(model, salt of the tenant, level and shape, patches)
    full  the entry of least relevance * (1 + uses) / bytes leaves; uses halve each TTL

Positions in a window layer are relative, so a window's state depends on its pixels alone. Equal
windows of any images share it: the still part of a screen, a letterhead, a blank margin.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
from typing import Any, Final

import numpy as np

UNKNOWN: Final = 1.0
"""The relevance of a window whose pixels were not scored."""


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    key: bytes
    state: Any
    num_bytes: int
    relevance: float
    uses: int = 0

    @property
    def value(self) -> float:
        """What a byte of it is worth."""
        return self.relevance * (1 + self.uses) / self.num_bytes


class WindowCache:
    """States by key, at most `max_bytes` of them. Time is an argument; one thread calls it.

    Any thread may read the counts.
    """

    def __init__(self, *, max_bytes: int, ttl_seconds: float) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._ttl_seconds = ttl_seconds
        self._halved = 0.0
        self._entries: dict[bytes, _Entry] = {}
        self._order: list[tuple[float, int, _Entry]] = []  # values when pushed; uses only add
        self._num_pushed = 0

    def get(self, key: bytes, *, now: float) -> Any:
        """The state of a key, and count its use; None if it is not cached."""
        self._halve(now)
        entry = self._entries.get(key)
        if entry is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        entry.uses += 1
        return entry.state

    def put(self, key: bytes, state: Any, *, num_bytes: int, relevance: float, now: float) -> None:
        """Cache a state, and evict those of less value until all fit; it may be one of these."""
        self._halve(now)
        if key in self._entries or num_bytes > self.max_bytes:
            return
        entry = self._entries[key] = _Entry(key, state, num_bytes, relevance)
        self.num_bytes += num_bytes
        self._push(entry)
        while self.num_bytes > self.max_bytes:
            value, _, least = heapq.heappop(self._order)
            if least.value > value:  # it was used since
                self._push(least)
                continue
            del self._entries[least.key]
            self.num_bytes -= least.num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def _push(self, entry: _Entry) -> None:
        self._num_pushed += 1
        heapq.heappush(self._order, (entry.value, self._num_pushed, entry))

    def _halve(self, now: float) -> None:
        """Halve the uses once for each TTL that has passed; the time begins with the first call."""
        if not self._entries:
            self._halved = now
        times = int((now - self._halved) // self._ttl_seconds)
        if times < 1:
            return
        self._halved += times * self._ttl_seconds
        self._order.clear()
        for entry in self._entries.values():
            entry.uses >>= min(times, 62)
            self._push(entry)


def window_key(
    model: bytes, salt: bytes, level: int, shape: tuple[int, int], patches: np.ndarray
) -> bytes:
    """The key of a window of `shape` tokens at a level.

    `model` is the fingerprint of weights and arithmetic, `patches` C-contiguous, in order.
    """
    digest = hashlib.sha256(b"triptych.window/1")
    for part in (model, salt, repr((level, shape)).encode(), patches.data.cast("B")):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
