"""The calls of worker.proto as values: what a client passes and receives, what a role is given.

`Request`, `Source` and `StageSpan` of types.py are used as they are; here is what only the wire
knows.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Generic, TypeVar

from vlm_worker.errors import InvalidImageError
from vlm_worker.types import (
    FinishReason,
    Request,
    RequestKey,
    Role,
    Source,
    Stage,
    StageSpan,
    TokenLogprobs,
)

PROTOCOL_VERSION = 1

E = TypeVar("E")


class CancelOutcome(enum.Enum):
    """The proof class of a cancellation: what may be freed now. Values are the wire's."""

    NOT_FOUND = 1
    ALREADY_COMPLETE = 2
    CANCELLED_BEFORE_ADVERTISED = 3
    CANCEL_REQUESTED_IN_FLIGHT = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a worker can take; zeros where it has no KV."""

    block_size: int
    kv_capacity_tokens: int
    max_model_len: int
    max_requests: int


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """Who a worker is.

    `layout_fingerprint` is empty without KV. `weights` is their type: where those of two workers
    differ, each takes the other's KV, and answers are neither's own (`docs/decisions/0016`).
    """

    role: Role
    stages: frozenset[Stage]
    model: str
    model_revision: str
    pod_name: str
    pod_uid: str
    boot_id: bytes
    layout_fingerprint: bytes
    embed_fingerprint: bytes
    compat: str
    weights: str
    limits: Limits


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is. `kv_free_tokens` are free or can be evicted."""

    num_inflight: int
    num_waiting: int
    work_queued_seconds: float
    kv_free_tokens: int
    kv_capacity_tokens: int
    accepting: bool
    boot_id: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Reply(Generic[E]):
    """One message of a stream.

    Attributes:
        event: what it says.
        spans: pieces of the request's time, seconds from the call's arrival at the worker.
        clock: seconds since then when the worker wrote this.
    """

    event: E
    spans: tuple[StageSpan, ...]
    clock: float


# ---- encode -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeItem:
    """One picture to encode, as the gateway read its header; `max_pixels` 0 is the model's own."""

    transfer_id: str
    num_bytes: int
    width: int
    height: int
    num_tokens: int
    max_pixels: int
    format: str


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeCall:
    """The pictures of a request. Their bytes follow in chunks."""

    key: RequestKey
    items: tuple[EncodeItem, ...]
    cache_salt: bytes = b""
    last_resort: bool = False
    skip_corrupt: bool = False
    priority: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedItem:
    """One decoded picture; with `error` set, the rest is empty."""

    num_tokens: int
    grid_thw: tuple[int, int, int]
    image_key: bytes
    error: InvalidImageError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Decoded:
    """Every picture is decoded or has its error; with an error and no skipping, the last word."""

    items: tuple[DecodedItem, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ItemReady:
    """The embedding of a picture may be fetched."""

    item: int
    cache_hit: bool
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ItemFailed:
    """A picture that was decoded could not be encoded."""

    item: int
    code: str
    message: str


EncodeEvent = Decoded | ItemReady | ItemFailed


# ---- prefill ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillCall:
    """A prompt to compute.

    Attributes:
        request: what it is about.
        transfer_id: names the KV of this attempt.
        sources: where the embedding of each of `request.items` is.
        hand_over: hold the KV for a decode worker; otherwise answer one token only.
        last_resort: a draining worker accepts.
    """

    request: Request
    transfer_id: str
    sources: tuple[Source, ...]
    hand_over: bool = True
    last_resort: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt is queued: decode may be called with this as its source."""

    transfer_id: str
    boot_id: bytes
    layout_fingerprint: bytes
    lease_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class FirstToken:
    """Token `index` of the answer; `finish_reason` is set where it ends the answer."""

    index: int
    token_id: int
    num_cached_tokens: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillDone:
    """The last word of a prefill."""


PrefillEvent = Accepted | FirstToken | PrefillDone


# ---- decode -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class ReserveCall:
    """Room for a prompt; `num_tokens` counts prompt, delivered tokens, and one."""

    key: RequestKey
    num_tokens: int
    last_resort: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """Room that is held until its lease ends; renewed like a transfer."""

    reservation_id: str
    boot_id: bytes
    lease_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeCall:
    """An answer to continue after its first token; `boot_id` is that of the reservation."""

    request: Request
    reservation_id: str
    kv: Source
    boot_id: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of the answer, from index `first_index` on; one of `logprobs` for each, or none."""

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The last word of a decode; `num_tokens` counts the whole answer."""

    reason: FinishReason
    num_tokens: int


DecodeEvent = Tokens | Finished


@dataclasses.dataclass(frozen=True, slots=True)
class FetchCall:
    """What a consumer asks a producer for; `first_unit` is the first block or row that it lacks.

    With a `transport`, the bytes may go past the frames; `invitation` is that one's own.
    """

    transfer_id: str
    boot_id: bytes
    fingerprint: bytes
    key: RequestKey
    first_unit: int = 0
    transport: str = ""
    invitation: bytes = b""
