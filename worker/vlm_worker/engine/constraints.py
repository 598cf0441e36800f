"""Constrained answers in the engine: grammars compiled once, masks filled while the model computes.

event loop       compile(grammar) ─▶ cache                     before the request is submitted
engine thread    matcher(grammar) ─▶ a copy for the sequence   start_masks ─▶ runner.execute
mask thread                                                    fill_masks ─▶ PendingMasks.words
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from llguidance import LLExecutor

from vlm_worker.core.grammars import GrammarError, Matcher, Vocabulary, fill_masks
from vlm_worker.core.step_values import ConstrainedRow
from vlm_worker.errors import InvalidRequestError

logger = logging.getLogger(__name__)

MAX_CACHED: Final = 64
"""Compiled grammars that are kept; most requests of a service use few."""

MAX_THREADS: Final = 4
"""Threads that fill the masks of one step, beside the model's."""


class PendingMasks:
    """The masks of one step; implements `vlm_kernels.sampling.Masks`."""

    def __init__(self, rows: np.ndarray, filled: Future[np.ndarray]) -> None:
        self.rows = rows
        self._filled = filled

    def words(self) -> np.ndarray:
        """Wait for the masks: uint32 `[M, ceil(V / 32)]`."""
        return self._filled.result()


class Constraints:
    """The grammars of one engine. Any thread may call `matcher`.

    Attributes:
        num_compiled, compile_seconds: grammars that were compiled, and their time.
        num_masks, mask_seconds: masks that were filled, and their time, most of it in parallel to
            the model.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[bytes, Matcher] = collections.OrderedDict()
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._executor = LLExecutor(min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 4)))
        self.num_compiled = 0
        self.compile_seconds = 0.0
        self.num_masks = 0
        self.mask_seconds = 0.0

    async def compile(self, grammar: bytes) -> None:
        """Compile a grammar on another thread if it is not cached: `matcher` then only copies it.

        Raises InvalidRequestError if it is no grammar, or exceeds a limit.
        """
        if grammar not in self._compiled:
            await asyncio.to_thread(self.matcher, grammar)

    def matcher(self, grammar: bytes) -> Matcher:
        """A matcher of a grammar before the first token. Raises as `compile` does."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found.copy()
        started = self._clock()
        try:
            made = self._vocabulary.compile(grammar)
        except GrammarError as error:
            logger.warning("a grammar was refused", extra={"reason": str(error)})
            raise _refused("the grammar cannot be used on this worker") from error
        with self._lock:
            self.num_compiled += 1
            self.compile_seconds += self._clock() - started
            self._compiled[grammar] = made
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return made.copy()

    def start_masks(self, constrained: Sequence[ConstrainedRow], num_rows: int) -> PendingMasks:
        """Start to fill the masks of a step with R rows; the tokens must not change meanwhile."""
        rows = np.full(num_rows, -1, np.int32)
        rows[[one.row for one in constrained]] = np.arange(len(constrained))
        pairs = [(one.matcher, one.answer) for one in constrained]
        return PendingMasks(rows, self._filler.submit(functools.partial(self._fill, pairs)))

    def _fill(self, pairs: Sequence[tuple[Matcher, np.ndarray]]) -> np.ndarray:
        started = self._clock()
        words = np.empty((len(pairs), self._vocabulary.num_words), np.uint32)
        fill_masks(pairs, words, self._executor)
        self.num_masks += len(pairs)
        self.mask_seconds += self._clock() - started
        return words


def refused_by(matcher: Matcher) -> InvalidRequestError:
    """The error of a sequence whose grammar allows no token."""
    return _refused(f"the answer cannot go on: {matcher.error or 'no token is allowed'}")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="response_format", code="invalid_json_schema")
