"""Converts the tokens of one choice to text.

token ─▶ Detokenizer ─▶ StopScanner ─▶ text that may be sent
     │        └─▶ offset in the text where the token begins, once it has text
     └─▶ its log-probabilities, held until text after that offset is sent

The detokenizer holds back incomplete characters; the scanner holds back text that may become a stop
string. A token is sent with the first text that reaches beyond its offset. A token that begins at
or after the cut of a stop string is never sent. A token in the middle of a character has the offset
of that character.

`core.token_texts` has the text of single tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from vlm_worker.core.token_texts import TokenTexts
from vlm_worker.types import TokenLogprobs

MIN_LOGPROB: Final = -9999.0
"""OpenAI's value for a token of probability 0, because JSON has no infinity."""


@dataclasses.dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token and its natural log-probability; `utf8_bytes` are its bytes in UTF-8.

    The first token of a prompt has no log-probability.
    """

    text: str
    utf8_bytes: bytes
    logprob: float | None

    @property
    def body(self) -> dict[str, Any]:
        """The token in `logprobs` of a chat."""
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.utf8_bytes)}


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token of a choice, the most likely tokens at its position, and its text offset."""

    chosen: LikelyToken
    top: tuple[LikelyToken, ...]
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class TextChunk:
    """Text to send, and the tokens that begin in it; both may be empty."""

    text: str
    tokens: tuple[ChosenToken, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


class TextAssembler:
    """Builds the text of one choice. One task calls it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        *,
        stop: tuple[str, ...],
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        kept_ids: frozenset[int] = frozenset(),
        lists_all: bool = False,
    ) -> None:
        """`kept_ids` are the control tokens that have text in this answer.

        If it `lists_all`, tokens without text have log-probabilities too.
        A token of `stop_token_ids` ends the choice and has no text. Stop strings are looked for in
        the text that follows the first `min_tokens` tokens.
        """
        self._num_unscanned = min_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._ended = False
        self._texts = texts
        self._kept_ids = kept_ids
        self._lists_all = lists_all
        dropped_ids = texts.control_ids - kept_ids if kept_ids else None
        self._detokenizer = Detokenizer(tokenizer, dropped_ids)
        self._scanner = StopScanner(stop)
        self._num_decoded = 0
        self._num_sent = 0
        self._textless: list[tuple[ChosenToken, bytes]] = []
        self._held: list[ChosenToken] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string or token is complete. The choice then needs no more tokens."""
        return self._scanner.stopped or self._ended

    def feed(self, token_id: int, logprobs: TokenLogprobs | None) -> TextChunk:
        """Add a token; return the text and tokens that may be sent now."""
        if token_id in self._stop_token_ids:
            self._ended = True
            return TextChunk("")
        is_text = token_id in self._kept_ids or self._texts.is_text(token_id)
        if logprobs is not None and (is_text or self._lists_all):
            chosen = self._chosen(token_id, logprobs)
            self._textless.append((chosen, chosen.chosen.utf8_bytes if is_text else b""))
        text = self._detokenizer.feed(token_id)
        if text:
            self._place(text)
        return self._release(self._scanned(text, num_tokens=1))

    def finish(self) -> TextChunk:
        """End the choice; return the remaining text and tokens."""
        text = self._detokenizer.flush()
        self._place(text)
        piece = self._release(self._scanned(text) + self._scanner.flush())
        if self._scanner.stopped:
            return piece
        rest, self._held = self._held, []
        return TextChunk(piece.text, (*piece.tokens, *rest))

    def _scanned(self, text: str, *, num_tokens: int = 0) -> str:
        if self._num_unscanned:
            self._num_unscanned -= num_tokens
            return text
        return self._scanner.feed(text)

    def _place(self, text: str) -> None:
        """Set the offsets of the tokens that waited for `text`, and hold them for sending."""
        if not self._textless:
            self._num_decoded += len(text)
            return
        begins = begins_in(text, [shown for _, shown in self._textless])
        self._held += [
            dataclasses.replace(token, offset=self._num_decoded + begin)
            for (token, _), begin in zip(self._textless, begins, strict=True)
        ]
        self._textless.clear()
        self._num_decoded += len(text)

    def _release(self, text: str) -> TextChunk:
        self._num_sent += len(text)
        if not self._held:
            return TextChunk(text)
        count = sum(token.offset < self._num_sent for token in self._held)
        tokens, self._held = self._held[:count], self._held[count:]
        return TextChunk(text, tuple(tokens))

    def _chosen(self, token_id: int, logprobs: TokenLogprobs) -> ChosenToken:
        return ChosenToken(
            chosen=likely(self._texts, token_id, logprobs.logprob),
            top=tuple(likely(self._texts, one, logprob) for one, logprob in logprobs.top),
            offset=self._num_decoded,
        )


def likely(texts: TokenTexts, token_id: int, logprob: float) -> LikelyToken:
    """A token with its text, and a log-probability that JSON has."""
    return LikelyToken(*texts.of(token_id), max(logprob, MIN_LOGPROB))


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte token of tokenizers with byte fallback, for example Llama's and Gemma's."""


class Detokenizer:
    """Text of one answer. The joined results of `feed` and `flush` equal `tokenizer.decode(ids)`.

    Tokens in `dropped_ids` have no text; None: control tokens have none.

        ids     . . . . [ shown | new ]     decoded together: a token's text depends on the token
                        start   end         before it; the text of `shown` is already returned

    The tokenizer decodes a run of byte tokens as a whole, to text or to U+FFFD. So `feed` returns
    nothing of a run before it ends. A token without text, such as a control token, ends no run.
    """

    def __init__(self, tokenizer: Tokenizer, dropped_ids: frozenset[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self._dropped_ids = dropped_ids
        self._ids: list[int] = []
        self._start = self._end = 0
        self._shown = ""
        self._num_sent = 0

    def feed(self, token_id: int) -> str:
        """Add a token; return the text that it completes, "" if a character is incomplete."""
        if self._dropped_ids is not None and token_id in self._dropped_ids:
            return ""
        self._ids.append(token_id)
        alone = _alone(self._tokenizer, token_id, self._dropped_ids is None)
        if not alone:
            return ""
        text = self._decode(self._start)
        new = text[len(self._shown) :]
        if not new or new.endswith("\ufffd"):
            return ""
        self._start, self._end = self._end, len(self._ids)
        is_last = self._start == self._end - 1
        self._shown = alone if is_last else self._decode(self._start)
        self._num_sent += len(new)
        return new

    def flush(self) -> str:
        """Return the remaining text. An incomplete character becomes U+FFFD, as in `decode`."""
        text = self._decode(0)
        rest = text[self._num_sent :]
        self._num_sent = len(text)
        return rest

    def _decode(self, start: int) -> str:
        skip = self._dropped_ids is None
        text: str = self._tokenizer.decode(self._ids[start:], skip_special_tokens=skip)
        return text


@functools.lru_cache(maxsize=8192)
def _alone(tokenizer: Tokenizer, token_id: int, skips_special: bool) -> str:
    """Return the text of a token by itself; "" for a byte token, which ends no run of them."""
    if _BYTE.fullmatch(tokenizer.id_to_token(token_id) or ""):
        return ""
    text: str = tokenizer.decode([token_id], skip_special_tokens=skips_special)
    return text


class StopScanner:
    """Ends an answer before its first complete stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Add text; return the text that may be sent now, "" once `stopped`."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            # Cut at the stop string that ends first: the cut must not depend on the chunks.
            self.stopped, self._held = True, ""
            return held[: min(found)[1]]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """Return the held text. Call it if the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def begins_in(text: str, utf8_bytes: Sequence[bytes]) -> list[int]:
    """Return the offset in `text`, in characters, of each token; `utf8_bytes` has their bytes.

    If the joined bytes are not UTF-8, each token is counted with U+FFFD for its invalid bytes. This
    is exact for byte tokens and approximate for others. If the tokens have more characters than
    `text`, it lacks a space before the first word. A token without bytes begins where the next one
    does.
    """
    begins, count = [], 0
    valid = _is_text(b"".join(utf8_bytes))
    for one in utf8_bytes:
        inside = valid and bool(one) and not _begins_character(one[0])
        begins.append(count - inside)
        count += sum(map(_begins_character, one)) if valid else len(one.decode(errors="replace"))
    hidden = max(count - len(text), 0)
    return [min(max(begin - hidden, 0), max(len(text) - 1, 0)) for begin in begins]


def _begins_character(byte: int) -> bool:
    return byte & 0xC0 != 0x80


def _is_text(utf8_bytes: bytes) -> bool:
    try:
        utf8_bytes.decode()
    except UnicodeDecodeError:
        return False
    return True
