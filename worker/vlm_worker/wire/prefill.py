"""Converts Prefill between protobuf and values."""

from __future__ import annotations

from vlm_worker.errors import InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.wire import checks, messages, sampling, values


def prefill_call_of(message: pb.PrefillRequest) -> messages.PrefillCall:
    """A Prefill call."""
    return messages.PrefillCall(
        request=values.request_of(message),
        transfer_id=checks.identifier(message.transfer_id, "transfer_id"),
        sources=tuple(values.source_of(item.source) for item in message.items),
        handoff=message.handoff,
        last_resort=message.last_resort,
    )


def prefill_call_to(call: messages.PrefillCall) -> pb.PrefillRequest:
    """The message of a Prefill call."""
    request = call.request
    assert not request.adapter, "no message carries one"
    return pb.PrefillRequest(
        request_id=request.key.request_id,
        attempt=request.key.attempt,
        transfer_id=call.transfer_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        items=values.items_to(request, call.sources),
        sampling=sampling.sampling_to(request.sampling),
        cache_salt=request.cache_salt,
        last_resort=call.last_resort,
        handoff=call.handoff,
        priority=request.priority,
    )


def prefill_reply_to(reply: messages.Reply[messages.PrefillEvent]) -> pb.PrefillReply:
    """The message of a prefill worker's reply."""
    message = pb.PrefillReply(
        spans=values.spans_to(reply.spans), clock_us=values.micros(reply.clock)
    )
    event = reply.event
    if isinstance(event, messages.Accepted):
        accepted = pb.PrefillAccepted(
            transfer_id=event.transfer_id,
            boot_id=event.boot_id,
            layout_fingerprint=event.layout_fingerprint,
            lease_milliseconds=round(event.lease_seconds * 1000),
        )
        message.accepted.CopyFrom(accepted)
    elif isinstance(event, messages.FirstToken):
        first = pb.FirstToken(
            index=event.index,
            token_id=event.token_id,
            num_cached_tokens=event.num_cached_tokens,
            finish_reason=event.finish_reason.value if event.finish_reason else "",
            logprobs=sampling.logprobs_to(event.logprobs) if event.logprobs else None,
        )
        message.first_token.CopyFrom(first)
    else:
        message.done.CopyFrom(pb.PrefillDone())
    return message


def prefill_reply_of(message: pb.PrefillReply) -> messages.Reply[messages.PrefillEvent]:
    """A prefill worker's reply."""
    event: messages.PrefillEvent
    kind = message.WhichOneof("kind")
    if kind == "accepted":
        accepted = message.accepted
        event = messages.Accepted(
            transfer_id=checks.identifier(accepted.transfer_id, "transfer_id"),
            boot_id=checks.fixed_bytes(accepted.boot_id, "boot_id", (16,)),
            layout_fingerprint=checks.fixed_bytes(
                accepted.layout_fingerprint, "layout_fingerprint", (16,)
            ),
            lease_seconds=values.lease_of(accepted.lease_milliseconds),
        )
    elif kind == "first_token":
        first = message.first_token
        event = messages.FirstToken(
            index=checks.bounded_int(first.index, "first_token.index", 0, checks.MAX_TOKENS),
            token_id=checks.bounded_int(
                first.token_id, "first_token.token_id", 0, checks.MAX_TOKEN_ID
            ),
            num_cached_tokens=checks.bounded_int(
                first.num_cached_tokens, "first_token.num_cached_tokens", 0, checks.MAX_TOKENS
            ),
            finish_reason=values.finish_of(first.finish_reason) if first.finish_reason else None,
            logprobs=(sampling.logprobs_of(first.logprobs) if first.HasField("logprobs") else None),
        )
    elif kind == "done":
        event = messages.PrefillDone()
    else:
        raise InvalidRequestError("a reply of prefill says accepted, first_token or done")
    return messages.Reply(
        event, values.spans_of(message.spans), values.seconds_of(message.clock_us, "clock_us")
    )
