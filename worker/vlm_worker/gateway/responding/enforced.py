"""What the answer to a chat must be: by `response_format`, by tools, behind its reasoning. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Set
from typing import Final

from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.tools import ToolUse
from vlm_worker.gateway.closed_schema import parts_of
from vlm_worker.gateway.grammar import Grammar, exceeds, has_options, of_schema, validated
from vlm_worker.gateway.responding.enforceable import GrammarError
from vlm_worker.gateway.responding.message import AnswerForm
from vlm_worker.gateway.responding.tool_grammar import (
    call_grammar,
    call_tool,
    callable_tools,
    content_grammar,
    grammar_of,
    parameters_path,
)

SHORT_BYTES: Final = 1024
MAX_KEPT_BYTES: Final = 64 << 10
"""Size of the schemas that are enforced without `strict`. Grammars of calls in tags take some 10 us
per byte of a schema to write."""


def enforced(
    use: ToolUse,
    asked: Grammar | None,
    form: AnswerForm | None,
    control_ids: Mapping[str, int],
    *,
    kept: Set[str] = frozenset(),
) -> Grammar | None:
    """Return the grammar of an answer; None if it may be any text.

    With tools and a `response_format`, an answer is calls or a JSON text. `asked` is the grammar of
    the format, and `form` is how the answer is read; None: it has no calls and no reasoning. `kept`
    names the tools that are not strict whose schemas are enforced.

    Raises:
        ApiError: 400; the format of the model's calls cannot enforce a schema.
    """
    if form is None or (asked is None and not use.offered):
        return asked
    ids, in_reasoning = control_ids, form.in_reasoning
    schema = None if asked is None else asked.schema
    if not use.offered:
        assert asked is not None
        assert schema is not None, "a response format has a schema"
        text: str | None = content_grammar(
            form.template, schema, control_ids=ids, in_reasoning=in_reasoning
        )
        path = asked.path
    else:
        path = _path(use)
        try:
            text = grammar_of(
                use,
                form.template,
                control_ids=ids,
                in_reasoning=in_reasoning,
                kept=kept,
                content=schema,
            )
        except GrammarError as error:
            where = ".".join(error.where) or path
            raise invalid(
                f"'{where}' cannot be enforced with this model: {error}.",
                param=where,
                code="invalid_json_schema",
            ) from error
    # The schema of a format was checked alone; those of tools are (`schemas_of`). What is wrong
    # with all together has no keyword of the client's.
    return None if text is None else validated(text, path)


def schemas_of(use: ToolUse) -> list[Grammar]:
    """Return the grammars of the schemas that a request's strict tools have."""
    return [
        of_schema(tool.parameters, parameters_path(index))
        for index, tool in enumerate(use.offered)
        if tool.strict and tool.parameters is not None
    ]


def calls_of(
    use: ToolUse, form: AnswerForm | None, control_ids: Mapping[str, int]
) -> dict[str, Grammar]:
    """Return the grammars of one call of each tool that must be called and is not strict, by name.

    They are the tools whose schemas may be enforced. There are none if their schemas together have
    more than `MAX_KEPT_BYTES`.
    """
    if form is None or use.choice != "required":
        return {}
    tools = [(i, tool.parameters) for i in callable_tools(use) if not (tool := use.tools[i]).strict]
    if exceeds([schema for _, schema in tools], MAX_KEPT_BYTES):
        return {}
    found: dict[str, Grammar] = {}
    for index, schema in tools:
        if not schema or has_options(schema):
            continue
        one = call_tool(use, index, {use.tools[index].name})
        with contextlib.suppress(GrammarError, ApiError):
            text = call_grammar(form.template, one, control_ids=control_ids)
            found[one.name] = validated(text, one.path)
    return found


def is_short(use: ToolUse, asked: Grammar | None) -> bool:
    """Whether the grammars of tools and of the format are written in about a millisecond.

    References are written out, so a short schema with one may have a long grammar.
    """
    must = use.choice == "required"
    schemas = [tool.parameters for tool in use.offered if must or tool.strict]
    if exceeds(schemas, SHORT_BYTES) or (asked is not None and len(asked.text) > SHORT_BYTES):
        return False
    return not any("$ref" in part for _, part in parts_of(schemas))


def _path(use: ToolUse) -> str:
    """The part of the request that asks for a grammar."""
    if use.choice == "required":
        return "tool_choice"
    strict = (index for index, tool in enumerate(use.offered) if tool.strict)
    index = next(strict, None)
    return "response_format" if index is None else parameters_path(index)
