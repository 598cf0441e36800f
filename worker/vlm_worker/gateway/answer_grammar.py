"""Chooses the grammar of a chat's answers, with the verdicts of `grammar_checks`.

    schemas of strict tools ─ refused ─▶ 400
          │ accepted
          ▼
    the whole: calls of all tools by their schemas ─ refused ─▶ each other tool alone
          │ accepted                                                  │ those accepted
          ▼                                                           ▼
      enforced ◀─────────── accepted ─────────────── the whole with their schemas
                                                                      │ refused
                                                                      ▼
                              the whole with schemas of strict tools ─ refused ─▶ 400

A schema of a tool that is not strict is enforced if it can be, so it is no reason for an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeVar

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import ChatRequest, Options, check_end
from vlm_worker.gateway.api.tools import ToolUse
from vlm_worker.gateway.grammar import TOO_COMPLEX, Grammar
from vlm_worker.gateway.grammar_checks import GrammarChecks
from vlm_worker.gateway.request_guard import Guard
from vlm_worker.gateway.responding.enforced import (
    calls_of,
    enforced,
    is_short,
    schemas_of,
)
from vlm_worker.gateway.responding.message import AnswerForm

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerGrammars:
    """The grammars of one request. `guard` ends its checks if the request ends."""

    checks: GrammarChecks
    tenant: str
    guard: Guard

    async def check(self, grammars: Sequence[Grammar]) -> None:
        """Check grammars one after another, so that an error names the first that is refused."""

        async def each() -> None:
            for grammar in grammars:
                await self.checks.check(grammar, tenant=self.tenant)

        are_known = all(self.checks.knows(grammar) for grammar in grammars)
        await (each() if are_known else self.guard(each()))

    async def enforcing(
        self, request: ChatRequest, form: AnswerForm | None, control_ids: Mapping[str, int]
    ) -> Options:
        """Return the options with the grammar that tools and `response_format` ask for together.

        Raises:
            ApiError: 400; there is no such grammar, or it cannot be used.
        """
        options = request.options
        asked = options.sampling.grammar
        writer = _Writer(self, request.tools, asked, form, control_ids)
        parts, calls, grammar = await writer.run(writer.all_parts)
        if grammar is None or grammar is asked:
            return options
        check_end(options.sampling.given, grammar)
        await self.check(parts)
        if calls and (problem := await self._problem_of(grammar)):
            grammar = await self._looser(problem, calls, writer)
        await self.check((grammar,))
        sampling = dataclasses.replace(options.sampling, grammar=grammar)
        return dataclasses.replace(options, sampling=sampling)

    async def _looser(self, problem: str, calls: Mapping[str, Grammar], writer: _Writer) -> Grammar:
        """Return the grammar with the schemas that are accepted alone, if it is accepted too."""
        kept = frozenset[str]() if problem == TOO_COMPLEX else await self._accepted(calls)
        grammar = await writer.run(lambda: writer.whole(kept))
        if kept and await self._problem_of(grammar):
            kept = frozenset()
            grammar = await writer.run(lambda: writer.whole(kept))
        logger.info(
            "arguments of tools may be any object: their schemas cannot be enforced",
            extra={"reason": problem[:200], "num_tools": len(calls) - len(kept)},
        )
        return grammar

    async def _accepted(self, calls: Mapping[str, Grammar]) -> frozenset[str]:
        """Return the names of the calls that are accepted alone; none if one takes too long.

        So at most two checks of a request take too long.
        """
        accepted = []
        for name, call in calls.items():
            problem = await self._problem_of(call)
            if problem == TOO_COMPLEX:
                return frozenset()
            if not problem:
                accepted.append(name)
        return frozenset(accepted)

    async def _problem_of(self, grammar: Grammar) -> str:
        work = self.checks.problem_of(grammar, tenant=self.tenant)
        return await (work if self.checks.knows(grammar) else self.guard(work))


@dataclasses.dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the grammars of one request; long ones on a thread, in turns of tenants."""

    grammars: AnswerGrammars
    use: ToolUse
    asked: Grammar | None
    form: AnswerForm | None
    control_ids: Mapping[str, int]

    async def run(self, write: Callable[[], T]) -> T:
        """Run a method of this object."""
        if self.form is None or is_short(self.use, self.asked):
            return write()
        grammars = self.grammars
        return await grammars.guard(grammars.checks.write(write, tenant=grammars.tenant))

    def all_parts(self) -> tuple[list[Grammar], dict[str, Grammar], Grammar | None]:
        """Return the schemas of strict tools, calls of others by name, and the whole with both.

        There are no calls if the whole would be too large with them.
        """
        parts = schemas_of(self.use)
        calls = calls_of(self.use, self.form, self.control_ids)
        if calls:
            with contextlib.suppress(ApiError):
                return parts, calls, self.whole(calls.keys())
        return parts, {}, enforced(self.use, self.asked, self.form, self.control_ids)

    def whole(self, kept: Set[str]) -> Grammar:
        """Return the grammar of calls with the schemas of tools that are strict or `kept`."""
        grammar = enforced(self.use, self.asked, self.form, self.control_ids, kept=kept)
        assert grammar is not None, "a call is required"
        return grammar
