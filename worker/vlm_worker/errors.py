"""The worker's error hierarchy, with who must act; `wire` maps it to gRPC statuses and back.

WorkerError
├── InvalidRequestError     the caller: the request can never succeed      INVALID_ARGUMENT
│   ├── ContextTooLongError     the prompt does not fit, with the numbers
│   └── InvalidImageError       one image, by index
├── OverloadedError         the caller: retry later                        RESOURCE_EXHAUSTED
├── DrainingError           the caller: retry on another worker            UNAVAILABLE
├── PeerLostError           the caller: retry, the peer is lost            UNAVAILABLE
├── GoneError               the caller: start over, the handle is void     NOT_FOUND
├── DuplicateError          the caller: (request_id, attempt) was used     ALREADY_EXISTS
├── IncompatibleError       the operator: fingerprints differ, no retry    FAILED_PRECONDITION
├── UnauthorizedError       the operator: the peer's identity may not      PERMISSION_DENIED
├── CorruptTransferError    the caller: fetch again or recompute           DATA_LOSS
├── CancelledError          no one: the caller cancelled it                CANCELLED
└── EngineError             the developer: a defect, or a lost device      INTERNAL
"""

from __future__ import annotations

import enum


class WorkerError(Exception):
    """Base class of all errors that this package raises on purpose."""


class InvalidRequestError(WorkerError):
    """The request can never succeed as sent."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLongError(InvalidRequestError):
    """The prompt and the requested answer exceed the context."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class InvalidImageError(InvalidRequestError):
    """One image cannot be used."""

    def __init__(self, message: str, *, item: int, code: str = "invalid_image") -> None:
        super().__init__(message, code=code)
        self.item = item


class OverloadedError(WorkerError):
    """A limit is reached now; a retry may succeed."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DrainingError(WorkerError):
    """This worker accepts no new work."""


class PeerLostError(WorkerError):
    """A peer died, froze or closed the stream too early."""


class GoneError(WorkerError):
    """The handle is unknown, expired, or of an earlier incarnation."""


class DuplicateError(WorkerError):
    """This (request_id, attempt) was seen before."""


class IncompatibleError(WorkerError):
    """The two sides disagree about layout, model or protocol."""


class Refusal(enum.StrEnum):
    """The check of a transfer that failed."""

    SIZE = "size"
    DIGEST = "digest"
    EPOCH = "epoch"  # of another pod, or of another incarnation of this one
    IDENTITY = "identity"  # of another request, attempt or transfer
    LAYOUT = "layout"
    SEQUENCE = "sequence"
    RANGE = "range"
    MEMORY = "memory"  # exposed memory is missing, or not as announced
    COMMIT = "commit"
    CONTENT = "content"


class CorruptTransferError(WorkerError):
    """A transfer failed a check: of digest, identity, order, range or commit."""

    def __init__(self, message: str, *, refusal: Refusal = Refusal.CONTENT) -> None:
        super().__init__(message)
        self.refusal = refusal


class UnauthorizedError(WorkerError):
    """The identity of the caller may not call the method."""


class CancelledError(WorkerError):
    """The caller cancelled the request."""


class EngineError(WorkerError):
    """The engine failed; the request is valid."""
