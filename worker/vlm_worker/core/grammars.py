"""What the next token of an answer may be: a function of its grammar and its tokens so far.

    grammar text ─▶ Vocabulary.compile ─▶ Matcher ─▶ fill_masks: one bit per token of the next step

Law: the state of a matcher is f(grammar, tokens of the answer). No message carries it. A pod that
gets a sequence, from a peer, after a preemption or with delivered tokens, builds it from them.

A grammar is a text of llguidance: Lark, or JSON with a JSON Schema. An answer may end, by a token
that ends the model's answers, if and only if the grammar accepts it. Control tokens are in no
answer, unless the grammar names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from vlm_worker.annotations import MAX_GRAMMAR_BYTES
from vlm_worker.core.grammar_limits import parser_limits
from vlm_worker.core.token_texts import TokenTexts

if TYPE_CHECKING:  # engines read no text
    from tokenizers import Tokenizer


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
        """The matcher of a grammar before the first token. Milliseconds; any thread may call it.

        Raises GrammarError with the library's reason.
        """
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"it has {len(grammar)} bytes, more than {MAX_GRAMMAR_BYTES}")
        try:
            text = grammar.decode()
        except UnicodeDecodeError as error:
            raise GrammarError("it is not UTF-8") from error
        native = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if native.is_error():
            raise GrammarError(native.get_error())
        return Matcher(native, self.eos_token_ids)


class Matcher:
    """The grammar of one sequence. One thread at a time uses it.

    Attributes:
        eos_token_ids: the tokens that end an answer.
        num_consumed: tokens of the answer that it has consumed.
        error: why it allows no token any more; None while it may.
    """

    def __init__(self, native: LLMatcher, eos_token_ids: tuple[int, ...]) -> None:
        self._native = native
        self.eos_token_ids = eos_token_ids
        self.num_consumed = 0
        self.error: str | None = None

    def copy(self) -> Matcher:
        """A matcher of the same state, for another sequence."""
        copied = Matcher(self._native.deep_copy(), self.eos_token_ids)
        copied.num_consumed, copied.error = self.num_consumed, self.error
        return copied

    def follow(self, answer: np.ndarray) -> LLMatcher | None:
        """Consume the tokens of `answer` that are new to it; None if the grammar refuses one.

        `answer` has all tokens of the answer, and begins with those that were consumed before.
        """
        assert len(answer) >= self.num_consumed, "an answer never loses tokens"
        new = answer[self.num_consumed :].tolist()
        if self.error is None and new and not self._native.consume_tokens(new):
            self.error = "the grammar does not allow the tokens so far"
        self.num_consumed = len(answer)
        return self._native if self.error is None else None

    def check(self) -> bool:
        """Whether the mask that it has filled may be used; a limit may be exceeded."""
        if self.error is None and self._native.is_error():
            self.error = "the grammar exceeds a limit of time or memory after the tokens so far"
        return self.error is None


def fill_masks(
    matchers: Sequence[tuple[Matcher, np.ndarray]], words: np.ndarray, executor: LLExecutor
) -> None:
    """Fill a mask per pair of matcher and answer: uint32 `[M, num_words]`, C-contiguous.

    Bit `i % 32` of word `i // 32` is token i. The mask of a matcher with an error has no token.
    """
    following = [
        (native, at)
        for at, (matcher, answer) in enumerate(matchers)
        if (native := matcher.follow(answer)) is not None
    ]
    words.fill(0)
    if following:
        num_bytes = words.shape[1] * words.itemsize
        executor.unsafe_compute_mask_ptr(following, words.ctypes.data, num_bytes, len(words))
    for at, (matcher, _) in enumerate(matchers):
        if not matcher.check():
            words[at] = 0


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
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
