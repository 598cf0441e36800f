"""Messages of every call, right in form and wrong in content: fields drawn, bytes changed."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from vlm_worker.types import (
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
from vlm_worker.wire import messages
from vlm_worker.wire.codec import Codec
from vlm_worker.wire.prefetch_messages import (
    PREFETCH_CALL,
    PREFETCH_REPLY,
    PrefetchCall,
    PrefetchOutcome,
    PrefetchResult,
)

KEY = RequestKey("r-1", 1)
SOURCE = Source("127.0.0.1:9", b"b" * 16, "t-1", b"f" * 16)
ITEM = ImageItem(b"k" * 32, 2, 4, (1, 4, 4))
SAMPLING = SamplingParams(
    8, 0.5, 0.9, 3, 7, (1, 2), min_p=0.1, logit_bias=((3, 1.0),), num_logprobs=2, grammar=b"start:",
)  # fmt: skip
REQUEST = Request(KEY, tuple(range(10)), 8, SAMPLING, (ITEM,), b"s" * 32, priority=1)
SPANS = (StageSpan("encode", 0.25, 0.5, 1),)
LOGPROBS = TokenLogprobs(-0.5, ((7, -0.5), (9, -2.0)))
SCORES = PromptLogprobs(
    1, array("f", [-0.5, -3.0]), array("I", [1, 3]), 1, array("I", [7, 9]), array("f", [-0.5, -2.0])
)

_INTEGERS = (
    0,
    1,
    2,
    255,
    2**16,
    2**20,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63,
    2**64 - 1,
    -1,
    -(2**31),
)
_FLOATS = (0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "x", "x" * 129, "x" * 5000, "..", "a b", "\0", "é" * 80, "Skip", "stop", "STOP")
_LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 65, 5000)

Door = tuple[Message, Callable[[Any], Any]]
"""An honest message, and what makes a value of it."""


def _door(codec: Codec[Any], value: Any) -> Door:
    return codec.encode(value), codec.decode


def server_doors() -> dict[str, Door]:
    """What a worker is asked, by call."""
    images = (
        messages.EncodeItem("e-1", 100, 64, 48, 4, 0, "PNG"),
        messages.EncodeItem("e-2", 90, 64, 48, 4, 0, "PNG"),
        messages.EncodeItem("e-3", 64, 0, 0, 4, 0, "bfloat16", grid_thw=(1, 4, 4)),
    )
    encoding = messages.EncodeCall(KEY, images, b"s" * 32)
    prefilling = messages.PrefillCall(REQUEST, "t-1", (SOURCE,))
    decoding = messages.DecodeCall(REQUEST, "res-1", SOURCE, b"b" * 16)
    fetch = messages.FetchCall("t-1", b"b" * 16, b"f" * 16, KEY, 3, "shared-memory", b"i" * 16)
    return {
        "Encode": _door(messages.ENCODE_CALL, encoding),
        "Prefill": _door(messages.PREFILL_CALL, prefilling),
        "Prefetch": _door(PREFETCH_CALL, PrefetchCall(REQUEST)),
        "Reserve": _door(messages.RESERVE_CALL, messages.ReserveCall(KEY, 9)),
        "Decode": _door(messages.DECODE_CALL, decoding),
        "FetchKV": _door(messages.FETCH_CALL, fetch),
        "FetchEmbedding": _door(messages.FETCH_CALL, fetch),
        "Cancel": _door(messages.CANCEL, KEY),
        "RenewLeases": _door(messages.RENEW, messages.RenewCall(("a", "b"), b"b" * 16)),
        "ReleaseLease": _door(messages.RELEASE, messages.ReleaseCall("t-1", b"b" * 16)),
    }


def client_doors() -> dict[str, Door]:
    """What a worker replies, by call and kind."""
    limits = messages.Limits(64, 10_000, 4096, 256)
    hello = messages.Hello(
        Role.DECODE, frozenset({Stage.DECODE}), "m", "r", "p", "u", b"b" * 16, b"f" * 16,
        b"g" * 16, "c", "int8", limits, embed_layout=EmbedLayout("r", 8, 1, "bfloat16"),
    )  # fmt: skip
    load = messages.Load(1, 2, 0.5, 100, 200, accepting=True, boot_id=b"b" * 16)
    broken = messages.DecodedItem(0, (0, 0, 0), b"", messages.ItemError("", "no"))
    decoded = messages.Decoded((messages.DecodedItem(4, (1, 4, 4), b"k" * 32), broken))
    encoding, prefilling = messages.ENCODE_REPLY, messages.PREFILL_REPLY
    decoding = messages.DECODE_REPLY
    replies: dict[str, tuple[Any, Codec[Any]]] = {
        "Decoded": (decoded, encoding),
        "ItemReady": (messages.ItemReady(1, cache_hit=True, num_bytes=9), encoding),
        "ItemFailed": (messages.ItemFailed(1, "code", "why"), encoding),
        "Accepted": (messages.Accepted("t-1", b"b" * 16, b"f" * 16, 10.0), prefilling),
        "FirstToken": (messages.FirstToken(0, 7, 4, FinishReason.STOP, LOGPROBS), prefilling),
        "PrefillDone": (messages.PrefillDone(), prefilling),
        "PromptLogprobs": (SCORES, prefilling),
        "Tokens": (messages.Tokens(1, (7, 8), (LOGPROBS, LOGPROBS)), decoding),
        "Finished": (messages.Finished(FinishReason.LENGTH, 8), decoding),
    }
    reservation = messages.Reservation("res-1", b"b" * 16, 10.0)
    cancelled = messages.CancelReply(messages.CancelOutcome.ALREADY_COMPLETE)
    return {
        **{
            name: _door(codec, messages.Reply(event, SPANS, 1.5))
            for name, (event, codec) in replies.items()
        },
        "Hello": _door(messages.HELLO, hello),
        "Load": _door(messages.LOAD, load),
        "Prefetched": _door(PREFETCH_REPLY, PrefetchResult(PrefetchOutcome.COMPUTED, 16, 48)),
        "Reservation": _door(messages.RESERVATION, reservation),
        "Cancelled": _door(messages.CANCEL_REPLY, cancelled),
        "Renewed": _door(messages.RENEW_REPLY, messages.RenewReply(frozenset({"a"}))),
    }


def lie(honest: Message, draw: random.Random) -> Message:
    """A message of the same type with some of its fields, or of its bytes, changed."""
    message = type(honest)()
    message.CopyFrom(honest)
    if draw.random() < 0.25:
        return _garbled(message, draw)
    fields = list(_fields(message))
    for parent, field in draw.sample(fields, min(len(fields), draw.randint(1, 3))):
        _change(parent, field, draw)
    return message


def _garbled(message: Message, draw: random.Random) -> Message:
    raw = bytearray(message.SerializeToString())
    for _ in range(draw.randint(1, 4)):
        raw[draw.randrange(len(raw))] = draw.randrange(256)
    try:
        return type(message).FromString(bytes(raw[: draw.randint(1, len(raw))]))
    except DecodeError:
        return message


def _fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Every field of a message and of those inside it, with whose it is."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
        value = getattr(message, field.name)
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        inner = value if field.is_repeated else [value] if message.HasField(field.name) else []
        for one in inner:
            yield from _fields(one)


def _change(message: Message, field: FieldDescriptor, draw: random.Random) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        number = draw.choice(_INTEGERS) % 2**32
        getattr(message, field.name)[number] = draw.choice(_FLOATS)
    elif field.is_repeated:
        values = getattr(message, field.name)
        count = draw.choice((0, 1, 2, 70, 300, 2000))
        if field.message_type is not None:
            first = values[0] if len(values) else values.add()
            kept = type(first)()
            kept.CopyFrom(first)
            del values[:]
            values.extend([kept] * min(count, 300))
        else:
            del values[:]
            values.extend([_scalar(field, draw)] * count)
    elif field.message_type is not None:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(field, draw))


def _scalar(field: FieldDescriptor, draw: random.Random) -> Any:
    kinds = FieldDescriptor
    match field.cpp_type:
        case kinds.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case kinds.CPPTYPE_FLOAT | kinds.CPPTYPE_DOUBLE:
            return draw.choice(_FLOATS)
        case kinds.CPPTYPE_ENUM:
            return draw.choice((0, 1, 4, 99))
        case kinds.CPPTYPE_STRING if field.type == kinds.TYPE_BYTES:
            return draw.randbytes(draw.choice(_LENGTHS))
        case kinds.CPPTYPE_STRING:
            return draw.choice(_TEXTS)
    bits = 64 if field.cpp_type in (kinds.CPPTYPE_INT64, kinds.CPPTYPE_UINT64) else 32
    number = draw.choice(_INTEGERS) % 2**bits
    signed = field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64)
    return number - 2**bits if signed and number >= 2 ** (bits - 1) else number
