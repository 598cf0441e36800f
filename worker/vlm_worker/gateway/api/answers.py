"""What goes out: whole answers and chunks, as OpenAI's own client reads them.

One field is ours: `timing`, on a whole answer and on the last chunks of a stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from vlm_worker.gateway.api.logprobs import ChosenToken, chat_body, completion_body

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; placeholders of pictures are image tokens.

    The prompt counts once, however many choices there are; their tokens are added up.
    """

    image_tokens: int
    text_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's `usage`, details included."""
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
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


def timing(ttft_seconds: float, stages: dict[str, float]) -> dict[str, Any]:
    """The extension `timing`: milliseconds; the stages sum to `ttft_ms` but for rounding."""
    return {
        "ttft_ms": round(ttft_seconds * 1000, 3),
        "stages": {stage: round(seconds * 1000, 3) for stage, seconds in stages.items()},
    }


Tokens = Sequence[ChosenToken] | None
"""The tokens that a text shows, with their log-probabilities; None where nobody asked for them."""


class Shape(Protocol):
    """One endpoint's bodies: the choice `index` of an answer, piece by piece or whole."""

    def first(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """The choice of its first chunk."""

    def next(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """The choice of a chunk with more text."""

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The choice of the chunk that ends it."""

    def whole(self, index: int, text: str, tokens: Tokens, finish_reason: str) -> dict[str, Any]:
        """The choice of a whole answer."""

    @property
    def chunk_object(self) -> str:
        """`object` of a chunk."""

    @property
    def whole_object(self) -> str:
        """`object` of a whole answer."""

    @property
    def id_prefix(self) -> str:
        """Before the request's id."""


class ChatShape:
    """`/v1/chat/completions`."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl-"

    def first(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """The first delta names the role."""
        delta = {"role": "assistant", "content": text}
        return _choice(index, delta=delta, logprobs=_chat(tokens))

    def next(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """A delta of content."""
        return _choice(index, delta={"content": text}, logprobs=_chat(tokens))

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        """An empty delta."""
        return _choice(index, delta={}, finish_reason=finish_reason)

    def whole(self, index: int, text: str, tokens: Tokens, finish_reason: str) -> dict[str, Any]:
        """A message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return _choice(index, message=message, logprobs=_chat(tokens), finish_reason=finish_reason)


class CompletionShape:
    """`/v1/completions`."""

    chunk_object = "text_completion"
    whole_object = "text_completion"
    id_prefix = "cmpl-"

    def first(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """As any other."""
        return self.next(index, text, tokens)

    def next(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """A piece of text."""
        return _choice(index, text=text, logprobs=_completion(tokens))

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        """No more text."""
        return _choice(index, text="", finish_reason=finish_reason)

    def whole(self, index: int, text: str, tokens: Tokens, finish_reason: str) -> dict[str, Any]:
        """The text."""
        return _choice(index, text=text, logprobs=_completion(tokens), finish_reason=finish_reason)


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of one answer share."""

    shape: Shape
    request_id: str
    created: int
    model: str
    include_usage: bool

    def chunk(self, choice: dict[str, Any], *, extra: dict[str, Any] | None = None) -> bytes:
        """One chunk as a server-sent event."""
        return self._event([choice], None, extra)

    def usage_chunk(self, usage: Usage, *, extra: dict[str, Any]) -> bytes:
        """The chunk with the usage and no choice."""
        return self._event([], usage.body, extra)

    def whole(self, choices: list[dict[str, Any]], usage: Usage, *, extra: dict[str, Any]) -> bytes:
        """A whole answer."""
        body = self._body(self.shape.whole_object, choices) | {"usage": usage.body}
        return _encoder.encode(body | extra)

    def _event(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None,
        extra: dict[str, Any] | None,
    ) -> bytes:
        body = self._body(self.shape.chunk_object, choices)
        if self.include_usage:
            body["usage"] = usage
        if extra:
            body |= extra
        return event(body)

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.shape.id_prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def encode(body: dict[str, Any]) -> bytes:
    """JSON."""
    return _encoder.encode(body)


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


def _chat(tokens: Tokens) -> dict[str, Any] | None:
    return None if tokens is None else chat_body(tokens)


def _completion(tokens: Tokens) -> dict[str, Any] | None:
    return None if tokens is None else completion_body(tokens)


def _choice(
    index: int,
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
    **content: Any,
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
