"""Converts errors to gRPC statuses and back: a client raises what the server raised.

The trailing metadata names the error class and carries its fields. The status code alone is for
other tools. A status without that metadata comes from gRPC itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from vlm_worker.errors import (
    CancelledError,
    ContextTooLongError,
    CorruptTransferError,
    DrainingError,
    DuplicateError,
    EngineError,
    GoneError,
    IncompatibleError,
    InvalidImageError,
    InvalidRequestError,
    OverloadedError,
    PeerLostError,
    UnauthorizedError,
    WorkerError,
)

_CODES: dict[type[WorkerError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    ContextTooLongError: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidImageError: grpc.StatusCode.INVALID_ARGUMENT,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DrainingError: grpc.StatusCode.UNAVAILABLE,
    PeerLostError: grpc.StatusCode.UNAVAILABLE,
    GoneError: grpc.StatusCode.NOT_FOUND,
    DuplicateError: grpc.StatusCode.ALREADY_EXISTS,
    IncompatibleError: grpc.StatusCode.FAILED_PRECONDITION,
    UnauthorizedError: grpc.StatusCode.PERMISSION_DENIED,
    CorruptTransferError: grpc.StatusCode.DATA_LOSS,
    CancelledError: grpc.StatusCode.CANCELLED,
    EngineError: grpc.StatusCode.INTERNAL,
}
_BY_NAME = {kind.__name__: kind for kind in _CODES}
# bytes: all metadata together must stay below gRPC's 8 KiB, percent-encoded
_MAX_MESSAGE = 700
_MAX_FIELD = 300
_RETRY_AFTER_SECONDS = 1.0

# "-bin" values may hold any bytes; others only printable ASCII
_KIND = "vlm-error"
_PARAM = "vlm-param-bin"
_CODE = "vlm-code-bin"
_ITEM = "vlm-item"
_RETRY_AFTER = "vlm-retry-after-ms"

Metadata = tuple[tuple[str, str | bytes], ...]


def status_of(error: Exception) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailing metadata. An error that is no WorkerError becomes INTERNAL."""
    if not isinstance(error, WorkerError):
        error = EngineError(f"{type(error).__name__}: {error}")
    kind = next(k for k in type(error).__mro__ if k in _CODES or k is WorkerError)
    if kind is WorkerError:
        kind = EngineError
    metadata: list[tuple[str, str | bytes]] = [(_KIND, kind.__name__)]
    if isinstance(error, InvalidRequestError):
        if error.param is not None:
            metadata.append((_PARAM, error.param.encode()[:_MAX_FIELD]))
        if error.code is not None:
            metadata.append((_CODE, error.code.encode()[:_MAX_FIELD]))
    if isinstance(error, InvalidImageError):
        metadata.append((_ITEM, str(error.item)))
    if isinstance(error, OverloadedError):
        metadata.append((_RETRY_AFTER, str(round(error.retry_after_seconds * 1000))))
    return _CODES[kind], _cut(str(error)), tuple(metadata)


def error_of(
    code: grpc.StatusCode, message: str, metadata: Iterable[tuple[str, Any]], *, peer: str = "peer"
) -> WorkerError:
    message = message[:_MAX_MESSAGE]
    fields = dict(metadata)
    kind = _BY_NAME.get(str(fields.get(_KIND, "")))
    if kind is None:
        return _of_transport(code, message, peer=peer)
    if kind is InvalidImageError:
        item = _number(fields.get(_ITEM))
        return InvalidImageError(message, item=item, code=_text(fields.get(_CODE)) or "")
    if kind is ContextTooLongError:
        return ContextTooLongError(message, param=_text(fields.get(_PARAM)))
    if kind is InvalidRequestError:
        return InvalidRequestError(
            message, param=_text(fields.get(_PARAM)), code=_text(fields.get(_CODE))
        )
    if kind is OverloadedError:
        return OverloadedError(
            message, retry_after_seconds=_number(fields.get(_RETRY_AFTER)) / 1000
        )
    return kind(message)


def error_of_call(error: Any, *, peer: str) -> WorkerError:
    """As `error_of`, for a `grpc.aio.AioRpcError`."""
    return error_of(error.code(), error.details() or "", error.trailing_metadata() or (), peer=peer)


def _of_transport(code: grpc.StatusCode, message: str, *, peer: str) -> WorkerError:
    text = f"{peer}: {code.name}: {message}"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return OverloadedError(text, retry_after_seconds=_RETRY_AFTER_SECONDS)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return IncompatibleError(text)
    if code is grpc.StatusCode.CANCELLED:
        return CancelledError(text)
    return PeerLostError(text)


def _cut(text: str) -> str:
    return text.encode(errors="replace")[:_MAX_MESSAGE].decode(errors="ignore")


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else None


def _number(value: Any) -> int:
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else 0
