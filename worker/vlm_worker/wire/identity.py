"""Converts Hello, load reports, Cancel, leases and fetches between protobuf and values."""

from __future__ import annotations

from vlm_worker.errors import IncompatibleError, InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import RequestKey, Role, Stage
from vlm_worker.wire import checks, messages
from vlm_worker.wire.values import key_of

MAX_INVITATION_BYTES = 64


def hello_to(hello: messages.Hello) -> pb.HelloReply:
    """The message of a Hello."""
    return pb.HelloReply(
        protocol_version=messages.PROTOCOL_VERSION,
        role=hello.role.value,
        stages=sorted(stage.value for stage in hello.stages),
        model=hello.model,
        model_revision=hello.model_revision,
        pod_name=hello.pod_name,
        pod_uid=hello.pod_uid,
        boot_id=hello.boot_id,
        layout_fingerprint=hello.layout_fingerprint,
        embed_fingerprint=hello.embed_fingerprint,
        compat=hello.compat,
        weights=hello.weights,
        limits=pb.Limits(
            block_size_tokens=hello.limits.block_size,
            kv_capacity_tokens=hello.limits.kv_capacity_tokens,
            max_model_len_tokens=hello.limits.max_model_len,
            max_requests=hello.limits.max_requests,
        ),
    )


def hello_of(message: pb.HelloReply) -> messages.Hello:
    """A Hello; IncompatibleError for another protocol version or an unknown role."""
    if message.protocol_version != messages.PROTOCOL_VERSION:
        raise IncompatibleError(
            f"{message.pod_name} speaks protocol {message.protocol_version}, "
            f"this is {messages.PROTOCOL_VERSION}"
        )
    try:
        role = Role(message.role)
        stages = frozenset(Stage(stage) for stage in message.stages)
    except ValueError as error:
        raise IncompatibleError(f"{message.pod_name}: {error}") from error
    return messages.Hello(
        role=role,
        stages=stages,
        model=checks.text(message.model, "model", checks.MAX_TEXT),
        model_revision=checks.text(message.model_revision, "model_revision", checks.MAX_TEXT),
        pod_name=checks.text(message.pod_name, "pod_name", checks.MAX_TEXT),
        pod_uid=checks.text(message.pod_uid, "pod_uid", checks.MAX_TEXT),
        boot_id=checks.fixed_bytes(message.boot_id, "boot_id", (16,)),
        layout_fingerprint=checks.fixed_bytes(message.layout_fingerprint, "fingerprint", (0, 16)),
        embed_fingerprint=checks.fixed_bytes(message.embed_fingerprint, "fingerprint", (0, 16)),
        compat=checks.text(message.compat, "compat", checks.MAX_TEXT),
        weights=checks.text(message.weights, "weights", checks.MAX_LABEL),
        limits=messages.Limits(
            block_size=_limit(message.limits, "block_size_tokens", checks.MAX_TOKENS),
            kv_capacity_tokens=_limit(message.limits, "kv_capacity_tokens", checks.MAX_COUNT),
            max_model_len=_limit(message.limits, "max_model_len_tokens", checks.MAX_TOKENS),
            max_requests=_limit(message.limits, "max_requests", checks.MAX_TOKENS),
        ),
    )


def load_to(load: messages.Load) -> pb.LoadReply:
    """The message of a load report."""
    return pb.LoadReply(
        num_inflight=load.num_inflight,
        num_waiting=load.num_waiting,
        work_queued_seconds=load.work_queued_seconds,
        kv_free_tokens=load.kv_free_tokens,
        kv_capacity_tokens=load.kv_capacity_tokens,
        accepting=load.accepting,
        boot_id=load.boot_id,
    )


def load_of(message: pb.LoadReply) -> messages.Load:
    """A load report."""
    return messages.Load(
        num_inflight=message.num_inflight,
        num_waiting=message.num_waiting,
        work_queued_seconds=checks.bounded_float(
            message.work_queued_seconds, "work_queued_seconds", checks.MAX_COUNT
        ),
        kv_free_tokens=_limit(message, "kv_free_tokens", checks.MAX_COUNT),
        kv_capacity_tokens=_limit(message, "kv_capacity_tokens", checks.MAX_COUNT),
        accepting=message.accepting,
        boot_id=checks.fixed_bytes(message.boot_id, "boot_id", (16,)),
    )


def _limit(message: pb.Limits | pb.LoadReply, name: str, maximum: int) -> int:
    return checks.bounded_int(getattr(message, name), name, 0, maximum)


def cancel_call_of(message: pb.CancelRequest) -> RequestKey:
    """The request and attempt that a Cancel is for."""
    return RequestKey(
        checks.identifier(message.request_id, "request_id"),
        checks.bounded_int(message.attempt, "attempt", 0, checks.MAX_ATTEMPT),
    )


def cancel_reply_of(message: pb.CancelReply) -> messages.CancelOutcome:
    """The outcome of a Cancel."""
    try:
        return messages.CancelOutcome(message.outcome)
    except ValueError:
        raise InvalidRequestError(f"outcome {message.outcome} is unknown") from None


def renew_call_of(message: pb.RenewLeasesRequest) -> tuple[bytes, list[str]]:
    """Boot id of the producer's incarnation, and the ids of the leases to renew."""
    checks.bounded_int(len(message.transfer_ids), "transfer_ids", 0, checks.MAX_IDS)
    ids = [checks.identifier(name, "transfer_ids") for name in message.transfer_ids]
    return checks.fixed_bytes(message.boot_id, "boot_id", (16,)), ids


def renew_reply_of(message: pb.RenewLeasesReply) -> frozenset[str]:
    """The ids of leases that are gone."""
    checks.bounded_int(len(message.gone), "gone", 0, checks.MAX_IDS)
    return frozenset(checks.identifier(name, "gone") for name in message.gone)


def release_call_of(message: pb.ReleaseLeaseRequest) -> tuple[bytes, str]:
    """Boot id of the producer's incarnation, and the id of the lease to release."""
    boot_id = checks.fixed_bytes(message.boot_id, "boot_id", (16,))
    return boot_id, checks.identifier(message.transfer_id, "transfer_id")


def fetch_call_to(call: messages.FetchCall) -> pb.FetchRequest:
    """The message of a fetch."""
    return pb.FetchRequest(
        transfer_id=call.transfer_id,
        boot_id=call.boot_id,
        fingerprint=call.fingerprint,
        request_id=call.key.request_id,
        attempt=call.key.attempt,
        first_unit=call.first_unit,
        transport=call.transport,
        invitation=call.invitation,
    )


def fetch_call_of(message: pb.FetchRequest) -> messages.FetchCall:
    """A fetch."""
    return messages.FetchCall(
        transfer_id=checks.identifier(message.transfer_id, "transfer_id"),
        boot_id=checks.fixed_bytes(message.boot_id, "boot_id", (16,)),
        fingerprint=checks.fixed_bytes(message.fingerprint, "fingerprint", (0, 16)),
        key=key_of(message),
        first_unit=checks.bounded_int(message.first_unit, "first_unit", 0, checks.MAX_TOKENS),
        transport=checks.text(message.transport, "transport", checks.MAX_LABEL),
        invitation=checks.at_most(message.invitation, "invitation", MAX_INVITATION_BYTES),
    )
