"""One request being worked on, and the moves that it may make.

WAITING ----> RUNNING <---- RECEIVING        (decode side: blocks come from a peer)
   ^            |  ^
   +--preempted-+  +-adopted-+
                |            |
                +--> HELD ---+               (prefill is done; KV is kept for a peer)
all of them --> FINISHED
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from vlm_worker.core.prefix import extend_chain
from vlm_worker.types import ImageItem, Request

MIN_PRIORITY: Final = -(2**31)


class Lane(enum.StrEnum):
    """Which of two queues a sequence waits in, if it waits."""

    TEXT = "text"
    VISION = "vision"


class Status(enum.Enum):
    """Where a sequence stands."""

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
    """Everything about a request that no step needs in an array. The scheduler is its writer.

    While it has a `row` in the SequenceTable, the table owns its tokens and counts; the fields here
    are what they were when it last left.

    Attributes:
        request: what came in.
        arrival: smaller is older; at equal priority, the youngest is preempted first.
        arrived_at: when that was, in seconds on the engine's clock.
        lane: VISION if a picture was neither on hand nor covered by a prefix hit at its arrival.
        token_ids: int32, all known tokens, prompt and answer.
        positions: `[P, T]` of the prompt; a later token i stands at i + `position_delta`.
        hold: keep the KV for a peer after the first token. Such a sequence is not preempted.
        blocks: its KV blocks, in order.
        hashes: the hash chain of its full blocks.
        promised: blocks that a reservation set aside for it: its whole prompt's, or none.
        claim: blocks that its pictures are asked for with while it waits, see `claims`; or None.
        embeddings: per item, the encoder output that is on hand for it.
        raised_priority: of those who ran when it entered by its age; it is preempted by this.
        overtaken: how often another was admitted before it for want of blocks or budget.
        on_wake: told when it is stalled no more; the queue's own.
        sink: the engine's own; opaque here.
    """

    request: Request
    arrival: int
    token_ids: np.ndarray
    positions: np.ndarray
    position_delta: int
    arrived_at: float = 0.0
    lane: Lane = Lane.TEXT
    hold: bool = False
    status: Status = Status.WAITING
    row: int | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    promised: int = 0
    claim: int | None = None
    embeddings: list[Any] = dataclasses.field(default_factory=list)
    raised_priority: int = MIN_PRIORITY
    overtaken: int = 0
    on_wake: Callable[[Sequence], None] | None = None
    sink: Any = None
    _stalled: bool = dataclasses.field(default=False, init=False)

    @property
    def items(self) -> tuple[ImageItem, ...]:
        """Its pictures."""
        return self.request.items

    @property
    def priority(self) -> int:
        """A larger one goes first."""
        return self.request.priority

    @property
    def stalled(self) -> bool:
        """Whether it waits for an embedding: nobody looks at it until `wake`."""
        return self._stalled

    @property
    def asleep(self) -> bool:
        """Whether it waits to be allowed to ask for an embedding."""
        return self._stalled and self.row is None and self.claim is None

    @property
    def may_pin(self) -> bool:
        """Whether embeddings may be held for it: it has blocks, or a claim to some."""
        return self.row is not None or self.claim is not None

    @property
    def num_tokens(self) -> int:
        """Known tokens, as of when it last left the table."""
        return len(self.token_ids)

    def move(self, status: Status) -> None:
        """Change the status along the table of transitions."""
        assert status in TRANSITIONS[self.status], (
            f"{self.request.key}: no way from {self.status.value} to {status.value}"
        )
        self.status = status

    def stall(self) -> None:
        """Let it wait for an embedding, or to be allowed to ask for one."""
        self._stalled = True

    def wake(self) -> None:
        """Let it be looked at again, if it is stalled: what it waited for is here, or never is."""
        if self._stalled:
            self._stalled = False
            if self.on_wake is not None:
                self.on_wake(self)

    def extend_hashes(self, token_ids: np.ndarray, *, num_tokens: int, block_size: int) -> None:
        """Let `hashes` cover every full block of the first `num_tokens`."""
        extend_chain(
            self.hashes,
            token_ids,
            self.items,
            cache_salt=self.request.cache_salt,
            adapter=self.request.adapter,
            block_size=block_size,
            num_tokens=num_tokens,
        )
