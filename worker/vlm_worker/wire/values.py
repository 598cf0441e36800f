"""Converts values that several calls share: keys, sources, spans, requests.

Received messages are checked: lengths, bounds, ids. InvalidRequestError names the invalid field.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from vlm_worker.errors import InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import (
    STAGES,
    FinishReason,
    ImageItem,
    Request,
    RequestKey,
    Source,
    StageSpan,
)
from vlm_worker.wire import checks
from vlm_worker.wire.sampling import sampling_of

MICRO = 1_000_000
SALTS = (0, 32)
FINGERPRINTS = (0, 16)
_STAGES = frozenset((*STAGES, "kv_transfer"))


def key_of(
    message: pb.EncodeBegin
    | pb.PrefillRequest
    | pb.DecodeRequest
    | pb.ReserveRequest
    | pb.FetchRequest,
) -> RequestKey:
    """Request id and attempt of any call that has them."""
    return RequestKey(
        checks.identifier(message.request_id, "request_id"),
        checks.bounded_int(message.attempt, "attempt", 0, checks.MAX_ATTEMPT),
    )


def source_of(message: pb.Source) -> Source:
    """Where to fetch from."""
    host, _, port = message.address.rpartition(":")
    if not host or not port.isdecimal() or len(message.address) > 300:
        raise InvalidRequestError("source.address must read host:port")
    return Source(
        address=message.address,
        boot_id=checks.fixed_bytes(message.boot_id, "source.boot_id", (16,)),
        transfer_id=checks.identifier(message.transfer_id, "source.transfer_id"),
        fingerprint=checks.fixed_bytes(message.fingerprint, "source.fingerprint", FINGERPRINTS),
    )


def source_to(source: Source) -> pb.Source:
    """The message of a source."""
    return pb.Source(
        address=source.address,
        boot_id=source.boot_id,
        transfer_id=source.transfer_id,
        fingerprint=source.fingerprint,
    )


def spans_of(messages: Sequence[pb.StageSpan]) -> tuple[StageSpan, ...]:
    """Spans in seconds; an unknown stage, from a newer worker, is dropped."""
    checks.bounded_int(len(messages), "spans", 0, checks.MAX_SPANS)
    return tuple(
        StageSpan(
            m.stage,
            seconds_of(m.start_us, "spans.start_us"),
            seconds_of(m.end_us, "spans.end_us"),
            checks.bounded_int(m.item, "spans.item", 0, checks.MAX_ITEMS),
        )
        for m in messages
        if m.stage in _STAGES
    )


def seconds_of(microseconds: int, name: str) -> float:
    """Seconds, at most those of one day; InvalidRequestError beyond."""
    return checks.bounded_float(microseconds / MICRO, name, checks.MAX_SECONDS)


def spans_to(spans: Iterable[StageSpan]) -> list[pb.StageSpan]:
    """Spans in microseconds; one that began before the call's arrival starts at 0."""
    return [
        pb.StageSpan(stage=s.stage, start_us=micros(s.start), end_us=micros(s.end), item=s.item)
        for s in spans
    ]


def lease_of(milliseconds: int) -> float:
    """Duration of a lease in seconds."""
    return checks.bounded_float(milliseconds / 1000, "lease_milliseconds", checks.MAX_SECONDS)


def micros(seconds: float) -> int:
    """Microseconds, at least 0."""
    return max(0, round(seconds * MICRO))


def request_of(message: pb.PrefillRequest | pb.DecodeRequest) -> Request:
    """The request of a Prefill or Decode call."""
    token_ids = checks.token_ids(message.token_ids, "token_ids", 1, checks.MAX_TOKENS)
    num_tokens = len(token_ids)
    checks.bounded_int(message.num_prompt_tokens, "num_prompt_tokens", 1, num_tokens)
    if len(message.items) > checks.MAX_ITEMS:
        raise InvalidRequestError(f"items must be at most {checks.MAX_ITEMS}")
    items = tuple(_item_of(item, num_tokens) for item in message.items)
    for one, following in itertools.pairwise(items):
        if following.offset < one.end:
            raise InvalidRequestError("items must be in order and must not overlap")
    return Request(
        key=key_of(message),
        token_ids=token_ids,
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_of(message.sampling),
        items=items,
        cache_salt=checks.fixed_bytes(message.cache_salt, "cache_salt", SALTS),
        priority=priority_of(message),
    )


def priority_of(message: pb.EncodeBegin | pb.PrefillRequest | pb.DecodeRequest) -> int:
    """A priority within bounds."""
    return checks.bounded_int(
        message.priority, "priority", -checks.MAX_PRIORITY, checks.MAX_PRIORITY
    )


def _item_of(message: pb.ImageItem, num_tokens: int) -> ImageItem:
    item = ImageItem(
        image_key=checks.fixed_bytes(message.image_key, "items.image_key", (32,)),
        offset=message.offset,
        num_tokens=message.num_tokens,
        grid_thw=checks.grid(message.grid_thw, "items.grid_thw"),
    )
    if item.num_tokens == 0 or item.end > num_tokens:
        raise InvalidRequestError("items must lie inside token_ids and have tokens")
    return item


def items_to(request: Request, sources: Sequence[Source] = ()) -> list[pb.ImageItem]:
    """The messages of the images; without sources for decode, which fetches no embedding."""
    return [
        pb.ImageItem(
            image_key=item.image_key,
            offset=item.offset,
            num_tokens=item.num_tokens,
            grid_thw=item.grid_thw,
            source=source_to(sources[index]) if sources else None,
        )
        for index, item in enumerate(request.items)
    ]


def finish_of(text: str) -> FinishReason:
    """A finish reason."""
    try:
        return FinishReason(text)
    except ValueError:
        raise InvalidRequestError(f"finish_reason {text!r} is unknown") from None
