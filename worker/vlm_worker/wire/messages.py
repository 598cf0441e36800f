"""The calls of worker.proto as values: what a client sends and receives, and what a role gets.

`Request`, `Source` and `StageSpan` are in types.py; this module has the types that only calls use.
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
    """The outcome of a cancellation: what may be freed now. Equal to `vlm.v1.CancelOutcome`."""

    NOT_FOUND = 1
    ALREADY_COMPLETE = 2
    CANCELLED_BEFORE_ADVERTISED = 3
    CANCEL_REQUESTED_IN_FLIGHT = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a worker; 0 without KV."""

    block_size: int
    kv_capacity_tokens: int
    max_model_len: int
    max_requests: int


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """The identity of a worker.

    `layout_fingerprint` is empty without KV. `weights` is the type of the weights. If it differs
    between two workers, they still exchange KV, and answers match neither worker's own
    (`docs/decisions/0016`).
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
    """The load of a worker. `kv_free_tokens` counts free and evictable blocks, in tokens."""

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
        event: its content.
        spans: parts of the request's time, in seconds from the call's arrival at the worker.
        clock: seconds from then until the worker wrote this message.
    """

    event: E
    spans: tuple[StageSpan, ...]
    clock: float


# ---- encode -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeItem:
    """One image to encode, from its header; `max_pixels` 0 selects the model's limit."""

    transfer_id: str
    num_bytes: int
    width: int
    height: int
    num_tokens: int
    max_pixels: int
    format: str


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeCall:
    """The images of a request. Their bytes follow in chunks."""

    key: RequestKey
    items: tuple[EncodeItem, ...]
    cache_salt: bytes = b""
    last_resort: bool = False
    skip_corrupt: bool = False
    priority: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedItem:
    """One decoded image; with `error` set, the rest is empty."""

    num_tokens: int
    grid_thw: tuple[int, int, int]
    image_key: bytes
    error: InvalidImageError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Decoded:
    """The images are decoded or failed; the last message if one failed and none may be skipped."""

    items: tuple[DecodedItem, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ItemReady:
    """The embedding of an image may be fetched."""

    item: int
    cache_hit: bool
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ItemFailed:
    """An image was decoded but could not be encoded."""

    item: int
    code: str
    message: str


EncodeEvent = Decoded | ItemReady | ItemFailed


# ---- prefill ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillCall:
    """A prompt to compute.

    Attributes:
        request: the prompt and its parameters.
        transfer_id: id of the KV transfer of this attempt.
        sources: where to fetch the embedding of each of `request.items`.
        handoff: hold the KV for a decode worker; if False, generate one token only.
        last_resort: a draining worker accepts the call.
    """

    request: Request
    transfer_id: str
    sources: tuple[Source, ...]
    handoff: bool = True
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
    """Token `index` of the answer; `finish_reason` is set if it ends the answer."""

    index: int
    token_id: int
    num_cached_tokens: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillDone:
    """The last message of a prefill."""


PrefillEvent = Accepted | FirstToken | PrefillDone


# ---- decode -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class ReserveCall:
    """KV blocks to reserve; `num_tokens` counts prompt, delivered tokens, and one."""

    key: RequestKey
    num_tokens: int
    last_resort: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """Reserved KV blocks, held until the lease ends; renewed like a transfer."""

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
    """Tokens of the answer from index `first_index` on; `logprobs` has one per token, or none."""

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The last message of a decode; `num_tokens` counts the whole answer."""

    reason: FinishReason
    num_tokens: int


DecodeEvent = Tokens | Finished


@dataclasses.dataclass(frozen=True, slots=True)
class FetchCall:
    """A consumer's request to a producer; `first_unit` is the first block or row that it lacks.

    With a `transport`, payloads may be out of band; `invitation` is the transport's own bytes.
    """

    transfer_id: str
    boot_id: bytes
    fingerprint: bytes
    key: RequestKey
    first_unit: int = 0
    transport: str = ""
    invitation: bytes = b""
