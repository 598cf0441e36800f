"""One answer on its way to the client: tokens in, text out, as a stream or as a whole.

tokens of a choice ─▶ Piecing ─▶ Writer ─▶ ASGI send
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from vlm_worker.gateway.api.answers import DONE, PING, Envelope, Usage, encode, event, timing
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.logprobs import ChosenToken
from vlm_worker.gateway.orchestrate.trace import Trace
from vlm_worker.gateway.piecing import Piece, Piecing
from vlm_worker.types import FinishReason, TokenLogprobs

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
    """The choices of one answer, as events of a stream or as one body in the end."""

    def __init__(
        self,
        response: Response,
        envelope: Envelope,
        *,
        stream: bool,
        pieces: Sequence[Piecing],
        with_logprobs: bool,
        trace: Trace,
        on_token: Callable[[int], None],
    ) -> None:
        """`pieces` has one for each choice; `on_token` is told the choice of each token."""
        self._response = response
        self._envelope = envelope
        self._stream = stream
        self._pieces = pieces
        self._with_logprobs = with_logprobs
        self._trace = trace
        self._on_token = on_token
        self._held: dict[int, list[Piece]] = {}
        self._whole: dict[int, dict[str, Any]] = {}

    async def emit(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Deliver a token of a choice; False when a stop string is complete."""
        piecing = self._pieces[index]
        await self._put(index, piecing.feed(token_id, logprobs))
        self._on_token(index)
        return not piecing.stopped

    async def finish(self, index: int, finish_reason: str) -> None:
        """The last words of a choice; a stop string may be in what was held back until now."""
        piecing = self._pieces[index]
        await self._put(index, piecing.finish())
        if piecing.stopped:
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
        """The last words of the answer, after those of all its choices."""
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
        """As `ping`, where the stream has begun: before that, an error still gets its status."""
        if self._response.started:
            await self.ping()

    async def ping(self) -> None:
        """Keep a stream alive that has nothing to say yet."""
        if self._stream:
            await self._response.write(PING)

    @property
    def _timing(self) -> dict[str, Any]:
        return {"timing": timing(self._trace.ttft, self._trace.stages())}

    def _shown(self, tokens: Sequence[ChosenToken]) -> Sequence[ChosenToken] | None:
        return tokens if self._with_logprobs else None

    async def _put(self, index: int, piece: Piece) -> None:
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
