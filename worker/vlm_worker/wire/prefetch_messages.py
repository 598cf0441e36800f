"""The call Prefetch and its reply as values, with their codecs."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Final

from vlm_worker.annotations import MAX_TOKENS, Between, Flat
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import Request
from vlm_worker.wire.codec import Codec
from vlm_worker.wire.messages import check_items


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


@dataclasses.dataclass(frozen=True, slots=True)
class PrefetchCall:
    """A prompt whose beginning a worker computes if nothing else is to do.

    The sampling of the request is not used: no token is answered.
    """

    request: Annotated[Request, Flat()]


PREFETCH_CALL: Final = Codec(PrefetchCall, pb.PrefetchRequest, check=check_items)
PREFETCH_REPLY: Final = Codec(PrefetchResult, pb.PrefetchReply)
