"""Writes grammars on a thread and has a child process check them: none stops the gateway.

    write(how) ─────▶ the tenant's turn ─▶ thread ─▶ what it returns or raises
    check(grammar) ─▶ earlier verdicts ─▶ the tenant's turn ─▶ child ─▶ ApiError or nothing

The library has no bound on its time for every text: an intersection of patterns may take minutes.
The child ends itself after `grammar_child.CPU_SECONDS` of CPU time, or if it exceeds its memory.

A check is a task of its own, for all requests of a tenant with the same grammar. If they all end,
a check that waits is cancelled. A running one goes on: it is short, and its verdict is kept.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import hashlib
import logging
from collections.abc import Callable
from typing import Final, TypeVar

from vlm_worker.gateway.api.errors import unavailable
from vlm_worker.gateway.fair_slots import FairSlots
from vlm_worker.gateway.grammar import Grammar, error_of
from vlm_worker.gateway.grammar_process import GrammarProcess, NoVerdictError
from vlm_worker.gateway.memory import Bound

logger = logging.getLogger(__name__)

MAX_VERDICTS: Final = 1024
MAX_WAITING: Final = 64
"""Checks of one tenant that wait for their turn."""
MAX_WRITING: Final = 256
"""Requests of one tenant whose grammar waits to be written. Most take a millisecond."""

T = TypeVar("T")


class GrammarChecks:
    """The verdicts on grammars, and the child that gives them. One event loop uses it.

    Attributes:
        num_checked: grammars that the child has checked.
        num_refused: those of them that it refused.
    """

    def __init__(self) -> None:
        self._verdicts: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._running: dict[tuple[str, bytes], _Check] = {}
        self._turns = FairSlots(
            1, max_waiting=MAX_WAITING, bound=Bound.TENANT_CHECKS, what="checks of grammars"
        )
        self._writing = FairSlots(
            1, max_waiting=MAX_WRITING, bound=Bound.TENANT_CHECKS, what="grammars"
        )
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="written")
        self._process = GrammarProcess()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self.num_checked = 0
        self.num_refused = 0

    async def write(self, write: Callable[[], T], *, tenant: str) -> T:
        """Write the grammars of a tenant's request: return what `write` returns on a thread.

        If the request ends meanwhile, `write` keeps the turn to its end.

        Raises:
            FullError: as many of the tenant wait as may; else what `write` raises.
        """
        await self._writing.take(tenant)
        written = asyncio.get_running_loop().run_in_executor(self._writer, write)

        def give(ended: asyncio.Future[T]) -> None:
            ended.exception()  # the request may have ended: nobody else asks for it
            self._writing.give(tenant)

        written.add_done_callback(give)
        await asyncio.wait((written,))
        return written.result()

    def knows(self, grammar: Grammar) -> bool:
        """Whether `check` returns at once."""
        return _digest(grammar) in self._verdicts

    async def check(self, grammar: Grammar, *, tenant: str) -> None:
        """Check the grammar of a tenant's request.

        Raises:
            ApiError: 400 `invalid_json_schema`, it cannot be used; 503, there is no verdict.
            FullError: as many checks of the tenant wait as may.
        """
        problem = await self.problem_of(grammar, tenant=tenant)
        if problem:
            logger.info("a grammar was refused", extra={"reason": problem[:200]})
            raise error_of(grammar, problem)

    async def problem_of(self, grammar: Grammar, *, tenant: str) -> str:
        """Return why a grammar cannot be used; empty if it can.

        Raises:
            ApiError: 503, there is no verdict.
            FullError: as `check`.
        """
        digest = _digest(grammar)
        try:
            problem = self._known(digest)
            if problem is None:
                problem = await self._checked(tenant, digest, grammar.text.encode())
            return problem
        except NoVerdictError as error:
            logger.warning("a grammar has no verdict", extra={"reason": str(error)})
            raise unavailable(
                f"The gateway could not check '{grammar.path}'. Send the request again later."
            ) from error

    def __del__(self) -> None:
        """End the child of checks that nobody closed, as those of a test."""
        self.close()

    def close(self) -> None:
        """End the child; blocks until it has ended. A running check gets no verdict."""
        self._process.close()
        self._thread.shutdown(wait=False)
        self._writer.shutdown(wait=False)

    def _known(self, digest: bytes) -> str | None:
        """Return an earlier verdict, which is then kept longer than others; None without one."""
        if digest in self._verdicts:
            self._verdicts.move_to_end(digest)
        return self._verdicts.get(digest)

    async def _checked(self, tenant: str, digest: bytes, text: bytes) -> str:
        """Wait for a verdict, in the tenant's turn."""
        key = tenant, digest
        check = self._running.get(key)
        if check is None:
            check = self._running[key] = _Check()
            check.task = asyncio.create_task(self._run(check, key, text))
        assert check.task is not None
        check.num_requests += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.num_requests -= 1
            if not check.num_requests and not check.is_asked:
                check.task.cancel()
                self._forget(check, key)

    async def _run(self, check: _Check, key: tuple[str, bytes], text: bytes) -> str:
        tenant, digest = key
        try:
            async with self._turns.slot(tenant):
                problem = self._known(digest)  # another tenant may have asked meanwhile
                if problem is None:
                    check.is_asked = True
                    loop = asyncio.get_running_loop()
                    problem = await loop.run_in_executor(self._thread, self._process.ask, text)
                    self._keep(digest, problem)
                return problem
        finally:
            self._forget(check, key)

    def _forget(self, check: _Check, key: tuple[str, bytes]) -> None:
        if self._running.get(key) is check:
            del self._running[key]

    def _keep(self, digest: bytes, problem: str) -> None:
        self.num_checked += 1
        self.num_refused += bool(problem)
        self._verdicts[digest] = problem
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)


@dataclasses.dataclass(eq=False, slots=True)
class _Check:
    """A check that has not ended, and the requests that wait for it.

    Attributes:
        is_asked: the child has the grammar, or has had it.
    """

    task: asyncio.Task[str] | None = None
    num_requests: int = 0
    is_asked: bool = False


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(grammar.text.encode()).digest()
