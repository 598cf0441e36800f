"""Chooses the grammar of a chat's answers, with the verdicts of `grammar_checks`.

schemas of strict tools ─ refused ─▶ 400
      │ accepted
      ▼
the grammar of the answer ─ refused ─▶ 400
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from vlm_worker.gateway.api.requests import ChatRequest, Options, check_end
from vlm_worker.gateway.grammar import Grammar
from vlm_worker.gateway.grammar_checks import GrammarChecks
from vlm_worker.gateway.request_guard import Guard
from vlm_worker.gateway.responding.enforced import enforced, schemas_of
from vlm_worker.gateway.responding.message import AnswerForm


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
        parts = schemas_of(request.tools)  # alone, so that an error names its part
        grammar = enforced(request.tools, asked, form, control_ids)
        if grammar is None or grammar is asked:
            return options
        check_end(options.sampling.given, grammar)
        await self.check((*parts, grammar))
        sampling = dataclasses.replace(options.sampling, grammar=grammar)
        return dataclasses.replace(options, sampling=sampling)
