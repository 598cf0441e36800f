"""From token ids to text, bit by bit: never half a character, never half a stop string.

ids ──▶ Detokenizer ──▶ StopScanner ──▶ what may be sent now
        holds back bytes    holds back the start of what may become a stop string
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte of tokenizers that fall back to bytes: Llama's, Gemma's."""


class Detokenizer:
    """Text of one answer: what `feed` and `flush` return, joined, is `tokenizer.decode(ids)`.

        ids     . . . . [ shown | new ]     decoded together, as a token's text depends on the one
                        start   end         before; what `shown` alone decodes to went before

    Bytes that stand as tokens are decoded as a run, which is text or not as a whole: nothing of a
    run goes before it ends. A token without text, as control tokens are, ends none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._end = 0
        self._shown = ""
        self._num_sent = 0

    def feed(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is still incomplete."""
        self._ids.append(token_id)
        if _BYTE.fullmatch(self._tokenizer.id_to_token(token_id) or "") or not self._decode(-1):
            return ""
        text = self._decode(self._start)
        new = text[len(self._shown) :]
        if not new or new.endswith("\ufffd"):
            return ""
        self._start, self._end = self._end, len(self._ids)
        self._shown = self._decode(self._start)
        self._num_sent += len(new)
        return new

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD, as in `decode`."""
        text = self._decode(0)
        rest = text[self._num_sent :]
        self._num_sent = len(text)
        return rest

    def _decode(self, start: int) -> str:
        text: str = self._tokenizer.decode(self._ids[start:], skip_special_tokens=True)
        return text


class StopScanner:
    """Cuts an answer before the first stop string in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What may be sent now; nothing more once `stopped`."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            # The one that is complete first, so that the cut does not depend on how text arrives.
            self.stopped, self._held = True, ""
            return held[: min(found)[1]]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back; the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
