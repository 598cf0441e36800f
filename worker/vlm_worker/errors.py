"""The worker's error tree. Each class says who must act; `wire` maps it to a gRPC status and back.

WorkerError
├── InvalidRequestError     the caller: this can never succeed as sent     INVALID_ARGUMENT
│   ├── ContextTooLongError     the prompt does not fit, with the numbers
│   └── InvalidImageError       one picture, by index
├── OverloadedError         the caller: later                              RESOURCE_EXHAUSTED
├── DrainingError           the caller: elsewhere                          UNAVAILABLE
├── PeerLostError           the caller: elsewhere, the peer is gone        UNAVAILABLE
├── GoneError               the caller: start over, the handle is void     NOT_FOUND
├── DuplicateError          the caller: (request_id, attempt) was used     ALREADY_EXISTS
├── IncompatibleError       nobody: fingerprints differ, for good          FAILED_PRECONDITION
├── CorruptTransferError    the caller: fetch again or recompute           DATA_LOSS
├── CancelledError          nobody: the caller asked for it                CANCELLED
└── EngineError             us: a defect or a lost device                  INTERNAL
"""

from __future__ import annotations

import enum


class WorkerError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidRequestError(WorkerError):
    """The request can never succeed as sent."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLongError(InvalidRequestError):
    """The prompt and the answer asked for do not fit."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class InvalidImageError(InvalidRequestError):
    """One picture cannot be used."""

    def __init__(self, message: str, *, item: int, code: str = "invalid_image") -> None:
        super().__init__(message, code=code)
        self.item = item


class OverloadedError(WorkerError):
    """There is no room now."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DrainingError(WorkerError):
    """This worker takes no new work."""


class PeerLostError(WorkerError):
    """A peer died, froze or closed the stream too early."""


class GoneError(WorkerError):
    """The handle is unknown, expired, or of an earlier life."""


class DuplicateError(WorkerError):
    """This (request_id, attempt) was seen before."""


class IncompatibleError(WorkerError):
    """The two sides disagree about layout, model or protocol."""


class Refusal(enum.StrEnum):
    """What of a transfer was not as it had to be."""

    SIZE = "size"
    DIGEST = "digest"
    EPOCH = "epoch"  # of another pod, or of another life of it
    IDENTITY = "identity"  # of another request, attempt or transfer
    LAYOUT = "layout"
    SEQUENCE = "sequence"
    RANGE = "range"
    MEMORY = "memory"  # shared memory is not there, or not as promised
    COMMIT = "commit"
    CONTENT = "content"


class CorruptTransferError(WorkerError):
    """A transfer failed a check: of digest, identity, order, range or commit."""

    def __init__(self, message: str, *, refusal: Refusal = Refusal.CONTENT) -> None:
        super().__init__(message)
        self.refusal = refusal


class CancelledError(WorkerError):
    """The caller cancelled the request."""


class EngineError(WorkerError):
    """The engine failed; not the request's fault."""
