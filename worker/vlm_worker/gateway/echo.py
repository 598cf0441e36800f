"""What the choices of a completion have of its prompt: text, tokens and log-probabilities. Pure.

prompt    BOS  The  cat          text_offset of a token: characters of the prompt before it
logprobs  null -2.1 -5.0         the first token of a prompt has none
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, Self

from vlm_worker.core.token_texts import TokenTexts
from vlm_worker.gateway.detokenization import (
    ChosenToken,
    LikelyToken,
    TextChunk,
    begins_in,
    likely,
)
from vlm_worker.gateway.http_response import Json, encode
from vlm_worker.types import PromptLogprobs

LONG_VALUES: Final = 4096
"""Values beyond which a prompt is shown from a thread."""
LISTED_BYTES: Final = 80
"""Memory of a value in `logprobs`: 16 bytes in arrays, and its JSON of 30 to 60."""
RANKED_BYTES: Final = 128
"""Memory of a value in `prompt_logprobs`, whose JSON is longer."""
SLICE: Final = 128
"""Tokens of a prompt that are encoded at once: the encoder keeps other threads from running."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The tokens of a prompt, and the log-probabilities of all but the first."""

    token_ids: Sequence[int]
    scores: PromptLogprobs

    @classmethod
    def of(cls, token_ids: Sequence[int], parts: Sequence[PromptLogprobs]) -> Self | None:
        """Join parts; None if they are not those of all tokens, in order."""
        num_top = parts[0].num_top if parts else 0
        joined = PromptLogprobs(1, array("f"), array("I"), num_top, array("I"), array("f"))
        for part in parts:
            if (part.first_index, part.num_top) != (len(joined.logprobs) + 1, num_top):
                return None
            joined.logprobs.extend(part.logprobs)
            joined.ranks.extend(part.ranks)
            joined.top_ids.extend(part.top_ids)
            joined.top_logprobs.extend(part.top_logprobs)
        is_whole = len(joined.logprobs) == len(token_ids) - 1
        return cls(token_ids, joined) if is_whole else None

    @property
    def is_long(self) -> bool:
        """Whether it takes milliseconds to make what is shown of it."""
        return len(self.token_ids) * (self.scores.num_top + 1) > LONG_VALUES

    def top(self, index: int, count: int) -> list[tuple[int, float]]:
        """Ids and log-probabilities of up to `count` likeliest tokens at `index`, at least 1."""
        at = (index - 1) * self.scores.num_top
        end = at + min(count, self.scores.num_top)
        ids, logprobs = self.scores.top_ids[at:end], self.scores.top_logprobs[at:end]
        return list(zip(ids, logprobs, strict=True))


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

    def num_bytes(self, num_tokens: int) -> int:
        """Memory of the values that one choice shows of a prompt of `num_tokens`, until its end."""
        listed, ranked = self.num_logprobs, self.num_prompt_logprobs
        num_bytes = 0 if listed is None else LISTED_BYTES * (1 + listed)
        num_bytes += 0 if ranked is None else RANKED_BYTES * (1 + ranked)
        return num_tokens * num_bytes

    def chunks(self, texts: TokenTexts, prompt: ScoredPrompt) -> Iterator[TextChunk]:
        """The text of the prompt with its tokens, `SLICE` at once."""
        begins = offsets_in(self.text, [texts.of(one)[1] for one in prompt.token_ids])
        cuts = [0, *begins[SLICE::SLICE], len(self.text)]
        for first, (start, end) in zip(
            range(0, len(begins), SLICE), itertools.pairwise(cuts), strict=True
        ):
            indices = range(first, min(first + SLICE, len(begins)))
            tokens = tuple(self._token(texts, prompt, at, begins[at]) for at in indices)
            yield TextChunk(self.text[start:end], tokens)

    def _token(
        self, texts: TokenTexts, prompt: ScoredPrompt, index: int, begin: int
    ) -> ChosenToken:
        token_id = prompt.token_ids[index]
        if index == 0:
            return ChosenToken(LikelyToken(*texts.of(token_id), None), (), begin)
        chosen = likely(texts, token_id, prompt.scores.logprobs[index - 1])
        top = prompt.top(index, self.num_logprobs or 0)
        return ChosenToken(chosen, tuple(likely(texts, *one) for one in top), begin)

    def logprobs(
        self, answer: Sequence[ChosenToken], texts: TokenTexts, prompt: ScoredPrompt
    ) -> list[Json]:
        """The field `logprobs` of prompt and answer, in parts of its JSON."""
        lists: dict[str, bytearray] = {}
        prompts = (chunk.tokens for chunk in self.chunks(texts, prompt))
        for tokens in itertools.chain(prompts, [answer]):
            for name, values in completion_body(tokens).items():
                _extend(lists.setdefault(name, bytearray(b"[")), values)
        parts: list[Json] = []
        for name, text in lists.items():
            parts += [b'%b"%b":' % (b"," if parts else b"{", name.encode()), text, b"]"]
        return [*parts, b"}"]

    def prompt_logprobs(self, texts: TokenTexts, prompt: ScoredPrompt) -> list[Json]:
        """The field `prompt_logprobs` in vLLM's form, in parts of its JSON.

        Per token: its id and those of the likeliest tokens, each with log-probability, rank and
        text. The first token has null.
        """
        text, count = bytearray(b"["), len(prompt.token_ids)
        for first in range(0, count, SLICE):
            indices = range(first, min(first + SLICE, count))
            _extend(text, [self._ranked(texts, prompt, at) for at in indices])
        return [text, b"]"]

    def _ranked(
        self, texts: TokenTexts, prompt: ScoredPrompt, index: int
    ) -> dict[str, dict[str, Any]] | None:
        if index == 0:
            return None
        token_id, scores = prompt.token_ids[index], prompt.scores
        top = prompt.top(index, self.num_prompt_logprobs or 0)
        ranked = [(*one, rank) for rank, one in enumerate(top, 1)]
        ranked.append((token_id, scores.logprobs[index - 1], scores.ranks[index - 1]))
        found = [(one, likely(texts, one, logprob), rank) for one, logprob, rank in ranked]
        return {
            str(one): {"logprob": a.logprob, "rank": rank, "decoded_token": a.text}
            for one, a, rank in found
        }


def _extend(text: bytearray, values: Sequence[Any]) -> None:
    """Add values to a JSON list that lacks its last bracket."""
    if values:
        text += (b"," if len(text) > 1 else b"") + encode(values)[1:-1]


NO_ECHO = Echo()


def completion_body(tokens: Sequence[ChosenToken]) -> dict[str, list[Any]]:
    """Return `logprobs` of a completion's choice; `top_logprobs` include the chosen token.

    The first token of a prompt has null in both.
    """
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
