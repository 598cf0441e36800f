"""pb <-> values, for the calls that ask: who is there, how busy, and for what is fetched."""

from __future__ import annotations

from vlm_worker.errors import IncompatibleError, InvalidRequestError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import RequestKey, Role, Stage
from vlm_worker.wire import calls, checks
from vlm_worker.wire.values import key_of

MAX_INVITATION_BYTES = 64


def hello_to(hello: calls.Hello) -> pb.HelloReply:
    """The message of a Hello."""
    return pb.HelloReply(
        protocol_version=calls.PROTOCOL_VERSION,
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


def hello_of(message: pb.HelloReply) -> calls.Hello:
    """A Hello; IncompatibleError where the other speaks another protocol or an unknown role."""
    if message.protocol_version != calls.PROTOCOL_VERSION:
        raise IncompatibleError(
            f"{message.pod_name} speaks protocol {message.protocol_version}, "
            f"this is {calls.PROTOCOL_VERSION}"
        )
    try:
        role = Role(message.role)
        stages = frozenset(Stage(stage) for stage in message.stages)
    except ValueError as error:
        raise IncompatibleError(f"{message.pod_name}: {error}") from error
    return calls.Hello(
        role=role,
        stages=stages,
        model=checks.text(message.model, "model", checks.MAX_TEXT),
        model_revision=checks.text(message.model_revision, "model_revision", checks.MAX_TEXT),
        pod_name=checks.text(message.pod_name, "pod_name", checks.MAX_TEXT),
        pod_uid=checks.text(message.pod_uid, "pod_uid", checks.MAX_TEXT),
        boot_id=checks.octets(message.boot_id, "boot_id", (16,)),
        layout_fingerprint=checks.octets(message.layout_fingerprint, "fingerprint", (0, 16)),
        embed_fingerprint=checks.octets(message.embed_fingerprint, "fingerprint", (0, 16)),
        compat=checks.text(message.compat, "compat", checks.MAX_TEXT),
        weights=checks.text(message.weights, "weights", checks.MAX_LABEL),
        limits=calls.Limits(
            block_size=_limit(message.limits, "block_size_tokens", checks.MAX_TOKENS),
            kv_capacity_tokens=_limit(message.limits, "kv_capacity_tokens", checks.MAX_COUNT),
            max_model_len=_limit(message.limits, "max_model_len_tokens", checks.MAX_TOKENS),
            max_requests=_limit(message.limits, "max_requests", checks.MAX_TOKENS),
        ),
    )


def load_to(load: calls.Load) -> pb.LoadReply:
    """The message of a load."""
    return pb.LoadReply(
        num_inflight=load.num_inflight,
        num_waiting=load.num_waiting,
        work_queued_seconds=load.work_queued_seconds,
        kv_free_tokens=load.kv_free_tokens,
        kv_capacity_tokens=load.kv_capacity_tokens,
        accepting=load.accepting,
        boot_id=load.boot_id,
    )


def load_of(message: pb.LoadReply) -> calls.Load:
    """A load."""
    return calls.Load(
        num_inflight=message.num_inflight,
        num_waiting=message.num_waiting,
        work_queued_seconds=checks.measure(
            message.work_queued_seconds, "work_queued_seconds", checks.MAX_COUNT
        ),
        kv_free_tokens=_limit(message, "kv_free_tokens", checks.MAX_COUNT),
        kv_capacity_tokens=_limit(message, "kv_capacity_tokens", checks.MAX_COUNT),
        accepting=message.accepting,
        boot_id=checks.octets(message.boot_id, "boot_id", (16,)),
    )


def _limit(message: pb.Limits | pb.LoadReply, name: str, most: int) -> int:
    return checks.between(getattr(message, name), name, 0, most)


def cancel_call_of(message: pb.CancelRequest) -> RequestKey:
    """Whom a Cancel is for."""
    return RequestKey(
        checks.identifier(message.request_id, "request_id"),
        checks.between(message.attempt, "attempt", 0, checks.MAX_ATTEMPT),
    )


def cancel_reply_of(message: pb.CancelReply) -> calls.CancelOutcome:
    """What became of it."""
    try:
        return calls.CancelOutcome(message.outcome)
    except ValueError:
        raise InvalidRequestError(f"outcome {message.outcome} is unknown") from None


def renew_call_of(message: pb.RenewLeasesRequest) -> tuple[bytes, list[str]]:
    """Of which life, and which leases."""
    checks.between(len(message.transfer_ids), "transfer_ids", 0, checks.MAX_IDS)
    ids = [checks.identifier(name, "transfer_ids") for name in message.transfer_ids]
    return checks.octets(message.boot_id, "boot_id", (16,)), ids


def renew_reply_of(message: pb.RenewLeasesReply) -> frozenset[str]:
    """Which of them are gone."""
    checks.between(len(message.gone), "gone", 0, checks.MAX_IDS)
    return frozenset(checks.identifier(name, "gone") for name in message.gone)


def release_call_of(message: pb.ReleaseLeaseRequest) -> tuple[bytes, str]:
    """Of which life, and which lease."""
    boot_id = checks.octets(message.boot_id, "boot_id", (16,))
    return boot_id, checks.identifier(message.transfer_id, "transfer_id")


def fetch_call_to(call: calls.FetchCall) -> pb.FetchRequest:
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


def fetch_call_of(message: pb.FetchRequest) -> calls.FetchCall:
    """A fetch."""
    return calls.FetchCall(
        transfer_id=checks.identifier(message.transfer_id, "transfer_id"),
        boot_id=checks.octets(message.boot_id, "boot_id", (16,)),
        fingerprint=checks.octets(message.fingerprint, "fingerprint", (0, 16)),
        key=key_of(message),
        first_unit=checks.between(message.first_unit, "first_unit", 0, checks.MAX_TOKENS),
        transport=checks.text(message.transport, "transport", checks.MAX_LABEL),
        invitation=checks.at_most(message.invitation, "invitation", MAX_INVITATION_BYTES),
    )
