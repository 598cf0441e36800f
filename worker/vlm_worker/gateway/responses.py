"""Writes an answer in the format that OpenAI's client reads, as a stream or as one body.

tokens of a choice ─▶ TextAssembler ─▶ ResponseWriter ─▶ Envelope, Shape ─▶ ASGI send
                                            └─ MessageReader: reasoning and calls of a chat

One field is an extension: `timing`, on a whole answer and on the last chunks of a stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from vlm_worker.core.token_texts import TokenTexts
from vlm_worker.gateway.api.schema import StreamUsage
from vlm_worker.gateway.detokenization import ChosenToken, TextAssembler, TextChunk
from vlm_worker.gateway.echo import NO_ECHO, Echo, ScoredPrompt, after, completion_body
from vlm_worker.gateway.http_response import Json, Response, encode, event
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.responding.message import MessageReader
from vlm_worker.types import FinishReason, TokenLogprobs

T = TypeVar("T")

APART: Final = b"\0"
"""The place of JSON that is made apart. No JSON has this byte."""


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
        self._usage: Callable[[], Usage] | None = None
        self._with_logprobs = with_logprobs
        self._trace = trace
        self._on_token = on_token
        self._on_text = on_text
        self._held: dict[int, list[TextChunk]] = {}
        self._whole: dict[int, dict[str, Any]] = {}
        self._apart: dict[int, list[list[Json]]] = {}

    def begin(self, index: int, prompt: ScoredPrompt | None, usage: Callable[[], Usage]) -> None:
        """Begin a choice, before its first token, with the log-probabilities of its prompt.

        `usage` returns that of the request so far.
        """
        self._prompts.setdefault(index, prompt)
        self._usage = usage

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
            await self._write(last, extra=self._timing)
            return
        held, echo = self._held[index], self._echoes[index]
        text = "".join(piece.text for piece in held)
        tokens = [token for piece in held for token in piece.tokens]
        content = text if reader is None else reader.message
        shown = None if echo.lists_all else self._shown(tokens)
        self._whole[index] = shape.whole(index, content, shown, finish_reason)
        if echo.lists_all:
            await self._show(index, "logprobs", functools.partial(echo.logprobs, tokens))
        if echo.num_prompt_logprobs is not None:
            await self._show(index, "prompt_logprobs", echo.prompt_logprobs)

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
            apart = [one for index in sorted(self._apart) for one in self._apart[index]]
            if apart:
                await self._response.in_parts(_filled(body, apart))
            else:
                await self._response.whole(200, body, {})
            return
        if envelope.usage is not StreamUsage.NONE:
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
        first, echo = index not in self._held, self._echoes[index]
        piece = after(echo, piece)
        follows = first and echo.lists_all and self._stream
        if follows:
            await self._write_prompt(index)
        elif first:
            piece = TextChunk(echo.text + piece.text, piece.tokens)
        held = self._held.setdefault(index, [])
        deltas = self._deltas(index, piece, is_last=is_last)
        self._on_text(piece.text)
        if not self._stream:
            held.append(piece)
        else:
            if not deltas and ((first and not follows) or piece.tokens):
                deltas = [""]
            tokens = piece.tokens
            for delta in deltas:
                choice = self._envelope.shape.next(
                    index, delta, self._shown(tokens), is_first=first and delta is deltas[0]
                )
                tokens = ()
                await self._write([choice])
        if first and index == 0:  # the trace is of the first choice
            self._trace.first_byte_sent()

    async def _write(
        self, choices: list[dict[str, Any]], *, extra: dict[str, Any] | None = None
    ) -> None:
        chunk = self._envelope.chunk(choices, usage=self._usage_so_far, extra=extra)
        await self._response.write(chunk)

    @property
    def _usage_so_far(self) -> Usage | None:
        """That of a chunk which is not the last one; None if these have none."""
        if self._envelope.usage is not StreamUsage.IN_EACH or self._usage is None:
            return None
        return self._with_reasoning(self._usage())

    async def _write_prompt(self, index: int) -> None:
        """Write the text and the tokens of a prompt, some of them in each event."""
        envelope, (texts, prompt) = self._envelope, self._scored(index)
        chunks, usage = self._echoes[index].chunks(texts, prompt), self._usage_so_far

        def event() -> bytes | None:
            chunk = next(chunks, None)
            if chunk is None:
                return None
            choice = envelope.shape.next(index, chunk.text, chunk.tokens, is_first=False)
            return envelope.chunk([choice], usage=usage)

        while (made := await _make(event, prompt)) is not None:
            await self._response.write(made)

    async def _show(
        self, index: int, name: str, show: Callable[[TokenTexts, ScoredPrompt], list[Json]]
    ) -> None:
        """Add a field of a whole choice that shows its prompt."""
        texts, prompt = self._scored(index)
        self._whole[index][name] = msgspec.Raw(APART)
        parts = await _make(functools.partial(show, texts, prompt), prompt)
        self._apart.setdefault(index, []).append(parts)

    def _scored(self, index: int) -> tuple[TokenTexts, ScoredPrompt]:
        texts, prompt = self._texts, self._prompts[index]
        assert texts is not None
        assert prompt is not None
        return texts, prompt

    def _deltas(self, index: int, piece: TextChunk, *, is_last: bool) -> list[Delta]:
        """Return what a piece adds to its message, in order."""
        reader = self._readers[index]
        if reader is None:
            return [piece.text] if piece else []
        # each call adds one token, but the last, which adds the text that was held
        deltas: list[Delta] = [*reader.feed(piece.text, num_tokens=0 if is_last else 1)]
        return [*deltas, *reader.finish()] if is_last else deltas


async def _make(make: Callable[[], T], prompt: ScoredPrompt) -> T:
    """Make what is shown of a prompt. A long one would block the event loop."""
    return await asyncio.to_thread(make) if prompt.is_long else make()


def _filled(body: bytes, apart: Iterable[Sequence[Json]]) -> list[Json]:
    """Return a body in parts, with the JSON that was made apart in its places."""
    first, *others = body.split(APART)
    parts: list[Json] = [first]
    for made, other in zip(apart, others, strict=True):
        parts += [*made, other]
    return parts


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


def _logprobs(tokens: Tokens) -> dict[str, Any] | None:
    return None if tokens is None else completion_body(tokens)


class CompletionShape:
    """Format of the choices of `/v1/completions`."""

    chunk_object = "text_completion"
    whole_object = "text_completion"
    id_prefix = "cmpl-"

    def next(self, index: int, text: Delta, tokens: Tokens, *, is_first: bool) -> dict[str, Any]:
        del is_first  # only a chat has roles
        return _choice(index, text=text, logprobs=_logprobs(tokens))

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _choice(index, text="", finish_reason=finish_reason)

    def whole(self, index: int, text: Delta, tokens: Tokens, finish_reason: str) -> dict[str, Any]:
        return _choice(index, text=text, logprobs=_logprobs(tokens), finish_reason=finish_reason)


Shape = ChatShape | CompletionShape


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """The common fields of all chunks of one answer; `usage` is of a stream."""

    shape: Shape
    request_id: str
    created: int
    model: str
    usage: StreamUsage

    def chunk(
        self,
        choices: list[dict[str, Any]],
        *,
        usage: Usage | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        """Return a server-sent event. The last one of a stream has the usage and no choice."""
        body = self._body(self.shape.chunk_object, choices)
        if self.usage is not StreamUsage.NONE:
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


def _choice(
    index: int,
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
    **content: Any,
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
