"""One choice's tokens as pieces of text that may be sent, each with the tokens that it shows.

token ─▶ Detokenizer ─▶ StopScanner ─▶ text that may go
     │        └─▶ where in the text the token begins, once there is text
     └─▶ its log-probabilities, held until text goes that comes after that

Text is held back while a character is incomplete, or while it may become a stop string; a token
goes with the first text that reaches past where it begins. What begins at or behind the cut of a
stop string never goes. A token in the middle of a character begins where that character does.
"""

from __future__ import annotations

import dataclasses

from tokenizers import Tokenizer

from vlm_worker.gateway.api.logprobs import LEAST_LOGPROB, ChosenToken, LikelyToken
from vlm_worker.gateway.detokenize import Detokenizer, StopScanner
from vlm_worker.gateway.token_texts import TokenTexts, begins_in
from vlm_worker.types import TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Text to send, and the tokens that begin in it; both may be empty."""

    text: str
    tokens: tuple[ChosenToken, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return bool(self.text or self.tokens)


class Piecing:
    """Of one choice; fed by one task."""

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts, *, stop: tuple[str, ...]) -> None:
        self._texts = texts
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stop)
        self._num_decoded = 0
        self._num_sent = 0
        self._textless: list[ChosenToken] = []
        self._held: list[ChosenToken] = []

    @property
    def stopped(self) -> bool:
        """A stop string is complete: the choice needs no more tokens."""
        return self._scanner.stopped

    def feed(self, token_id: int, logprobs: TokenLogprobs | None) -> Piece:
        """What this token lets go."""
        if logprobs is not None and self._texts.is_text(token_id):
            self._textless.append(self._chosen(token_id, logprobs))
        text = self._detokenizer.feed(token_id)
        if text:
            self._place(text)
        return self._release(self._scanner.feed(text))

    def finish(self) -> Piece:
        """What is left at the end."""
        text = self._detokenizer.flush()
        self._place(text)
        piece = self._release(self._scanner.feed(text) + self._scanner.flush())
        if self.stopped:
            return piece
        rest, self._held = self._held, []
        return Piece(piece.text, (*piece.tokens, *rest))

    def _place(self, text: str) -> None:
        """Say of the tokens that were without text where in it they begin."""
        begins = begins_in(text, [token.chosen.octets for token in self._textless])
        self._held += [
            dataclasses.replace(token, offset=self._num_decoded + begin)
            for token, begin in zip(self._textless, begins, strict=True)
        ]
        self._textless.clear()
        self._num_decoded += len(text)

    def _release(self, text: str) -> Piece:
        self._num_sent += len(text)
        count = sum(token.offset < self._num_sent for token in self._held)
        tokens, self._held = self._held[:count], self._held[count:]
        return Piece(text, tuple(tokens))

    def _chosen(self, token_id: int, logprobs: TokenLogprobs) -> ChosenToken:
        return ChosenToken(
            chosen=self._likely(token_id, logprobs.logprob),
            top=tuple(self._likely(one, logprob) for one, logprob in logprobs.top),
            offset=self._num_decoded,
        )

    def _likely(self, token_id: int, logprob: float) -> LikelyToken:
        return LikelyToken(*self._texts.of(token_id), max(logprob, LEAST_LOGPROB))
