"""Converts Reserve and Decode between protobuf and values."""

from __future__ import annotations

from vlm_worker.errors import InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.wire import checks, messages, sampling, values


def reserve_call_of(message: pb.ReserveRequest) -> messages.ReserveCall:
    """A Reserve call."""
    return messages.ReserveCall(
        key=values.key_of(message),
        num_tokens=checks.bounded_int(message.num_tokens, "num_tokens", 1, checks.MAX_TOKENS),
        last_resort=message.last_resort,
    )


def reserve_call_to(call: messages.ReserveCall) -> pb.ReserveRequest:
    """The message of a Reserve call."""
    return pb.ReserveRequest(
        request_id=call.key.request_id,
        attempt=call.key.attempt,
        num_tokens=call.num_tokens,
        last_resort=call.last_resort,
    )


def decode_call_of(message: pb.DecodeRequest) -> messages.DecodeCall:
    """A Decode call."""
    return messages.DecodeCall(
        request=values.request_of(message),
        reservation_id=checks.identifier(message.reservation_id, "reservation_id"),
        kv=values.source_of(message.kv),
        boot_id=checks.fixed_bytes(message.boot_id, "boot_id", (16,)),
    )


def decode_call_to(call: messages.DecodeCall) -> pb.DecodeRequest:
    """The message of a Decode call."""
    request = call.request
    assert not request.adapter, "no message carries one"
    return pb.DecodeRequest(
        request_id=request.key.request_id,
        attempt=request.key.attempt,
        reservation_id=call.reservation_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        items=values.items_to(request),
        sampling=sampling.sampling_to(request.sampling),
        cache_salt=request.cache_salt,
        kv=values.source_to(call.kv),
        boot_id=call.boot_id,
        priority=request.priority,
    )


def decode_reply_to(reply: messages.Reply[messages.DecodeEvent]) -> pb.DecodeReply:
    """The message of a decode worker's reply."""
    message = pb.DecodeReply(
        spans=values.spans_to(reply.spans), clock_us=values.micros(reply.clock)
    )
    event = reply.event
    if isinstance(event, messages.Tokens):
        tokens = pb.Tokens(
            first_index=event.first_index,
            token_ids=event.token_ids,
            logprobs=map(sampling.logprobs_to, event.logprobs),
        )
        message.tokens.CopyFrom(tokens)
    else:
        finished = pb.Finished(finish_reason=event.reason.value, num_tokens=event.num_tokens)
        message.finished.CopyFrom(finished)
    return message


def decode_reply_of(message: pb.DecodeReply) -> messages.Reply[messages.DecodeEvent]:
    """A decode worker's reply."""
    event: messages.DecodeEvent
    kind = message.WhichOneof("kind")
    if kind == "tokens":
        event = _tokens_of(message.tokens)
    elif kind == "finished":
        finished = message.finished
        event = messages.Finished(
            values.finish_of(finished.finish_reason),
            checks.bounded_int(finished.num_tokens, "finished.num_tokens", 0, checks.MAX_TOKENS),
        )
    else:
        raise InvalidRequestError("a reply of decode says tokens or finished")
    return messages.Reply(
        event, values.spans_of(message.spans), values.seconds_of(message.clock_us, "clock_us")
    )


def _tokens_of(message: pb.Tokens) -> messages.Tokens:
    logprobs = tuple(map(sampling.logprobs_of, message.logprobs))
    if logprobs and len(logprobs) != len(message.token_ids):
        raise InvalidRequestError("tokens.logprobs must be one per token, or none")
    return messages.Tokens(
        checks.bounded_int(message.first_index, "tokens.first_index", 0, checks.MAX_TOKENS),
        checks.token_ids(message.token_ids, "tokens.token_ids", 1, checks.MAX_TOKENS),
        logprobs,
    )


def reservation_of(message: pb.ReserveReply) -> messages.Reservation:
    """A reservation of a decode worker."""
    return messages.Reservation(
        reservation_id=checks.identifier(message.reservation_id, "reservation_id"),
        boot_id=checks.fixed_bytes(message.boot_id, "boot_id", (16,)),
        lease_seconds=values.lease_of(message.lease_milliseconds),
    )
