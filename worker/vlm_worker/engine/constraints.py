"""Constrained answers in the engine: a matcher per sequence, masks filled beside the model.

event loop       prepare(request) ─▶ submit_prefill or receive
compile threads  └▶ Vocabulary.compile, delivered tokens       the next window's matcher
engine thread                                                  start_masks ─▶ runner.execute
mask thread                                                    fill_masks ─▶ PendingMasks.words

No matcher is kept for the next request with its grammar: the library's copies share their limits.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np
from llguidance import LLExecutor

from vlm_worker.core.grammars import GrammarError, Matcher, Vocabulary, fill_masks
from vlm_worker.core.step_values import ConstrainedRow
from vlm_worker.errors import InvalidRequestError
from vlm_worker.types import Request

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_THREADS: Final = 4
"""Threads that fill the masks of one step, beside the model's; as many compile grammars."""


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

    Args:
        num_cpus: that this process may use; a quarter of them fills masks.

    Attributes:
        num_compiled, compile_seconds: matchers of sequences that were compiled, and their time.
        num_masks, mask_seconds: masks that were filled, and their time, most of it in parallel to
            the model.
        num_threads: that fill the masks of one step, and that compile.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        num_cpus: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
        self._lock = threading.Lock()
        self.num_threads = min(MAX_THREADS, max(1, num_cpus // 4))
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._compiler = _Compiler(self.num_threads)
        self._executor = LLExecutor(self.num_threads)
        self.num_compiled = 0
        self.compile_seconds = 0.0
        self.num_masks = 0
        self.mask_seconds = 0.0

    async def prepare(self, request: Request) -> Matcher:
        """The matcher of a request with a grammar, after its delivered tokens. For one sequence.

        A request with delivered tokens, of a lost pod, goes before new ones.

        Raises InvalidRequestError if it is no grammar, or exceeds a limit.
        """
        make = functools.partial(self.matcher, request)
        has_begun = request.num_delivered_tokens > 0
        return await asyncio.wrap_future(self._compiler.submit(make, has_begun=has_begun))

    def matcher(self, request: Request) -> Matcher:
        """As `prepare`, on the calling thread: milliseconds."""
        started = self._clock()
        try:
            made = self._vocabulary.compile(request.sampling.grammar)
        except GrammarError as error:
            logger.warning("a grammar was refused", extra={"reason": str(error)})
            raise _refused("the grammar cannot be used on this worker") from error
        made.follow(np.array(request.token_ids[request.num_prompt_tokens :], np.int32))
        with self._lock:
            self.num_compiled += 1
            self.compile_seconds += self._clock() - started
        return made

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
        for matcher, _ in pairs:
            if matcher.claim_spare():
                self._compiler.submit(matcher.make_spare, has_begun=True)
        return words


class _Compiler:
    """Threads that compile grammars: first those of answers that have begun, each in order.

    A small worker has one thread. Clients see a pause in an answer, and new requests are many.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammars")
        self._begun: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._new: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, compile_it: Callable[[], T], *, has_begun: bool) -> Future[T]:
        future: Future[T] = Future()
        (self._begun if has_begun else self._new).append((future, compile_it))
        self._threads.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        try:
            future, compile_it = self._begun.popleft()
        except IndexError:
            future, compile_it = self._new.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            made = compile_it()
        except BaseException as error:  # noqa: BLE001 - the future's owner gets it
            future.set_exception(error)
        else:
            future.set_result(made)


def matcher_of(
    request: Request, constraints: Constraints | None, prepared: Matcher | None
) -> Matcher | None:
    """The matcher of a request on the engine thread: `prepared`, unless the caller made none.

    Raises InvalidRequestError if this engine cannot constrain the answer.
    """
    if not request.sampling.grammar or prepared is not None:
        return prepared
    if constraints is None:
        raise InvalidRequestError(
            "this worker does not constrain answers: its model has no tokenizer.json, or no "
            "token that ends an answer",
            param="response_format",
        )
    return constraints.matcher(request)


def refused_by(matcher: Matcher) -> InvalidRequestError:
    """The error of a sequence whose grammar allows no token."""
    return _refused(f"the answer cannot go on: {matcher.error or 'no token is allowed'}")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="response_format", code="invalid_json_schema")
