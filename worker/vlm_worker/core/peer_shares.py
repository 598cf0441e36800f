"""Limits the KV that one peer reserves, so that no peer reserves all of it. Pure.

Laws (tests/worker/core/test_peer_shares.py):

    S1  the first reservation of a peer is admitted, whatever its size
    S2  further reservations of a peer leave an eighth of the capacity to the others
    S3  a reservation that ended is not counted
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

OTHERS_SHARE: Final = 8
"""1 / OTHERS_SHARE of the capacity is left for other peers."""


class PeerShares:
    """Tokens of the reservations that no request has used yet, by peer."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, int]] = {}

    def of(self, peer: str) -> int:
        """Tokens that a peer has reserved."""
        return sum(num_tokens for owner, num_tokens in self._held.values() if owner == peer)

    def admits(self, peer: str, num_tokens: int, *, capacity: int) -> bool:
        """Whether a peer may reserve `num_tokens` more of `capacity` tokens."""
        held = self.of(peer)
        return not held or held + num_tokens <= capacity - capacity // OTHERS_SHARE

    def add(self, reservation_id: str, peer: str, num_tokens: int) -> None:
        """Count a granted reservation."""
        self._held[reservation_id] = (peer, num_tokens)

    def keep(self, lives: Callable[[str], bool]) -> None:
        """Forget reservations that ended; `lives` returns whether an id still exists."""
        self._held = {one: held for one, held in self._held.items() if lives(one)}
