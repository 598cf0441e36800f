"""One request of `/v1/responses`, as the endpoint of a chat serves it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.dialect import Dialect
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.responses import ResponseWriter
from vlm_worker.gateway.responses_api.paths import Paths
from vlm_worker.gateway.responses_api.translation import Repeated, translated
from vlm_worker.gateway.responses_api.writer import ResponsesWriter
from vlm_worker.gateway.turns import Steps


class ResponsesDialect(Dialect):
    """The form of OpenAI's Responses API. `translate` is called once, before `writer`."""

    name = "responses"
    num_copies = 2  # the request's, and the chat's

    def __init__(self) -> None:
        self._paths = Paths()
        self._repeated: Repeated | None = None
        self._own: ApiError | None = None  # the translation's, which has the client's names

    def translate(self, body: dict[str, Any]) -> Steps[dict[str, Any]]:
        try:
            result = yield from translated(body, self._paths)
        except ApiError as error:
            self._own = error
            raise
        self._repeated = result.repeated
        self.num_bytes = result.repeated.num_bytes + self._paths.num_bytes
        return result.chat

    def renamed(self, error: ApiError) -> ApiError:
        return error if error is self._own else self._paths.renamed(error)

    def writer(self, prepared: PreparedRequest) -> Callable[..., ResponseWriter]:
        assert self._repeated is not None
        return functools.partial(
            ResponsesWriter, repeated=self._repeated, sampling=prepared.sampling
        )
