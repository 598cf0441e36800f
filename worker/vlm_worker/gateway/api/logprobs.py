"""Log-probabilities as OpenAI's client reads them: one form for chats, one for completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

LEAST_LOGPROB: Final = -9999.0
"""What OpenAI says of a token without any probability: JSON has no infinity."""


@dataclasses.dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token and its natural log-probability; `octets` are its bytes in UTF-8."""

    text: str
    octets: bytes
    logprob: float

    @property
    def body(self) -> dict[str, Any]:
        """As a chat has it."""
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.octets)}


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token of the answer: itself, the likeliest in its place, and where its text begins."""

    chosen: LikelyToken
    top: tuple[LikelyToken, ...]
    offset: int


def chat_body(tokens: Sequence[ChosenToken]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    content = [one.chosen.body | {"top_logprobs": [t.body for t in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def completion_body(tokens: Sequence[ChosenToken]) -> dict[str, Any]:
    """`logprobs` of a completion's choice; the chosen token stands among the likeliest, too."""
    return {
        "tokens": [one.chosen.text for one in tokens],
        "token_logprobs": [one.chosen.logprob for one in tokens],
        "top_logprobs": [
            {likely.text: likely.logprob for likely in (*one.top, one.chosen)} for one in tokens
        ],
        "text_offset": [one.offset for one in tokens],
    }
