"""What the choices of a completion have of its prompt: text, tokens and log-probabilities. Pure.

prompt    BOS  The  cat          text_offset of a token: characters of the prompt before it
logprobs  null -2.1 -5.0         the first token of a prompt has none
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from vlm_worker.core.token_texts import TokenTexts
from vlm_worker.gateway.detokenization import (
    ChosenToken,
    LikelyToken,
    TextChunk,
    begins_in,
    likely,
)
from vlm_worker.types import TokenLogprobs

LONG_VALUES: Final = 4096
"""Values beyond which a prompt is shown from a thread."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The P tokens of a prompt, and P - 1 log-probabilities and ranks: all but the first's."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    ranks: tuple[int, ...]

    @property
    def is_long(self) -> bool:
        """Whether it takes milliseconds to make what is shown of it."""
        num_top = len(self.logprobs[0].top) if self.logprobs else 0
        return len(self.logprobs) * (num_top + 1) > LONG_VALUES


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """What a client wants of a prompt.

    `text` is the prompt's, or "". `num_logprobs` are the likeliest tokens beside each of the
    prompt's in `logprobs`, and `num_prompt_logprobs` those in `prompt_logprobs`; None shows none.
    With `no_answer`, no token of the answer is shown.
    """

    text: str = ""
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    no_answer: bool = False

    @property
    def lists_all(self) -> bool:
        """Whether `logprobs` has the tokens of prompt and answer, those without text too."""
        return self.num_logprobs is not None

    def num_values(self, num_tokens: int) -> int:
        """Log-probabilities that one choice shows of a prompt of `num_tokens`."""
        shown = (self.num_logprobs, self.num_prompt_logprobs)
        return num_tokens * sum(1 + num_top for num_top in shown if num_top is not None)

    def chunk(self, texts: TokenTexts, prompt: ScoredPrompt | None) -> TextChunk:
        """The text of the prompt, and its tokens if they are shown."""
        if self.num_logprobs is None or prompt is None:
            return TextChunk(self.text)
        begins = offsets_in(self.text, [texts.of(one)[1] for one in prompt.token_ids])
        first = LikelyToken(*texts.of(prompt.token_ids[0]), None)
        tokens = [ChosenToken(first, (), begins[0])]
        each = zip(prompt.token_ids[1:], prompt.logprobs, begins[1:], strict=True)
        for token_id, logprobs, begin in each:
            top = logprobs.top[: self.num_logprobs]
            chosen = likely(texts, token_id, logprobs.logprob)
            tokens.append(ChosenToken(chosen, tuple(likely(texts, *one) for one in top), begin))
        return TextChunk(self.text, tuple(tokens))

    def prompt_logprobs(
        self, texts: TokenTexts, prompt: ScoredPrompt | None
    ) -> list[dict[str, Any] | None] | None:
        """The field `prompt_logprobs` in vLLM's form; None if it is not shown.

        Per token: its id and those of the likeliest tokens, each with log-probability, rank and
        text. The first token has None.
        """
        if self.num_prompt_logprobs is None or prompt is None:
            return None
        shown: list[dict[str, Any] | None] = [None]
        each = zip(prompt.token_ids[1:], prompt.logprobs, prompt.ranks, strict=True)
        for token_id, logprobs, rank in each:
            ranked = [(*one, at) for at, one in enumerate(logprobs.top, 1)]
            ranked = [*ranked[: self.num_prompt_logprobs], (token_id, logprobs.logprob, rank)]
            found = [(one, likely(texts, one, logprob), at) for one, logprob, at in ranked]
            shown.append(
                {
                    str(one): {"logprob": a.logprob, "rank": at, "decoded_token": a.text}
                    for one, a, at in found
                }
            )
        return shown


NO_ECHO = Echo()


def after(echo: Echo, piece: TextChunk) -> TextChunk:
    """A piece of an answer with the offsets that it has behind the text of its prompt."""
    if not echo.text or not piece.tokens:
        return piece
    tokens = (
        dataclasses.replace(token, offset=token.offset + len(echo.text)) for token in piece.tokens
    )
    return TextChunk(piece.text, tuple(tokens))


def offsets_in(text: str, utf8_bytes: Sequence[bytes]) -> list[int]:
    """Return the offset in `text`, in characters, of each token of a prompt.

    A token that a tokenizer adds around a text, such as BOS, is not in it: it begins where the next
    token does. If the text cannot be made of the tokens, the offsets are those of `begins_in`.
    """
    encoded, at, shown = text.encode(), 0, []
    for one in utf8_bytes:
        if at == 0 and one.startswith(b" ") and not encoded.startswith(b" "):
            one = one[1:]  # noqa: PLW2901  sentencepiece puts a space before the first word
        is_in = encoded.startswith(one, at)
        shown.append(one if is_in else b"")
        at += len(shown[-1])
    if at < len(encoded):
        return begins_in(text, utf8_bytes)
    return begins_in(text, shown)
