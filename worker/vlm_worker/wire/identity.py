"""pb <-> values, for the calls that ask: who is there, how busy, and for what is fetched."""

from __future__ import annotations

from vlm_worker.errors import IncompatibleError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import Role, Stage
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
        model=message.model,
        model_revision=message.model_revision,
        pod_name=message.pod_name,
        pod_uid=message.pod_uid,
        boot_id=checks.octets(message.boot_id, "boot_id", (16,)),
        layout_fingerprint=checks.octets(message.layout_fingerprint, "fingerprint", (0, 16)),
        embed_fingerprint=checks.octets(message.embed_fingerprint, "fingerprint", (0, 16)),
        compat=message.compat,
        limits=calls.Limits(
            block_size=message.limits.block_size_tokens,
            kv_capacity_tokens=message.limits.kv_capacity_tokens,
            max_model_len=message.limits.max_model_len_tokens,
            max_requests=message.limits.max_requests,
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
        work_queued_seconds=message.work_queued_seconds,
        kv_free_tokens=message.kv_free_tokens,
        kv_capacity_tokens=message.kv_capacity_tokens,
        accepting=message.accepting,
        boot_id=message.boot_id,
    )


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
        first_unit=message.first_unit,
        transport=checks.text(message.transport, "transport", checks.MAX_LABEL),
        invitation=checks.at_most(message.invitation, "invitation", MAX_INVITATION_BYTES),
    )
