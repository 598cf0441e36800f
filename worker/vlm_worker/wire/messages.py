"""The messages of worker.proto as values, with their bounds and codecs.

`Request`, `Source` and `StageSpan` are in types.py. InvalidRequestError names an invalid field.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from typing import Annotated, Any, Final, Generic, TypeVar

from vlm_worker import annotations as an
from vlm_worker.annotations import Between, Flat, Named, Ticks
from vlm_worker.errors import IncompatibleError, InvalidImageError, InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.reduction import Reduction
from vlm_worker.types import (
    STAGES,
    EmbedLayout,
    FinishReason,
    ImageItem,
    PromptLogprobs,
    Request,
    RequestKey,
    Role,
    SamplingParams,
    Source,
    Stage,
    StageSpan,
    TokenLogprobs,
)
from vlm_worker.wire import logprob_messages as _  # noqa: F401  its codecs are used below
from vlm_worker.wire.codec import Codec

PROTOCOL_VERSION = 1
MAX_INVITATION_BYTES = 64
MAX_CHUNK_BYTES = 1 << 20

Id = Annotated[str, an.identifier()]
BootId = Annotated[bytes, an.num_bytes(16)]
Fingerprint = Annotated[bytes, an.num_bytes(0, 16)]
Name = Annotated[str, an.text(an.MAX_TEXT)]
Label = Annotated[str, an.text(an.MAX_LABEL)]
NumTokens = Annotated[int, Between(0, an.MAX_TOKENS)]
LargeCount = Annotated[int, Between(0, an.MAX_COUNT)]
ItemIndex = Annotated[int, Between(0, an.MAX_ITEMS - 1)]
Priority = Annotated[int, Between(-an.MAX_PRIORITY, an.MAX_PRIORITY)]
LeaseSeconds = Annotated[float, Ticks("lease_milliseconds", 1000), Between(0.0, an.MAX_SECONDS)]

E = TypeVar("E")


class CancelOutcome(enum.Enum):
    """The outcome of a cancellation: what may be freed now. Equal to `vlm.v1.CancelOutcome`."""

    NOT_FOUND = 1
    ALREADY_COMPLETE = 2
    CANCELLED_BEFORE_ADVERTISED = 3
    CANCEL_REQUESTED_IN_FLIGHT = 4


@dataclasses.dataclass(frozen=True, slots=True)
class CancelReply:
    outcome: CancelOutcome


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a worker; 0 without KV."""

    block_size: Annotated[NumTokens, Named("block_size_tokens")]
    kv_capacity_tokens: LargeCount
    max_model_len: Annotated[NumTokens, Named("max_model_len_tokens")]
    max_requests: NumTokens


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """The identity of a worker.

    `layout_fingerprint` is empty without KV. Workers that differ in `weights` exchange KV; answers
    match neither's own (`docs/decisions/0016`). If true, it obeys `grammars` and so on. With an
    `embed_layout`, an encoder takes embeddings of clients.
    """

    role: Role
    stages: frozenset[Stage]
    model: Name
    model_revision: Name
    pod_name: Name
    pod_uid: Name
    boot_id: BootId
    layout_fingerprint: Fingerprint
    embed_fingerprint: Fingerprint
    compat: Name
    weights: Label
    limits: Limits
    protocol_version: int = PROTOCOL_VERSION
    grammars: bool = False
    min_tokens: bool = False
    prompt_logprobs: bool = False
    embed_layout: EmbedLayout | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The load of a worker. `kv_free_tokens` counts free and evictable blocks, in tokens.

    An encoder that lends answers up to `max_lent` text-only requests at once. It has `num_lent` of
    them, with `lent_queued_seconds` of queued work, and `num_images` images to encode. Its
    `work_queued_seconds` are those of images. The first four are 0 on a worker that does not lend.
    """

    num_inflight: int
    num_waiting: int
    work_queued_seconds: Annotated[float, Between(0.0, float(an.MAX_COUNT))]
    kv_free_tokens: LargeCount
    kv_capacity_tokens: LargeCount
    accepting: bool
    boot_id: BootId
    max_lent: int = 0
    num_lent: int = 0
    num_images: int = 0
    lent_queued_seconds: Annotated[float, Between(0.0, float(an.MAX_COUNT))] = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Reply(Generic[E]):
    """One message of a stream.

    `spans` are parts of the request's time, in seconds from the call's arrival at the worker;
    `clock` is the time from then until the worker wrote this message.
    """

    event: Annotated[E, an.OneOf()]
    spans: Annotated[
        tuple[StageSpan, ...],
        an.count(0, an.MAX_SPANS),
        an.Known("stage", frozenset((*STAGES, "kv_transfer"))),
    ]
    clock: Annotated[float, Ticks("clock_us", 1_000_000), Between(0.0, an.MAX_SECONDS)]


def _refuse_incompatible(message: pb.HelloReply) -> None:
    if message.protocol_version != PROTOCOL_VERSION:
        raise IncompatibleError(
            f"{message.pod_name} speaks protocol {message.protocol_version}, "
            f"this is {PROTOCOL_VERSION}"
        )
    try:
        Role(message.role)
        for stage in message.stages:
            Stage(stage)
    except ValueError as error:
        raise IncompatibleError(f"{message.pod_name}: {error}") from error


def _check_reduction(reduction: Reduction) -> None:
    try:
        reduction.num_tokens((1, 1))
    except ValueError as error:
        raise InvalidRequestError(f"reduction.keep_permille: {error}") from error


Codec(StageSpan, pb.StageSpan)
Codec(Reduction, pb.Reduction, check=_check_reduction)
Codec(Limits, pb.Limits)
Codec(EmbedLayout, pb.EmbedLayout)
HELLO: Final = Codec(Hello, pb.HelloReply, before=_refuse_incompatible)
LOAD: Final = Codec(Load, pb.LoadReply)
CANCEL: Final = Codec(RequestKey, pb.CancelRequest)
CANCEL_REPLY: Final = Codec(CancelReply, pb.CancelReply)


# ---- leases and fetches -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class RenewCall:
    transfer_ids: Annotated[tuple[str, ...], an.count(0, an.MAX_IDS), an.each(an.identifier())]
    boot_id: BootId


@dataclasses.dataclass(frozen=True, slots=True)
class RenewReply:
    gone: Annotated[frozenset[str], an.count(0, an.MAX_IDS), an.each(an.identifier())]


@dataclasses.dataclass(frozen=True, slots=True)
class ReleaseCall:
    transfer_id: Id
    boot_id: BootId


@dataclasses.dataclass(frozen=True, slots=True)
class FetchCall:
    """A consumer's request to a producer; `first_unit` is the first block or row that it lacks.

    With a `transport`, payloads may be out of band; `invitation` is the transport's own bytes.
    """

    transfer_id: Id
    boot_id: BootId
    fingerprint: Fingerprint
    key: Annotated[RequestKey, Flat()]
    first_unit: NumTokens = 0
    transport: Label = ""
    invitation: Annotated[bytes, an.max_bytes(MAX_INVITATION_BYTES)] = b""


RENEW: Final = Codec(RenewCall, pb.RenewLeasesRequest)
RENEW_REPLY: Final = Codec(RenewReply, pb.RenewLeasesReply)
RELEASE: Final = Codec(ReleaseCall, pb.ReleaseLeaseRequest)
FETCH_CALL: Final = Codec(FetchCall, pb.FetchRequest)


# ---- encode -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeItem:
    """One image to encode, from its header; `max_pixels` 0 selects the model's limit.

    `num_tokens` is after the `reduction`. With a `grid_thw`, the bytes are the rows of a client's
    embedding, and `format` is their dtype.
    """

    transfer_id: Id
    num_bytes: Annotated[int, Between(1, an.MAX_BYTES)]  # EncodeCall checks the maximum of a file
    width: Annotated[int, Between(0, an.MAX_SIDE)]
    height: Annotated[int, Between(0, an.MAX_SIDE)]
    num_tokens: NumTokens
    max_pixels: Annotated[int, Between(0, an.MAX_PIXELS)]
    format: Label
    reduction: Reduction | None = None
    grid_thw: Annotated[tuple[int, ...], an.grid(may_lack=True)] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeCall:
    """The images of a request. Their bytes follow in chunks."""

    key: Annotated[RequestKey, Flat()]
    items: Annotated[tuple[EncodeItem, ...], an.count(1, an.MAX_ITEMS)]
    cache_salt: Annotated[bytes, an.num_bytes(0, 32)] = b""
    last_resort: bool = False
    skip_corrupt: Annotated[bool, an.Choice("on_corrupt", true="Skip", false="Reject")] = False
    priority: Priority = 0
    pins_session: bool = False
    weighted_seconds: Annotated[float, Between(0.0, an.MAX_WEIGHTED_SECONDS)] = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    item: int
    data: Annotated[bytes, an.max_bytes(MAX_CHUNK_BYTES)]


@dataclasses.dataclass(frozen=True, slots=True)
class ItemError:
    code: Label
    message: Annotated[str, an.text(an.MAX_TEXT), an.Cut(an.MAX_TEXT)]


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedItem:
    """One decoded image; with `error` set, the rest is empty.

    `num_tokens` and `image_key` are those of the embedding that a prompt gets.
    """

    num_tokens: Annotated[int, Between(1, an.MAX_TOKENS)]
    grid_thw: Annotated[tuple[int, int, int], an.grid()]
    image_key: Annotated[bytes, an.num_bytes(32)]
    error: ItemError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Decoded:
    """The images are decoded or failed; the last message if one failed and none may be skipped."""

    items: Annotated[tuple[DecodedItem, ...], an.count(1, an.MAX_ITEMS)]


@dataclasses.dataclass(frozen=True, slots=True)
class ItemReady:
    """The embedding of an image may be fetched."""

    item: ItemIndex
    cache_hit: bool
    num_bytes: Annotated[int, Between(0, an.MAX_BYTES)]


@dataclasses.dataclass(frozen=True, slots=True)
class ItemFailed:
    """An image was decoded but could not be encoded."""

    item: ItemIndex
    code: Annotated[Label, Named("error.code")]
    message: Annotated[str, Named("error.message"), an.text(an.MAX_TEXT), an.Cut(an.MAX_TEXT)]


EncodeEvent = Decoded | ItemReady | ItemFailed


def _check_encode_call(call: EncodeCall) -> None:
    if len({item.transfer_id for item in call.items}) < len(call.items):
        raise InvalidRequestError("items.transfer_id must be another for each item")
    for index, item in enumerate(call.items):
        if item.num_bytes > an.MAX_IMAGE_BYTES:
            raise InvalidImageError(
                f"the image has {item.num_bytes} bytes; at most {an.MAX_IMAGE_BYTES} are accepted",
                item=index,
                code="image_too_large",
            )


def _decode_item(message: pb.DecodedItem, path: str) -> DecodedItem:
    if message.HasField("error"):
        error = _ITEM_ERROR.decode(message.error, f"{path}error.")
        return DecodedItem(0, (0, 0, 0), b"", error)
    return _DECODED_IMAGE.decode(message, path)


def _encode_item(item: DecodedItem) -> pb.DecodedItem:
    if item.error is not None:
        return pb.DecodedItem(error=_ITEM_ERROR.encode(item.error))
    message: pb.DecodedItem = _DECODED_IMAGE.encode(item)
    return message


_ITEM_ERROR: Final = Codec(ItemError, pb.ItemError)
_DECODED_IMAGE: Final = Codec(DecodedItem, pb.DecodedItem)
Codec.by_hand(DecodedItem, decode=_decode_item, encode=_encode_item)
Codec(Decoded, pb.Decoded)
Codec(ItemReady, pb.ItemReady)
Codec(ItemFailed, pb.ItemFailed)
Codec(EncodeItem, pb.EncodeItem)
CHUNK: Final = Codec(Chunk, pb.EncodeChunk)
ENCODE_CALL: Final = Codec(EncodeCall, pb.EncodeBegin, check=_check_encode_call)
ENCODE_REPLY: Final[Codec[Reply[EncodeEvent]]] = Codec(
    Reply, pb.EncodeReply, events={"decoded": Decoded, "ready": ItemReady, "failed": ItemFailed}
)


# ---- requests and tokens ------------------------------------------------------------------------


def check_items(call: Any) -> None:  # Prefill, Prefetch or Decode
    request: Request = call.request
    num_tokens = len(request.token_ids)
    if request.num_prompt_tokens > num_tokens:
        raise InvalidRequestError(
            f"num_prompt_tokens must be 1 to {num_tokens}, not {request.num_prompt_tokens}"
        )
    if any(item.num_tokens == 0 or item.end > num_tokens for item in request.items):
        raise InvalidRequestError("items must be inside token_ids and have tokens")
    for one, following in itertools.pairwise(request.items):
        if following.offset < one.end:
            raise InvalidRequestError("items must be in order and must not overlap")


Codec(Source, pb.Source)
Codec(SamplingParams, pb.Sampling)
Codec(ImageItem, pb.ImageItem, elsewhere=("source",))


# ---- prefill ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillCall:
    """A prompt to compute; `sources` has the embedding of each of `request.items`.

    With `handoff`, its KV is held for a decode worker as `transfer_id`; without, one token is
    generated. With `last_resort`, a draining worker accepts the call.
    """

    request: Annotated[Request, Flat()]
    transfer_id: Id
    sources: Annotated[tuple[Source, ...], an.Column("items", "source")]
    handoff: bool = True
    last_resort: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt is queued: decode may be called with this as its source."""

    transfer_id: Id
    boot_id: BootId
    layout_fingerprint: Annotated[bytes, an.num_bytes(16)]
    lease_seconds: LeaseSeconds


@dataclasses.dataclass(frozen=True, slots=True)
class FirstToken:
    """Token `index` of the answer; `finish_reason` is set if it ends the answer."""

    index: NumTokens
    token_id: Annotated[int, Between(0, an.MAX_TOKEN_ID)]
    num_cached_tokens: NumTokens
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillDone:
    """The last message of a prefill."""


PrefillEvent = Accepted | PromptLogprobs | FirstToken | PrefillDone

Codec(Accepted, pb.PrefillAccepted)
Codec(FirstToken, pb.FirstToken)
Codec(PrefillDone, pb.PrefillDone)
PREFILL_CALL: Final = Codec(PrefillCall, pb.PrefillRequest, check=check_items)
PREFILL_REPLY: Final[Codec[Reply[PrefillEvent]]] = Codec(
    Reply,
    pb.PrefillReply,
    events={
        "accepted": Accepted,
        "first_token": FirstToken,
        "done": PrefillDone,
        "prompt_logprobs": PromptLogprobs,
    },
)


# ---- decode -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class ReserveCall:
    """KV blocks to reserve; `num_tokens` counts prompt, delivered tokens, and one."""

    key: Annotated[RequestKey, Flat()]
    num_tokens: Annotated[int, Between(1, an.MAX_TOKENS)]
    last_resort: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """Reserved KV blocks, held until the lease ends; renewed like a transfer."""

    reservation_id: Id
    boot_id: BootId
    lease_seconds: LeaseSeconds


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeCall:
    """An answer to continue after its first token; `boot_id` is that of the reservation."""

    request: Annotated[Request, Flat()]
    reservation_id: Id
    kv: Source
    boot_id: BootId


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of the answer from index `first_index` on; `logprobs` has one per token, or none."""

    first_index: NumTokens
    token_ids: Annotated[tuple[int, ...], an.token_ids(1, an.MAX_TOKENS)]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The last message of a decode; `num_tokens` counts the whole answer."""

    reason: Annotated[FinishReason, Named("finish_reason")]
    num_tokens: NumTokens


DecodeEvent = Tokens | Finished


def _check_tokens(tokens: Tokens) -> None:
    if tokens.logprobs and len(tokens.logprobs) != len(tokens.token_ids):
        raise InvalidRequestError("tokens.logprobs must be one per token, or none")


RESERVE_CALL: Final = Codec(ReserveCall, pb.ReserveRequest)
RESERVATION: Final = Codec(Reservation, pb.ReserveReply)
Codec(Tokens, pb.Tokens, check=_check_tokens)
Codec(Finished, pb.Finished)
DECODE_CALL: Final = Codec(DecodeCall, pb.DecodeRequest, check=check_items)
DECODE_REPLY: Final[Codec[Reply[DecodeEvent]]] = Codec(
    Reply, pb.DecodeReply, events={"tokens": Tokens, "finished": Finished}
)
