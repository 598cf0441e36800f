"""What the next token of an answer may be: a function of its grammar and its tokens so far.

    grammar text ─▶ Vocabulary.compile ─▶ Matcher ─▶ fill_masks: one bit per token of the next step

Law: masks and errors are f(grammar, tokens of the answer). No message carries the state. A pod that
gets a sequence, from a peer or with delivered tokens, builds it from them. Two matchers share
nothing, so no answer takes the limits of another one.

A grammar is a text of llguidance: Lark, or JSON with a JSON Schema. An answer may end, by a token
that ends the model's answers, if and only if the grammar accepts it. Control tokens are in no
answer, unless the grammar names them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from vlm_worker.annotations import MAX_GRAMMAR_BYTES
from vlm_worker.core.grammar_limits import parser_limits
from vlm_worker.core.token_texts import TokenTexts, ids_of

if TYPE_CHECKING:  # engines read no text
    from tokenizers import Tokenizer


WINDOW: Final = 512
"""Tokens W of an answer after which a new matcher of the library takes over.

It bounds the lexer states of a matcher: a token in a bounded string adds 9 to 18.
"""

SPARE_TOKENS: Final = 64
"""Tokens before the end of a window at which the matcher of the next one is compiled."""

LEAST_TOKENS: Final = 16
"""Tokens that a matcher follows before a limit, else the answer fails: to replace it takes time."""


class GrammarError(Exception):
    """A text is no grammar, exceeds a limit, or does not accept the tokens of an answer."""


class Vocabulary:
    """The tokens of a model, as grammars read them.

    Args:
        tokenizer: of the model; `tokenizer_tokens` reads the bytes of its tokens.
        vocab_size: number of logits V; ids beyond the tokenizer's are never allowed.
        eos_token_ids: the tokens that end an answer, at least one.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        ids = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
        if not ids:
            raise GrammarError("the model has no token that ends an answer")
        self.eos_token_ids = tuple(ids)
        self.num_words = -(-vocab_size // 32)
        self._limits = parser_limits()
        source = _TokenSource(tokenizer, vocab_size, ids)
        self._tokenizer = LLTokenizer(source, n_vocab=vocab_size, eos_token=ids)  # type: ignore[arg-type]

    def compile(self, grammar: bytes) -> Matcher:
        """A matcher of a grammar before the first token. Milliseconds; any thread may call it.

        Raises GrammarError with the library's reason.
        """
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"it has {len(grammar)} bytes, more than {MAX_GRAMMAR_BYTES}")
        try:
            text = grammar.decode()
        except UnicodeDecodeError as error:
            raise GrammarError("it is not UTF-8") from error
        make = functools.partial(LLMatcher, self._tokenizer, text, log_level=0, limits=self._limits)
        return Matcher(make, self.eos_token_ids)


class Matcher:
    """The grammar of one sequence. One thread at a time uses it; `make_spare` may run beside it.

    The library's matcher caches what it has seen of the grammar: lexer states, of which a limit
    bounds the number. So its masks depend on the answer alone, but what is left of its limits
    depends on all that it has computed. To keep the law for errors too, all matchers compute the
    same for an answer:

        token      0 ...................... W .................... 2W ....
        matcher    [a new one, all masks]   [a new one, all masks]   [a new one
                                             it consumes W tokens     it consumes 2W tokens

    A matcher that is built for c tokens begins with the last multiple of W, and computes the masks
    from there to c. At a limit, a new one consumes the whole answer; it has fewer states. If its
    mask fails too, or the limit comes after fewer than `LEAST_TOKENS`, the answer fails. If only
    the new matcher of a window fails, the old one goes on.

    Attributes:
        eos_token_ids: the tokens that end an answer.
        native: the matcher of the library that has consumed the answer.
        num_consumed: tokens of the answer that it has consumed.
        error: why it allows no token any more; None while it may.

    Raises GrammarError with the library's reason if `make` makes a matcher with an error.
    """

    def __init__(self, make: Callable[[], LLMatcher], eos_token_ids: tuple[int, ...]) -> None:
        self._make = make
        self.native = make()
        if self.native.is_error():
            raise GrammarError(self.native.get_error())
        self.eos_token_ids = eos_token_ids
        self.num_consumed = 0
        self.error: str | None = None
        self._began = 0  # tokens of the answer when `native` was made
        self._num_masked = -1  # tokens of the answer at the last mask
        self._spare: LLMatcher | None = None
        self._num_spares = 0

    def follow(self, answer: np.ndarray) -> bool:
        """Consume the tokens of `answer` that are new to it; False if the grammar refuses one.

        `answer` has all tokens of the answer, and begins with those that were consumed before.
        """
        assert len(answer) >= self.num_consumed, "an answer never loses tokens"
        if self.num_consumed == 0 and self._num_masked < 0:
            self._begin(answer)
        while self.error is None and self.num_consumed < len(answer):
            if self._num_masked < self.num_consumed:
                self.native.compute_bitmask()
                self.check(answer[: self.num_consumed])
            else:
                self._consume(answer[: self.num_consumed + 1])
        self.num_consumed = len(answer)
        return self.error is None

    def check(self, answer: np.ndarray) -> bool:
        """Whether the answer may go on after `native` has filled the mask of its next token.

        If a limit was exceeded, another `native` is there, and must fill the mask.
        """
        self._num_masked = self.num_consumed
        if self.error is None and self.native.is_error():
            self._replace(answer)
        return self.error is None

    def claim_spare(self) -> bool:
        """Whether the caller shall have another thread call `make_spare`; once per window."""
        window, place = divmod(self.num_consumed, WINDOW)
        if WINDOW - place > SPARE_TOKENS or self._num_spares > window:
            return False
        self._num_spares = window + 1
        return True

    def make_spare(self) -> None:
        """Compile the matcher of the next window, so that no step waits for it."""
        self._spare = self._make()

    def _begin(self, answer: np.ndarray) -> None:
        """Begin with the last window of an answer whose first tokens others have computed."""
        for start in range(len(answer) // WINDOW * WINDOW, 0, -WINDOW):
            if (native := self._fresh(answer[:start])) is not None:
                self.native, self._began, self.num_consumed = native, start, start
                return

    def _consume(self, answer: np.ndarray) -> None:
        """Consume the last token of `answer`."""
        self.num_consumed = len(answer)
        if not self.native.consume_token(int(answer[-1])):
            self._replace(answer)
        elif len(answer) % WINDOW == 0 and (native := self._fresh(answer)) is not None:
            self.native, self._began = native, len(answer)

    def _replace(self, answer: np.ndarray) -> None:
        """Replace a matcher with an error by a new one."""
        native = self._make()
        if not native.consume_tokens(answer.tolist()):
            self.error = "the grammar does not allow the tokens so far"
            return
        native.compute_bitmask()
        if native.is_error() or len(answer) - self._began < LEAST_TOKENS:
            self.error = "the grammar exceeds a limit of time or memory after the tokens so far"
            return
        self.native, self._began = native, len(answer)

    def _fresh(self, answer: np.ndarray) -> LLMatcher | None:
        """A new matcher that has consumed an answer, and its mask; None if it fails."""
        native, self._spare = self._spare or self._make(), None
        if native.consume_tokens(answer.tolist()):
            native.compute_bitmask()
        return None if native.is_error() else native


def fill_masks(
    matchers: Sequence[tuple[Matcher, np.ndarray]], words: np.ndarray, executor: LLExecutor
) -> None:
    """Fill a mask per pair of matcher and answer: uint32 `[M, num_words]`, C-contiguous.

    Bit `i % 32` of word `i // 32` is token i. The mask of a matcher with an error has no token.
    """
    following = [
        (matcher.native, at)
        for at, (matcher, answer) in enumerate(matchers)
        if matcher.follow(answer)
    ]
    words.fill(0)
    num_bytes = words.shape[1] * words.itemsize
    if following:
        executor.unsafe_compute_mask_ptr(following, words.ctypes.data, num_bytes, len(words))
    for native, at in following:
        matcher, answer = matchers[at]
        if not matcher.check(answer):
            words[at] = 0
        elif matcher.native is not native:
            matcher.native.unsafe_compute_mask_ptr(words[at].ctypes.data, num_bytes)


class _TokenSource:
    """The bytes of all tokens, in the form that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        texts = TokenTexts(tokenizer)
        known = min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        special = texts.control_ids.union(eos_token_ids)
        self.tokens = [texts.of(token_id)[1] for token_id in range(known)]
        self.tokens += [b""] * (vocab_size - known)
        self.special_token_ids = sorted(token_id for token_id in special if token_id < vocab_size)
        self.eos_token_id = eos_token_ids[0]
        self._tokenizer = tokenizer

    def __call__(self, text: Any) -> list[int]:
        return ids_of(self._tokenizer, text)
