"""How an endpoint's requests and answers are written. By default they are those of a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.responses import ResponseWriter
from vlm_worker.gateway.turns import Steps

Kind = Literal["chat", "completion"]
"""What an endpoint generates."""


class Dialect:
    """The form of one request and its answer. The endpoint makes one per request.

    Attributes:
        name: of the endpoint, in logs; None: the endpoint's kind.
        num_bytes: what it keeps of the request until the answer has ended.
        num_copies: of the request's values while they are checked.
    """

    name: str | None = None
    num_bytes: int = 0
    num_copies: int = 1

    def translate(self, body: dict[str, Any]) -> Steps[dict[str, Any]]:
        """Return the body of the chat that `body` asks for.

        Raises:
            ApiError: 400; it names the invalid part.
        """
        yield from ()
        return body

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error with the client's names of the parts of its request."""
        return error

    def writer(self, prepared: PreparedRequest) -> Callable[..., ResponseWriter]:
        """Return the class of the answer's writer, or what takes its arguments."""
        del prepared
        return ResponseWriter
