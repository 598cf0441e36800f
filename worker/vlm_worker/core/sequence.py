"""The state of one request in the engine, and its transitions.

WAITING ----> RUNNING <---- RECEIVING        (decode side: blocks are received from a peer)
   ^            |  ^
   +--preempted-+  +-adopted-+
                |            |
                +--> HELD ---+               (prefill is complete; KV is kept for a peer)
all of them --> FINISHED
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from vlm_worker.core.block_kinds import BlockShape
from vlm_worker.core.fair_order import Rank
from vlm_worker.core.grammars import Matcher
from vlm_worker.types import ImageItem, Request

MIN_PRIORITY: Final = -(2**31)


class Lane(enum.StrEnum):
    """The queue in which a sequence waits."""

    TEXT = "text"
    VISION = "vision"


class Status(enum.Enum):
    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


TRANSITIONS: Final[Mapping[Status, frozenset[Status]]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RECEIVING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.HELD, Status.FINISHED}),
    Status.HELD: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """The fields of a request that no step needs as an array. Only the scheduler writes them.

    While the sequence has a `row`, the PersistentBatch owns its tokens and counts. The fields here
    then have the values of when it last left the batch.

    Attributes:
        arrival: smaller is older; at equal priority, the youngest is preempted first.
        arrived_at: seconds on the engine's clock.
        lane: VISION if an image was neither cached nor covered by a prefix hit at arrival.
        token_ids: int32, all known tokens, prompt and answer.
        positions: `[P, T]` of the prompt; a later token i has position i + `position_delta`.
        for_peer: keep the KV for a peer after the first token. It is not preempted.
        whole_prompt: the tokens of the prompt see each other both ways, so it runs in one chunk.
        kept_permille: the share of its history's text that keeps its KV after the prompt; 0 if it
            is not pruned (`pruning`).
        num_dropped: tokens whose KV was dropped; the slot of a later token is its index less them.
        needs_own_blocks: it was preempted because it could not copy the blocks that it shared; from
            then on it hits no block that another sequence uses.
        block_shape: the tokens of each of its blocks; `BlockKinds.of` computes it.
        hashes: the hash chain of its full blocks.
        reserved_blocks: number of blocks reserved for it: those of its whole prompt, or 0.
        soft_reserved_blocks: blocks of its soft reservation (`admission`), or None.
        pending_blocks: blocks that a peer has not read (`PendingKVTransfers`).
        embeddings: per item, its encoder output if it is here, or None.
        aged_priority: the top running priority when it was admitted by age; used for preemption.
        virtual_start: the start of its flow (`fair_order`) when it was first admitted, which it
            keeps when it is preempted; negative before.
        num_bypassed: sequences admitted before it because it lacked blocks or budget.
        is_blocked: it waits for an embedding, or for permission to request one; it is not examined
            until `unblock`.
        on_unblock: callback of the queue, called by `unblock`.
        matcher: of its grammar, or None.
        num_scored: positions of the prompt whose logits gave a log-probability to the caller, in
            order; of `num_to_score`.
        output: belongs to the engine; opaque here.
    """

    request: Request
    arrival: int
    token_ids: np.ndarray
    positions: np.ndarray
    position_delta: int
    arrived_at: float = 0.0
    lane: Lane = Lane.TEXT
    for_peer: bool = False
    status: Status = Status.WAITING
    row: int | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    whole_prompt: bool = False
    kept_permille: int = 0
    num_dropped: int = 0
    needs_own_blocks: bool = False
    blocks: list[int] = dataclasses.field(default_factory=list)
    block_shape: BlockShape | None = None
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    reserved_blocks: int = 0
    soft_reserved_blocks: int | None = None
    pending_blocks: int = 0
    embeddings: list[Any] = dataclasses.field(default_factory=list)
    aged_priority: int = MIN_PRIORITY
    virtual_start: float = -1.0
    num_bypassed: int = 0
    is_blocked: bool = False
    on_unblock: Callable[[Sequence], None] | None = None
    matcher: Matcher | None = None
    num_scored: int = 0
    output: Any = None

    @property
    def items(self) -> tuple[ImageItem, ...]:
        return self.request.items

    @property
    def priority(self) -> int:
        """A larger priority goes first."""
        return self.request.priority

    @property
    def rank(self) -> Rank:
        """What orders it among waiting sequences."""
        request = self.request
        return Rank(request.priority, request.cache_salt, request.weighted_seconds)

    @property
    def is_blocked_on_encoder(self) -> bool:
        """Whether it waits for permission to request embeddings."""
        return self.is_blocked and self.row is None and self.soft_reserved_blocks is None

    @property
    def can_pin_embeddings(self) -> bool:
        """Whether embeddings may be pinned for it: it has blocks or a soft reservation."""
        return self.row is not None or self.soft_reserved_blocks is not None

    @property
    def num_tokens(self) -> int:
        """As of when it last left the batch."""
        return len(self.token_ids)

    def spans(self, *, whole_images: bool) -> tuple[tuple[int, int], ...]:
        """Ranges of tokens that see each other both ways; with `whole_images`, its images."""
        if self.whole_prompt:
            return ((0, self.request.num_prompt_tokens),)
        return tuple((item.offset, item.end) for item in self.items) if whole_images else ()

    @property
    def awaits_pruning(self) -> bool:
        """Whether it is pruned after its prompt, and was not yet: it computes no answer token."""
        return self.kept_permille > 0 and not self.num_dropped

    @property
    def num_computable_tokens(self) -> int:
        """Tokens that it may compute now, those with KV included."""
        return self.request.num_prompt_tokens if self.awaits_pruning else self.num_tokens

    @property
    def num_to_score(self) -> int:
        """Positions of the prompt whose logits the caller wants: all but the last, or none.

        The logits of position i have the log-probability of token i + 1.
        """
        wants = self.request.sampling.num_prompt_logprobs is not None
        return self.request.num_prompt_tokens - 1 if wants else 0

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that a prefix hit may cover: a token is left to compute (K4).

        A position that is not scored yet is computed, because cached KV has no logits.
        """
        num_tokens = self.num_computable_tokens - 1
        is_scored = self.num_scored >= self.num_to_score
        return num_tokens if is_scored else min(num_tokens, self.num_scored)

    def move(self, status: Status) -> None:
        """Change the status; TRANSITIONS must allow it."""
        assert status in TRANSITIONS[self.status], (
            f"{self.request.key}: no transition from {self.status.value} to {status.value}"
        )
        self.status = status

    def unblock(self) -> None:
        """End the wait: the embedding arrived, or never will."""
        if self.is_blocked:
            self.is_blocked = False
            if self.on_unblock is not None:
                self.on_unblock(self)
