"""Writes the response object of `/v1/responses`: whole, or as the events of a stream.

    created, in_progress ─▶ events of the output ─▶ completed | incomplete | failed

The stream starts with the first token or ping, so that earlier errors set the HTTP status.
"""

from __future__ import annotations

import time
from typing import Any

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.detokenization import TextChunk
from vlm_worker.gateway.http_response import Response, encode
from vlm_worker.gateway.responses import Envelope, ResponseWriter, Usage
from vlm_worker.gateway.responses_api.output import Event, Output
from vlm_worker.gateway.responses_api.translation import Repeated
from vlm_worker.types import FinishReason, SamplingParams

# Our codes of errors to those that OpenAI's response object may have.
_IMAGE_CODES = frozenset({"invalid_image", "invalid_image_url", "image_too_large"})


class ResponsesWriter(ResponseWriter):
    """Writes one response. It has one choice."""

    def __init__(
        self,
        response: Response,
        envelope: Envelope,
        *,
        repeated: Repeated,
        sampling: SamplingParams,
        **options: Any,
    ) -> None:
        """`repeated` and `sampling` are of the request; `options` are those of the base class."""
        super().__init__(response, envelope, **options)
        response.failure = self._failed
        self._repeated = repeated
        self._sampling = sampling
        self._output = Output(envelope.request_id, with_logprobs=self._with_logprobs)
        self._num_events = 0
        self._is_begun = False
        self._reason = ""

    async def finish(self, index: int, finish_reason: str) -> None:
        """End the text of the answer; `end` writes what follows it."""
        assembler, reader = self._assemblers[index], self._readers[index]
        await self._put(index, assembler.finish(), is_last=True)
        self._reason = FinishReason.STOP if assembler.stopped else finish_reason
        if reader is not None:
            self._reason = reader.finish_reason(self._reason)

    async def end(self, usage: Usage) -> None:
        """End the response, with all its items."""
        is_cut = self._reason == FinishReason.LENGTH
        events = self._output.end(is_cut=is_cut)
        body = self._body("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "usage": usage_body(self._with_reasoning(usage)),
            **self._timing,
        }
        if not self._stream:
            await self._response.whole(200, encode(body), {})
            return
        last = {"type": f"response.{body['status']}", "response": body}
        await self._response.write(self._events([*events, last]))
        await self._response.end()

    async def ping(self) -> None:
        """Keep an idle stream open; starts the stream if necessary."""
        if self._stream and not self._is_begun:
            await self._response.write(self._events([]))
        await super().ping()

    async def _put(self, index: int, piece: TextChunk, *, is_last: bool = False) -> None:
        is_first = not self._held
        self._held[index] = []
        deltas = self._deltas(index, piece, is_last=is_last)
        self._on_text(piece.text)
        events = self._output.add(deltas, piece)
        if self._stream and (events or not self._is_begun):
            await self._response.write(self._events(events))
        if is_first:
            self._trace.first_byte_sent()

    def _events(self, events: list[Event]) -> bytes:
        """Return events as bytes, behind those that begin a stream if they are not written yet."""
        if not self._is_begun:
            self._is_begun = True
            body = self._body("in_progress") | {"output": []}
            begin = [
                {"type": "response.created", "response": body},
                {"type": "response.in_progress", "response": body},
            ]
            events = [*begin, *events]
        written = []
        for event in events:
            numbered = event | {"sequence_number": self._num_events}
            self._num_events += 1
            written.append(b"event: %b\ndata: " % event["type"].encode() + encode(numbered))
        return b"".join(one + b"\n\n" for one in written)

    def _failed(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails: those of an open item, and the error."""
        events = self._output.end(is_cut=True) if self._output.items else []
        body = self._body("failed") | {
            "error": {"code": _code_of(error), "message": error.message, "param": error.param}
        }
        return self._events([*events, {"type": "response.failed", "response": body}])

    def _body(self, status: str) -> dict[str, Any]:
        """Return the response object as it is now."""
        envelope, sampling = self._envelope, self._sampling
        return {
            "id": f"resp_{envelope.request_id}",
            "object": "response",
            "created_at": envelope.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": envelope.model,
            "output": self._output.items,
            "usage": None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "background": False,
            "max_tool_calls": None,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            **self._repeated.fields,
        }


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return the usage of a response; writes to the caches are not counted."""
    num_input = usage.image_tokens + usage.text_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            "image_tokens": usage.image_tokens,
            "text_tokens": usage.text_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": num_input + usage.completion_tokens,
    }


def _code_of(error: ApiError) -> str:
    """Return the code of an error that OpenAI's response object may have."""
    if error.status == 429:
        return "rate_limit_exceeded"
    if error.status >= 500:
        return "server_error"
    return error.code if error.code in _IMAGE_CODES else "invalid_prompt"
