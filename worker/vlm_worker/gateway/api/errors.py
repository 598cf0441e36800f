"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, never a 422.

Messages are ours to the last word: no text of a library, no path, no address reaches a client.
"""

from __future__ import annotations

import math
from typing import Any, Final

from vlm_worker import errors as worker_errors

ENCODER_RETRY_SECONDS: Final = 10.0
"""When to come back to a service without encoders: to start one takes longer than a moment."""


class ApiError(Exception):
    """What the client is told.

    Attributes:
        status: the HTTP status.
        kind: OpenAI's `type`.
        param: the part of the request at fault, `messages[1].content[2].image_url`.
        code: a stable word for programs.
        retry_after_seconds: sent as `Retry-After`, rounded up.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body; all four keys, always."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the body's own."""
        if self.retry_after_seconds is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_seconds)))}

    @property
    def outcome(self) -> str:
        """The `outcome` label of `vlm_requests_total`."""
        if self.status == 429:
            return "rejected"
        return "invalid" if self.status < 500 else "error"


def invalid(message: str, *, param: str | None, code: str | None = None) -> ApiError:
    """400: the request can never succeed as sent."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400: OpenAI knows the parameter, this server does not act on it and says so."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def too_large(message: str, *, param: str | None, code: str) -> ApiError:
    """413: more bytes than the limit."""
    return ApiError(413, message, param=param, code=code)


def unauthorized() -> ApiError:
    """401, without saying whether a key was missing or wrong."""
    return ApiError(
        401,
        "This server needs a key that it knows: send the header 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
    )


def unavailable(message: str, *, retry_after_seconds: float = 1.0) -> ApiError:
    """503: nobody can do it now."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code="service_unavailable",
        retry_after_seconds=retry_after_seconds,
    )


def no_encoder(*, held_seconds: float) -> ApiError:
    """503: pictures have to wait for an encoder, and the wait is over, or there is to be none."""
    why = "and this service takes no pictures until one does"
    if held_seconds > 0:
        why = f"and none came within the {held_seconds:g} seconds that a request may wait for it"
    return unavailable(
        f"No encoder runs now, {why}. Send the request again later, or without pictures.",
        retry_after_seconds=ENCODER_RETRY_SECONDS,
    )


def too_late() -> ApiError:
    """504: the client's own deadline has passed."""
    return ApiError(
        504,
        "The time that X-Request-Timeout gives this request is over.",
        kind="server_error",
        code="deadline_exceeded",
    )


def overloaded(message: str, *, retry_after_seconds: float) -> ApiError:
    """429: there is no room now."""
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="overloaded",
        retry_after_seconds=retry_after_seconds,
    )


def full(error: worker_errors.OverloadedError) -> ApiError:
    """429: a bound of this gateway; the message is its own."""
    return overloaded(str(error), retry_after_seconds=error.retry_after_seconds)


def internal(request_id: str) -> ApiError:
    """500: a defect; the log has the details under the request's id."""
    return ApiError(
        500,
        f"The server failed on this request; its log says why under {request_id}.",
        kind="server_error",
        code="internal_error",
    )


def of_worker(error: worker_errors.WorkerError, request_id: str) -> ApiError:
    """What a client is told of a worker's error that no other worker could mend."""
    match error:
        case worker_errors.InvalidRequestError():
            return invalid(str(error), param=error.param, code=error.code or "invalid_request")
        case worker_errors.OverloadedError():
            return overloaded(
                "The service has no room for this request now.",
                retry_after_seconds=error.retry_after_seconds,
            )
        case (
            worker_errors.DrainingError()
            | worker_errors.PeerLostError()
            | worker_errors.GoneError()
        ):
            return unavailable(
                "The workers of this request went away, and no other could take over."
            )
        case worker_errors.IncompatibleError():
            return unavailable("No set of workers that agree with each other is ready.")
        case _:
            return internal(request_id)
