"""Writes an answer in the format that OpenAI's client reads, as a stream or as one body.

tokens of a choice ─▶ TextAssembler ─▶ ResponseWriter ─▶ Envelope, Shape ─▶ ASGI send
                                            └─ MessageReader: reasoning and calls of a chat

One field is an extension: `timing`, on a whole answer and on the last chunks of a stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from vlm_worker.core.token_texts import TokenTexts
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.detokenization import ChosenToken, TextAssembler, TextChunk
from vlm_worker.gateway.echo import NO_ECHO, Echo, ScoredPrompt, after
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.request_guard import within
from vlm_worker.gateway.responding.message import MessageReader
from vlm_worker.types import FinishReason, TokenLogprobs

logger = logging.getLogger(__name__)

T = TypeVar("T")
Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]

# A client that reads nothing for this time counts as disconnected.
SLOW_READER_SECONDS = 30.0


class ClientGoneError(Exception):
    """The client disconnected or stopped reading."""


class Response:
    """The HTTP response. It starts with the first byte, so that earlier errors set the status.

    `failure` writes the last event of a stream that fails; the writer of the answer may set it.
    `headers` returns more headers, when the response starts. `status` is 0 before.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.failure = _error_event
        self.headers: Callable[[], Mapping[str, str]] = dict
        self.status = 0

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
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, {**fixed, **headers})
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Send an error to a client that is still there.

        It is an HTTP error, or an event if the stream has started.
        """
        try:
            if self.started:
                await self.write(self.failure(error))
                await self.end()
            else:
                await self.whole(error.status, encode(error.body), error.headers)
        except ClientGoneError:
            logger.debug("the client disconnected before the error was sent")

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started, self.status = True, status
        fields = {**headers, **self.headers()}
        raw = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _put(self, message: dict[str, Any]) -> None:
        """Send a message. The server applies backpressure while the client's buffer is full.

        Raises:
            ClientGoneError: the client disconnected or read nothing for `SLOW_READER_SECONDS`.
        """
        try:
            await within(SLOW_READER_SECONDS, self._send(message))
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
        assemblers: Sequence[TextAssembler],
        readers: Sequence[MessageReader | None] = (),
        echoes: Sequence[Echo] = (),
        texts: TokenTexts | None = None,
        with_logprobs: bool,
        trace: Trace,
        on_token: Callable[[int], None],
        on_text: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`assemblers` has one per choice; `on_token` gets the choice of each token.

        `readers` has one per choice too; None: its text is content alone. `echoes` has what each
        choice shows of its prompt, by the `texts` of tokens. `on_text` gets the texts of all
        choices as they are sent.
        """
        self._response = response
        self._envelope = envelope
        self._stream = stream
        self._assemblers = assemblers
        self._readers = readers or [None] * len(assemblers)
        self._echoes = echoes or [NO_ECHO] * len(assemblers)
        self._texts = texts
        self._prompts: dict[int, ScoredPrompt | None] = {}
        self._with_logprobs = with_logprobs
        self._trace = trace
        self._on_token = on_token
        self._on_text = on_text
        self._held: dict[int, list[TextChunk]] = {}
        self._whole: dict[int, dict[str, Any]] = {}

    def begin(self, index: int, prompt: ScoredPrompt | None) -> None:
        """Begin a choice, before its first token, with the log-probabilities of its prompt."""
        self._prompts.setdefault(index, prompt)

    async def emit(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Deliver a token of a choice; return False once the answer is complete.

        It is after a stop string, or after its only call.
        """
        assembler, reader = self._assemblers[index], self._readers[index]
        if self._echoes[index].no_answer:
            await self._put(index, TextChunk(""))
            self._on_token(index)
            return True
        await self._put(index, assembler.feed(token_id, logprobs))
        self._on_token(index)
        return not (assembler.stopped or (reader is not None and reader.done))

    async def finish(self, index: int, finish_reason: str) -> None:
        """End a choice. Its held text may complete a stop string; the reason is then `stop`."""
        assembler, reader = self._assemblers[index], self._readers[index]
        await self._put(index, assembler.finish(), is_last=True)
        if assembler.stopped:
            finish_reason = FinishReason.STOP
        if self._echoes[index].no_answer:
            finish_reason = FinishReason.LENGTH
        if reader is not None:
            finish_reason = reader.finish_reason(finish_reason)
        shape = self._envelope.shape
        if self._stream:
            last = [shape.last(index, finish_reason)]
            await self._response.write(self._envelope.chunk(last, extra=self._timing))
            return
        held = self._held[index]
        text = "".join(piece.text for piece in held)
        tokens = [token for piece in held for token in piece.tokens]
        content = text if reader is None else reader.message
        whole = shape.whole(index, content, self._shown(tokens), finish_reason)
        if self._echoes[index].num_prompt_logprobs is not None and self._texts is not None:
            show = self._echoes[index].prompt_logprobs
            whole["prompt_logprobs"] = await self._of_prompt(index, show, self._texts)
        self._whole[index] = whole

    @property
    def message(self) -> dict[str, Any] | None:
        """The message of the first choice; None if its text is content alone."""
        reader = self._readers[0]
        return None if reader is None else reader.message

    def _with_reasoning(self, usage: Usage) -> Usage:
        """The usage with the tokens of the reasoning, which the readers have counted."""
        counts = (reader.num_reasoning_tokens for reader in self._readers if reader is not None)
        return dataclasses.replace(usage, reasoning_tokens=sum(counts))

    async def end(self, usage: Usage) -> None:
        """End the answer, after all its choices."""
        usage = self._with_reasoning(usage)
        envelope = self._envelope
        if not self._stream:
            choices = [self._whole[index] for index in sorted(self._whole)]
            body = envelope.whole(choices, usage, extra=self._timing)
            await self._response.whole(200, body, {})
            return
        if envelope.include_usage:
            await self._response.write(envelope.chunk([], usage=usage, extra=self._timing))
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
        """The extension `timing` in milliseconds. The rounded stages add up to `ttft_ms`.

        It is absent before the first token of the first prompt.
        """
        if self._trace.first_byte is None:
            return {}
        stages = self._trace.stages()
        return {
            "timing": {
                "ttft_ms": round(self._trace.ttft * 1000, 3),
                "stages": {stage: round(seconds * 1000, 3) for stage, seconds in stages.items()},
            }
        }

    def _shown(self, tokens: Sequence[ChosenToken]) -> Sequence[ChosenToken] | None:
        return tokens if self._with_logprobs else None

    async def _put(self, index: int, piece: TextChunk, *, is_last: bool = False) -> None:
        first = index not in self._held
        held = self._held.setdefault(index, [])
        echo = self._echoes[index]
        piece = after(echo, piece)
        if first and (echo.text or echo.lists_all) and self._texts is not None:
            shown = await self._of_prompt(index, echo.chunk, self._texts)
            piece = TextChunk(shown.text + piece.text, (*shown.tokens, *piece.tokens))
        deltas = self._deltas(index, piece, is_last=is_last)
        self._on_text(piece.text)
        if not self._stream:
            held.append(piece)
        else:
            if not deltas and (first or piece.tokens):
                deltas = [""]
            tokens = piece.tokens
            for delta in deltas:
                choice = self._envelope.shape.next(
                    index, delta, self._shown(tokens), is_first=first and delta is deltas[0]
                )
                tokens = ()
                await self._response.write(self._envelope.chunk([choice]))
        if first and index == 0:  # the trace is of the first choice
            self._trace.first_byte_sent()

    async def _of_prompt(
        self, index: int, show: Callable[[TokenTexts, ScoredPrompt | None], T], texts: TokenTexts
    ) -> T:
        """What a choice shows of its prompt. A long one would block the event loop."""
        prompt = self._prompts.get(index)
        is_long = prompt is not None and prompt.is_long
        return await asyncio.to_thread(show, texts, prompt) if is_long else show(texts, prompt)

    def _deltas(self, index: int, piece: TextChunk, *, is_last: bool) -> list[Delta]:
        """Return what a piece adds to its message, in order."""
        reader = self._readers[index]
        if reader is None:
            return [piece.text] if piece else []
        # each call adds one token, but the last, which adds the text that was held
        deltas: list[Delta] = [*reader.feed(piece.text, num_tokens=0 if is_last else 1)]
        return [*deltas, *reader.finish()] if is_last else deltas


Delta = str | dict[str, Any]
"""Text of an answer, or the fields of a message that has parts."""
Tokens = Sequence[ChosenToken] | None
"""The tokens of a text with their log-probabilities; None if not requested."""


def chat_body(tokens: Tokens) -> dict[str, Any] | None:
    """Return `logprobs` of a chat's choice."""
    if tokens is None:
        return None
    content = [one.chosen.body | {"top_logprobs": [t.body for t in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def completion_body(tokens: Tokens) -> dict[str, Any] | None:
    """Return `logprobs` of a completion's choice; `top_logprobs` include the chosen token.

    The first token of a prompt has null in both.
    """
    if tokens is None:
        return None
    return {
        "tokens": [one.chosen.text for one in tokens],
        "token_logprobs": [one.chosen.logprob for one in tokens],
        "top_logprobs": [
            None
            if one.chosen.logprob is None
            else {likely.text: likely.logprob for likely in (*one.top, one.chosen)}
            for one in tokens
        ],
        "text_offset": [one.offset for one in tokens],
    }


encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; image tokens are the placeholders of images.

    The prompt counts once for all choices; their completion tokens are added up. Those of the
    reasoning are among them.
    """

    image_tokens: int
    text_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's `usage`, with details."""
        prompt_tokens = self.image_tokens + self.text_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "image_tokens": self.image_tokens,
                "text_tokens": self.text_tokens,
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


class ChatShape:
    """Format of the choices of `/v1/chat/completions`."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl-"

    def next(self, index: int, delta: Delta, tokens: Tokens, *, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        fields = {"content": delta} if isinstance(delta, str) else delta
        return _choice(index, delta=role | fields, logprobs=chat_body(tokens))

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _choice(index, delta={}, finish_reason=finish_reason)

    def whole(
        self, index: int, content: Delta, tokens: Tokens, finish_reason: str
    ) -> dict[str, Any]:
        message = content
        if isinstance(content, str):
            message = {"role": "assistant", "content": content, "refusal": None}
        return _choice(
            index, message=message, logprobs=chat_body(tokens), finish_reason=finish_reason
        )


class CompletionShape:
    """Format of the choices of `/v1/completions`."""

    chunk_object = "text_completion"
    whole_object = "text_completion"
    id_prefix = "cmpl-"

    def next(self, index: int, text: Delta, tokens: Tokens, *, is_first: bool) -> dict[str, Any]:
        del is_first  # only a chat has roles
        return _choice(index, text=text, logprobs=completion_body(tokens))

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _choice(index, text="", finish_reason=finish_reason)

    def whole(self, index: int, text: Delta, tokens: Tokens, finish_reason: str) -> dict[str, Any]:
        return _choice(
            index, text=text, logprobs=completion_body(tokens), finish_reason=finish_reason
        )


Shape = ChatShape | CompletionShape


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """The common fields of all chunks of one answer."""

    shape: Shape
    request_id: str
    created: int
    model: str
    include_usage: bool

    def chunk(
        self,
        choices: list[dict[str, Any]],
        *,
        usage: Usage | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        """Return a server-sent event. The last one of a stream has the usage and no choice."""
        body = self._body(self.shape.chunk_object, choices)
        if self.include_usage:
            body["usage"] = usage.body if usage else None
        return event(body | (extra or {}))

    def whole(self, choices: list[dict[str, Any]], usage: Usage, *, extra: dict[str, Any]) -> bytes:
        body = self._body(self.shape.whole_object, choices) | {"usage": usage.body}
        return encode(body | extra)

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.shape.id_prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def event(body: dict[str, Any]) -> bytes:
    """Return `body` as a server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return event(error.body)


def _choice(
    index: int,
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
    **content: Any,
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
