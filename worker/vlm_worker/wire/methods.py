"""Every RPC of worker.proto, read from its descriptors: path, kind, how messages become bytes.

Streams of `Frame` carry the frame's own bytes, without protobuf around them (wire/frames.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from google.protobuf import message_factory
from google.protobuf.message import Message

from vlm_worker.pb import worker_pb2 as pb

PACKAGE = "vlm.v1"


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """One RPC; the four functions are what gRPC calls serializers."""

    service: str
    name: str
    client_streaming: bool
    server_streaming: bool
    request_to_bytes: Callable[[Any], bytes]
    request_from_bytes: Callable[[bytes], Any]
    response_to_bytes: Callable[[Any], bytes]
    response_from_bytes: Callable[[bytes], Any]

    @property
    def path(self) -> str:
        """As in the HTTP/2 header."""
        return f"/{PACKAGE}.{self.service}/{self.name}"


def _methods() -> dict[str, Method]:
    found = {}
    for service_name, service in pb.DESCRIPTOR.services_by_name.items():
        for method in service.methods:
            request_to, request_from = _codec(method.input_type)
            response_to, response_from = _codec(method.output_type)
            found[method.name] = Method(
                service=service_name,
                name=method.name,
                client_streaming=method.client_streaming,
                server_streaming=method.server_streaming,
                request_to_bytes=request_to,
                request_from_bytes=request_from,
                response_to_bytes=response_to,
                response_from_bytes=response_from,
            )
    return found


def _codec(descriptor: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    if descriptor.name == pb.Frame.DESCRIPTOR.name:
        return _same, _same
    message: type[Message] = message_factory.GetMessageClass(descriptor)
    return message.SerializeToString, message.FromString


def _same(data: bytes) -> bytes:
    return data


METHODS = _methods()
"""By name: names are unique across the services."""
