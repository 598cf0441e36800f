"""Writes an answer to the client: tokens in, text out, as a stream or as one body.

tokens of a choice ─▶ TextAssembler ─▶ ResponseWriter ─▶ ASGI send
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from vlm_worker.gateway.api.answers import (
    DONE,
    PING,
    ChosenToken,
    Envelope,
    Usage,
    encode,
    event,
    timing,
)
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.detokenization import TextAssembler, TextChunk
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.types import FinishReason, TokenLogprobs

Send = Callable[[dict[str, Any]], Awaitable[None]]

# A client that reads nothing for this time counts as disconnected.
SLOW_READER_SECONDS = 30.0


class ClientGoneError(Exception):
    """The client disconnected or stopped reading."""


class Response:
    """The HTTP response. It starts with the first byte, so that earlier errors set the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, body: bytes) -> None:
        """Send bytes of an event stream; start it if necessary."""
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
        """End the stream."""
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a complete JSON response."""
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, {**fixed, **headers})
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Send an error: as an HTTP error, or as an event if the stream has started."""
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
        """Send a message. The server applies backpressure while the client's buffer is full.

        Raises:
            ClientGoneError: the client disconnected or read nothing for `SLOW_READER_SECONDS`.
        """
        try:
            async with asyncio.timeout(SLOW_READER_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise ClientGoneError("the client reads nothing") from None
        except OSError as error:
            raise ClientGoneError("the client disconnected") from error


class ResponseWriter:
    """Writes the choices of one answer, as stream events or as one body at the end."""

    def __init__(
        self,
        response: Response,
        envelope: Envelope,
        *,
        stream: bool,
        pieces: Sequence[TextAssembler],
        with_logprobs: bool,
        trace: Trace,
        on_token: Callable[[int], None],
    ) -> None:
        """`pieces` has one assembler per choice; `on_token` gets the choice of each token."""
        self._response = response
        self._envelope = envelope
        self._stream = stream
        self._pieces = pieces
        self._with_logprobs = with_logprobs
        self._trace = trace
        self._on_token = on_token
        self._held: dict[int, list[TextChunk]] = {}
        self._whole: dict[int, dict[str, Any]] = {}

    async def emit(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Deliver a token of a choice; return False once a stop string is complete."""
        assembler = self._pieces[index]
        await self._put(index, assembler.feed(token_id, logprobs))
        self._on_token(index)
        return not assembler.stopped

    async def finish(self, index: int, finish_reason: str) -> None:
        """End a choice. Its held text may complete a stop string; the reason is then `stop`."""
        assembler = self._pieces[index]
        await self._put(index, assembler.finish())
        if assembler.stopped:
            finish_reason = FinishReason.STOP
        shape = self._envelope.shape
        if self._stream:
            last = shape.last(index, finish_reason)
            await self._response.write(self._envelope.chunk(last, extra=self._timing))
            return
        held = self._held[index]
        text = "".join(piece.text for piece in held)
        tokens = [token for piece in held for token in piece.tokens]
        self._whole[index] = shape.whole(index, text, self._shown(tokens), finish_reason)

    async def end(self, usage: Usage) -> None:
        """End the answer, after all its choices."""
        envelope = self._envelope
        if not self._stream:
            choices = [self._whole[index] for index in sorted(self._whole)]
            body = envelope.whole(choices, usage, extra=self._timing)
            await self._response.whole(200, body, {})
            return
        if envelope.include_usage:
            await self._response.write(envelope.usage_chunk(usage, extra=self._timing))
        await self._response.write(DONE)
        await self._response.end()

    async def heartbeat(self) -> None:
        """Send a ping if the stream has started; an earlier ping would fix the status."""
        if self._response.started:
            await self.ping()

    async def ping(self) -> None:
        """Keep an idle stream open; starts the stream if necessary."""
        if self._stream:
            await self._response.write(PING)

    @property
    def _timing(self) -> dict[str, Any]:
        return {"timing": timing(self._trace.ttft, self._trace.stages())}

    def _shown(self, tokens: Sequence[ChosenToken]) -> Sequence[ChosenToken] | None:
        return tokens if self._with_logprobs else None

    async def _put(self, index: int, piece: TextChunk) -> None:
        first = index not in self._held
        held = self._held.setdefault(index, [])
        if not self._stream:
            held.append(piece)
        elif first or piece:
            shape = self._envelope.shape
            choice = (shape.first if first else shape.next)(
                index, piece.text, self._shown(piece.tokens)
            )
            await self._response.write(self._envelope.chunk(choice))
        if first:
            self._trace.first_byte_left()
