"""One answer on its way to the client: tokens in, text out, as a stream or as a whole.

token ─▶ Detokenizer ─▶ StopScanner ─▶ Writer ─▶ ASGI send
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from vlm_worker.gateway.api.answers import DONE, PING, Envelope, Usage, encode, event, timing
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.detokenize import Detokenizer, StopScanner
from vlm_worker.gateway.orchestrate.trace import Trace
from vlm_worker.types import TokenLogprobs

Send = Callable[[dict[str, Any]], Awaitable[None]]

# A client that takes nothing for so long has gone, whatever its socket says.
SLOW_READER_SECONDS = 30.0


class ClientGoneError(Exception):
    """The client disconnected, or reads nothing any more."""


class Response:
    """The HTTP response, begun as late as possible: an early error still gets its own status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, body: bytes) -> None:
        """A piece of a stream of events."""
        if not self.started:
            await self._start(
                200,
                {
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                },
            )
        await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        """The end of a stream."""
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """A whole JSON body."""
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, {**fixed, **headers})
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """The last word of a request that failed: an HTTP error, or an event in a stream begun."""
        if self.started:
            await self.write(event(error.body))
            await self.end()
        else:
            await self.whole(error.status, encode(error.body), error.headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _put(self, message: dict[str, Any]) -> None:
        """Hand over; the server waits while the client's buffer is full."""
        try:
            async with asyncio.timeout(SLOW_READER_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise ClientGoneError("the client reads nothing") from None
        except OSError as error:
            raise ClientGoneError("the client disconnected") from error


class Writer:
    """Text of one answer. `emit` is given to the generation."""

    def __init__(
        self,
        response: Response,
        envelope: Envelope,
        *,
        stream: bool,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        trace: Trace,
        on_token: Callable[[], None],
    ) -> None:
        self._response = response
        self._envelope = envelope
        self._stream = stream
        self._trace = trace
        self._on_token = on_token
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stop)
        self._text: list[str] = []
        self._begun = False

    async def emit(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Deliver a token; False when a stop string is complete."""
        del logprobs  # no parameter asks for them yet
        await self._put(self._scanner.feed(self._detokenizer.feed(token_id)))
        self._on_token()
        return not self._scanner.stopped

    async def finish(self, finish_reason: str, usage: Usage) -> None:
        """The last words of the answer."""
        rest = self._scanner.feed(self._detokenizer.flush()) + self._scanner.flush()
        await self._put(rest)
        extra = {"timing": timing(self._trace.ttft, self._trace.stages())}
        shape, envelope = self._envelope.shape, self._envelope
        if not self._stream:
            whole = shape.whole("".join(self._text), finish_reason)
            await self._response.whole(200, envelope.whole(whole, usage, extra=extra), {})
            return
        await self._response.write(envelope.chunk(shape.last(finish_reason), extra=extra))
        if envelope.include_usage:
            await self._response.write(envelope.usage_chunk(usage, extra=extra))
        await self._response.write(DONE)
        await self._response.end()

    async def ping(self) -> None:
        """Keep a stream alive that has nothing to say yet."""
        if self._stream:
            await self._response.write(PING)

    async def _put(self, text: str) -> None:
        first, self._begun = not self._begun, True
        if not self._stream:
            self._text.append(text)
        elif first:
            await self._response.write(self._envelope.chunk(self._envelope.shape.first(text)))
        elif text:
            await self._response.write(self._envelope.chunk(self._envelope.shape.next(text)))
        if first:
            self._trace.first_byte_left()
