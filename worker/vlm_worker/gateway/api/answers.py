"""Builds answers and stream chunks in the format that OpenAI's client reads.

One field is an extension: `timing`, on a whole answer and on the last chunks of a stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

LEAST_LOGPROB: Final = -9999.0
"""OpenAI's value for a token of probability 0, because JSON has no infinity."""


@dataclasses.dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token and its natural log-probability; `utf8_bytes` are its bytes in UTF-8."""

    text: str
    utf8_bytes: bytes
    logprob: float

    @property
    def body(self) -> dict[str, Any]:
        """The token as JSON of a chat."""
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.utf8_bytes)}


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token of the answer, the most likely tokens at its position, and its text offset."""

    chosen: LikelyToken
    top: tuple[LikelyToken, ...]
    offset: int


def chat_body(tokens: Sequence[ChosenToken]) -> dict[str, Any]:
    """Return `logprobs` of a chat's choice."""
    content = [one.chosen.body | {"top_logprobs": [t.body for t in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def completion_body(tokens: Sequence[ChosenToken]) -> dict[str, Any]:
    """Return `logprobs` of a completion's choice; `top_logprobs` include the chosen token."""
    return {
        "tokens": [one.chosen.text for one in tokens],
        "token_logprobs": [one.chosen.logprob for one in tokens],
        "top_logprobs": [
            {likely.text: likely.logprob for likely in (*one.top, one.chosen)} for one in tokens
        ],
        "text_offset": [one.offset for one in tokens],
    }


_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; image tokens are the placeholders of images.

    The prompt counts once for all choices; their completion tokens are added up.
    """

    image_tokens: int
    text_tokens: int
    cached_tokens: int
    completion_tokens: int

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
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


def timing(ttft_seconds: float, stages: dict[str, float]) -> dict[str, Any]:
    """Return the extension `timing` in milliseconds. The rounded stages add up to `ttft_ms`."""
    return {
        "ttft_ms": round(ttft_seconds * 1000, 3),
        "stages": {stage: round(seconds * 1000, 3) for stage, seconds in stages.items()},
    }


Tokens = Sequence[ChosenToken] | None
"""The tokens of a text with their log-probabilities; None if not requested."""


class Shape(Protocol):
    """Format of one endpoint's choices; `index` is the choice."""

    def first(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """Return the choice of its first chunk."""

    def next(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """Return the choice of a chunk with more text."""

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        """Return the choice of the chunk that ends it."""

    def whole(self, index: int, text: str, tokens: Tokens, finish_reason: str) -> dict[str, Any]:
        """Return the choice of a whole answer."""

    @property
    def chunk_object(self) -> str:
        """`object` of a chunk."""

    @property
    def whole_object(self) -> str:
        """`object` of a whole answer."""

    @property
    def id_prefix(self) -> str:
        """Prefix of the answer's id."""


class ChatShape:
    """Format of `/v1/chat/completions`."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl-"

    def first(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        """Return the first delta, which has the role."""
        delta = {"role": "assistant", "content": text}
        return _choice(index, delta=delta, logprobs=_chat(tokens))

    def next(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        return _choice(index, delta={"content": text}, logprobs=_chat(tokens))

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _choice(index, delta={}, finish_reason=finish_reason)

    def whole(self, index: int, text: str, tokens: Tokens, finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return _choice(index, message=message, logprobs=_chat(tokens), finish_reason=finish_reason)


class CompletionShape:
    """Format of `/v1/completions`."""

    chunk_object = "text_completion"
    whole_object = "text_completion"
    id_prefix = "cmpl-"

    def first(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        return self.next(index, text, tokens)

    def next(self, index: int, text: str, tokens: Tokens) -> dict[str, Any]:
        return _choice(index, text=text, logprobs=_completion(tokens))

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _choice(index, text="", finish_reason=finish_reason)

    def whole(self, index: int, text: str, tokens: Tokens, finish_reason: str) -> dict[str, Any]:
        return _choice(index, text=text, logprobs=_completion(tokens), finish_reason=finish_reason)


@dataclasses.dataclass(frozen=True, slots=True)
class Envelope:
    """The common fields of all chunks of one answer."""

    shape: Shape
    request_id: str
    created: int
    model: str
    include_usage: bool

    def chunk(self, choice: dict[str, Any], *, extra: dict[str, Any] | None = None) -> bytes:
        """Return one chunk as a server-sent event."""
        return self._event([choice], None, extra)

    def usage_chunk(self, usage: Usage, *, extra: dict[str, Any]) -> bytes:
        """Return the chunk with the usage and without choices."""
        return self._event([], usage.body, extra)

    def whole(self, choices: list[dict[str, Any]], usage: Usage, *, extra: dict[str, Any]) -> bytes:
        """Return a whole answer as JSON."""
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
    """Return `body` as JSON."""
    return _encoder.encode(body)


def event(body: dict[str, Any]) -> bytes:
    """Return `body` as a server-sent event."""
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
