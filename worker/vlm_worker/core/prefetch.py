"""What a prefetch computes, and how it ends. Pure.

A prefetch computes the beginning of a prompt that a client will probably send, while nothing else
runs. Its whole blocks stay in the prefix cache. It answers no token and has no queue, so it never
waits before a request (`engine.prefetches`).

    prompt   |b b b b|b b b b|b b . .      whole blocks only: a hit covers no others
    image            ^^^^^^^^^^^^          a block that ends inside an image is left out
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated

from vlm_worker.annotations import MAX_TOKENS, Between
from vlm_worker.types import Request, SamplingParams


class PrefetchOutcome(enum.StrEnum):
    """How a prefetch ended on a worker.

    COMPUTED: all its blocks are cached, some newly. CACHED: they were cached before. YIELDED: a
    request came; blocks of complete chunks stay cached. BUSY: a request or another prefetch is
    here. NO_EMBEDDING: an image of it is in no cache. NO_BLOCKS: its KV does not fit beside
    reservations. FAILED: a step failed.
    """

    COMPUTED = "computed"
    CACHED = "cached"
    YIELDED = "yielded"
    BUSY = "busy"
    NO_EMBEDDING = "no_embedding"
    NO_BLOCKS = "no_blocks"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class PrefetchResult:
    """The end of a prefetch: tokens that were cached before, and tokens that it computed."""

    outcome: PrefetchOutcome
    num_cached_tokens: Annotated[int, Between(0, MAX_TOKENS)] = 0
    num_computed_tokens: Annotated[int, Between(0, MAX_TOKENS)] = 0


def whole_blocks(request: Request, *, block_size: int) -> Request | None:
    """The request cut to the whole blocks that it shares with every continuation; None if none.

    The cut is before an image that does not end within these blocks.
    """
    end = len(request.token_ids) // block_size * block_size
    for item in request.items:
        if item.offset < end < item.end:
            end = item.offset // block_size * block_size
    if not end:
        return None
    return dataclasses.replace(
        request,
        token_ids=request.token_ids[:end],
        num_prompt_tokens=end,
        items=tuple(item for item in request.items if item.end <= end),
        sampling=SamplingParams(max_tokens=1),
    )
