"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, never a 422.

The gateway writes all messages. They contain no library text, file path or address.
"""

from __future__ import annotations

import math
from typing import Any, Final

from vlm_worker import errors as worker_errors

WAKE_RETRY_SECONDS: Final = 10.0
"""`Retry-After` of a service that starts from zero."""

ENCODER_RETRY_SECONDS: Final = 10.0
"""`Retry-After` of a service without encoders: the start of one takes a while."""


class ApiError(Exception):
    """An error response.

    Attributes:
        status: the HTTP status.
        param: the invalid part of the request, as in `messages[1].content[2].image_url`.
        code: a stable identifier for programs.
        retry_after_seconds: sent as `Retry-After`, rounded up.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body; it always has all four keys."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": "rate_limit_error" if self.status == 429 else kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers in addition to those of the body."""
        if self.retry_after_seconds is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_seconds)))}

    @property
    def outcome(self) -> str:
        """The `outcome` label of `triptych_requests_total`."""
        if self.status == 429:
            return "rejected"
        return "invalid" if self.status < 500 else "error"


def invalid(message: str, *, param: str | None, code: str | None = "invalid_value") -> ApiError:
    """400: the request can never succeed as sent."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400: OpenAI has the parameter, but this server does not support it."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unauthorized() -> ApiError:
    """401: the key is missing or wrong; the message does not distinguish them."""
    return ApiError(
        401,
        "This server needs a key that it knows: send the header 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
    )


def unavailable(message: str, *, retry_after_seconds: float = 1.0) -> ApiError:
    """503: no worker can serve the request now."""
    return ApiError(
        503, message, code="service_unavailable", retry_after_seconds=retry_after_seconds
    )


def no_encoder(*, held_seconds: float) -> ApiError:
    """503: no encoder is ready, and the wait for one is over or not allowed."""
    why = "and this service takes no images until one does"
    if held_seconds > 0:
        why = f"and none came within the {held_seconds:g} seconds that a request may wait for it"
    return unavailable(
        f"No encoder runs now, {why}. Send the request again later, or without images.",
        retry_after_seconds=ENCODER_RETRY_SECONDS,
    )


def waking(*, waited_seconds: float) -> ApiError:
    """503: the service was at zero, and its pods are not ready yet."""
    return unavailable(
        "The service is starting, because it was scaled to zero; it was not ready within the "
        f"{waited_seconds:.3g} seconds that this request waited. Send the request again later.",
        retry_after_seconds=WAKE_RETRY_SECONDS,
    )


def request_deadline() -> ApiError:
    """504: the client's timeout is over."""
    return ApiError(
        504, "The time that X-Request-Timeout gives this request is over.", code="deadline_exceeded"
    )


def overloaded(message: str, *, retry_after_seconds: float) -> ApiError:
    """429: no capacity is free now."""
    return ApiError(429, message, code="overloaded", retry_after_seconds=retry_after_seconds)


def rate_limited(message: str, *, retry_after_seconds: float) -> ApiError:
    """429: a limit of the tenant is reached; other tenants are served."""
    return ApiError(
        429, message, code="rate_limit_exceeded", retry_after_seconds=retry_after_seconds
    )


def internal(request_id: str) -> ApiError:
    """500: an internal error; the log has the details under the request's id."""
    return ApiError(
        500,
        f"The server failed on this request; its log says why under {request_id}.",
        code="internal_error",
    )


def of_worker(error: worker_errors.WorkerError, request_id: str) -> ApiError:
    """Return the client's error for a worker's error, after all retries."""
    match error:
        case worker_errors.InvalidRequestError():
            return invalid(str(error), param=error.param, code=error.code or "invalid_request")
        case worker_errors.OverloadedError():
            return overloaded(
                "The service has no capacity for this request now.",
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
