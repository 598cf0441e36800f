"""pb <-> values of Encode, both ways."""

from __future__ import annotations

from vlm_worker.errors import InvalidImageError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.wire import calls, checks, values


def encode_call_of(message: pb.EncodeBegin) -> calls.EncodeCall:
    """The first message of an Encode stream."""
    checks.between(len(message.items), "items", 1, checks.MAX_ITEMS)
    return calls.EncodeCall(
        key=values.key_of(message),
        items=tuple(
            calls.EncodeItem(
                transfer_id=checks.identifier(item.transfer_id, "items.transfer_id"),
                num_bytes=checks.between(
                    item.num_bytes, "items.num_bytes", 1, checks.MAX_PICTURE_BYTES
                ),
                width=item.width,
                height=item.height,
                num_tokens=item.num_tokens,
                max_pixels=item.max_pixels,
                format=item.format,
            )
            for item in message.items
        ),
        cache_salt=checks.octets(message.cache_salt, "cache_salt", values.SALTS),
        last_resort=message.last_resort,
        skip_corrupt=message.on_corrupt == "Skip",
        priority=values.priority_of(message),
    )


def encode_call_to(call: calls.EncodeCall) -> pb.EncodeRequest:
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


def encode_reply_to(reply: calls.Reply[calls.EncodeEvent]) -> pb.EncodeReply:
    """The message of an encoder's reply."""
    message = pb.EncodeReply(
        spans=values.spans_to(reply.spans), clock_us=values.micros(reply.clock)
    )
    event = reply.event
    if isinstance(event, calls.Decoded):
        message.decoded.CopyFrom(pb.Decoded(items=[_decoded_item_to(item) for item in event.items]))
    elif isinstance(event, calls.ItemReady):
        message.ready.CopyFrom(
            pb.ItemReady(item=event.item, cache_hit=event.cache_hit, num_bytes=event.num_bytes)
        )
    else:
        error = pb.ItemError(code=event.code, message=event.message)
        message.failed.CopyFrom(pb.ItemFailed(item=event.item, error=error))
    return message


def encode_reply_of(message: pb.EncodeReply) -> calls.Reply[calls.EncodeEvent]:
    """An encoder's reply."""
    event: calls.EncodeEvent
    kind = message.WhichOneof("kind")
    if kind == "decoded":
        event = calls.Decoded(
            items=tuple(
                _decoded_item_of(item, index) for index, item in enumerate(message.decoded.items)
            )
        )
    elif kind == "ready":
        ready = message.ready
        event = calls.ItemReady(ready.item, cache_hit=ready.cache_hit, num_bytes=ready.num_bytes)
    else:
        failed = message.failed
        event = calls.ItemFailed(failed.item, failed.error.code, failed.error.message)
    return calls.Reply(event, values.spans_of(message.spans), message.clock_us / values.MICRO)


def _decoded_item_to(item: calls.DecodedItem) -> pb.DecodedItem:
    if item.error is not None:
        error = pb.ItemError(code=item.error.code or "", message=str(item.error))
        return pb.DecodedItem(error=error)
    return pb.DecodedItem(
        num_tokens=item.num_tokens, grid_thw=item.grid_thw, image_key=item.image_key
    )


def _decoded_item_of(message: pb.DecodedItem, index: int) -> calls.DecodedItem:
    if message.HasField("error"):
        error = InvalidImageError(message.error.message, item=index, code=message.error.code)
        return calls.DecodedItem(0, (0, 0, 0), b"", error)
    return calls.DecodedItem(
        num_tokens=message.num_tokens,
        grid_thw=checks.grid(message.grid_thw, "grid_thw"),
        image_key=checks.octets(message.image_key, "image_key", (32,)),
    )
