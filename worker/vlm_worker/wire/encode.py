"""Converts Encode between protobuf and values."""

from __future__ import annotations

from vlm_worker.errors import InvalidImageError, InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.wire import checks, messages, values


def encode_call_of(message: pb.EncodeBegin) -> messages.EncodeCall:
    """The values of the first message of an Encode stream."""
    checks.bounded_int(len(message.items), "items", 1, checks.MAX_ITEMS)
    if len({item.transfer_id for item in message.items}) < len(message.items):
        raise InvalidRequestError("items.transfer_id must be another for each item")
    for index, item in enumerate(message.items):
        if item.num_bytes > checks.MAX_IMAGE_BYTES:
            raise InvalidImageError(
                f"the image has {item.num_bytes} bytes; at most {checks.MAX_IMAGE_BYTES} are "
                "accepted",
                item=index,
                code="image_too_large",
            )
    return messages.EncodeCall(
        key=values.key_of(message),
        items=tuple(
            messages.EncodeItem(
                transfer_id=checks.identifier(item.transfer_id, "items.transfer_id"),
                num_bytes=checks.bounded_int(
                    item.num_bytes, "items.num_bytes", 1, checks.MAX_IMAGE_BYTES
                ),
                width=checks.bounded_int(item.width, "items.width", 0, checks.MAX_SIDE),
                height=checks.bounded_int(item.height, "items.height", 0, checks.MAX_SIDE),
                num_tokens=checks.bounded_int(
                    item.num_tokens, "items.num_tokens", 0, checks.MAX_TOKENS
                ),
                max_pixels=checks.bounded_int(
                    item.max_pixels, "items.max_pixels", 0, checks.MAX_PIXELS
                ),
                format=checks.text(item.format, "items.format", checks.MAX_LABEL),
            )
            for item in message.items
        ),
        cache_salt=checks.fixed_bytes(message.cache_salt, "cache_salt", values.SALTS),
        last_resort=message.last_resort,
        skip_corrupt=message.on_corrupt == "Skip",
        priority=values.priority_of(message),
    )


def encode_call_to(call: messages.EncodeCall) -> pb.EncodeRequest:
    """The first message of an Encode stream."""
    return pb.EncodeRequest(
        begin=pb.EncodeBegin(
            request_id=call.key.request_id,
            attempt=call.key.attempt,
            items=[
                pb.EncodeItem(
                    transfer_id=item.transfer_id,
                    num_bytes=item.num_bytes,
                    width=item.width,
                    height=item.height,
                    num_tokens=item.num_tokens,
                    max_pixels=item.max_pixels,
                    format=item.format,
                )
                for item in call.items
            ],
            cache_salt=call.cache_salt,
            last_resort=call.last_resort,
            on_corrupt="Skip" if call.skip_corrupt else "Reject",
            priority=call.priority,
        )
    )


def encode_reply_to(reply: messages.Reply[messages.EncodeEvent]) -> pb.EncodeReply:
    """The message of an encoder's reply."""
    message = pb.EncodeReply(
        spans=values.spans_to(reply.spans), clock_us=values.micros(reply.clock)
    )
    event = reply.event
    if isinstance(event, messages.Decoded):
        message.decoded.CopyFrom(pb.Decoded(items=[_decoded_item_to(item) for item in event.items]))
    elif isinstance(event, messages.ItemReady):
        message.ready.CopyFrom(
            pb.ItemReady(item=event.item, cache_hit=event.cache_hit, num_bytes=event.num_bytes)
        )
    else:
        error = pb.ItemError(code=event.code, message=event.message[: checks.MAX_TEXT])
        message.failed.CopyFrom(pb.ItemFailed(item=event.item, error=error))
    return message


def encode_reply_of(message: pb.EncodeReply) -> messages.Reply[messages.EncodeEvent]:
    """An encoder's reply."""
    event: messages.EncodeEvent
    kind = message.WhichOneof("kind")
    if kind == "decoded":
        items = message.decoded.items
        checks.bounded_int(len(items), "decoded.items", 1, checks.MAX_ITEMS)
        event = messages.Decoded(tuple(_decoded_item_of(item, i) for i, item in enumerate(items)))
    elif kind == "ready":
        ready = message.ready
        event = messages.ItemReady(
            checks.bounded_int(ready.item, "ready.item", 0, checks.MAX_ITEMS - 1),
            cache_hit=ready.cache_hit,
            num_bytes=checks.bounded_int(ready.num_bytes, "ready.num_bytes", 0, checks.MAX_BYTES),
        )
    elif kind == "failed":
        item = checks.bounded_int(message.failed.item, "failed.item", 0, checks.MAX_ITEMS - 1)
        event = messages.ItemFailed(item, *_error_of(message.failed.error))
    else:
        raise InvalidRequestError("a reply of an encoder says decoded, ready or failed")
    return messages.Reply(
        event, values.spans_of(message.spans), values.seconds_of(message.clock_us, "clock_us")
    )


def _error_of(message: pb.ItemError) -> tuple[str, str]:
    return (
        checks.text(message.code, "error.code", checks.MAX_LABEL),
        checks.text(message.message, "error.message", checks.MAX_TEXT),
    )


def _decoded_item_to(item: messages.DecodedItem) -> pb.DecodedItem:
    if item.error is not None:
        error = pb.ItemError(code=item.error.code or "", message=str(item.error)[: checks.MAX_TEXT])
        return pb.DecodedItem(error=error)
    return pb.DecodedItem(
        num_tokens=item.num_tokens, grid_thw=item.grid_thw, image_key=item.image_key
    )


def _decoded_item_of(message: pb.DecodedItem, index: int) -> messages.DecodedItem:
    if message.HasField("error"):
        code, text = _error_of(message.error)
        error = InvalidImageError(text, item=index, code=code)
        return messages.DecodedItem(0, (0, 0, 0), b"", error)
    return messages.DecodedItem(
        num_tokens=checks.bounded_int(message.num_tokens, "num_tokens", 1, checks.MAX_TOKENS),
        grid_thw=checks.grid(message.grid_thw, "grid_thw"),
        image_key=checks.fixed_bytes(message.image_key, "image_key", (32,)),
    )
