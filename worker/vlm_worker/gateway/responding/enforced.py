"""What the answer to a chat must be: by `response_format`, by tools, behind its reasoning. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_worker.gateway.api.errors import invalid
from vlm_worker.gateway.api.tools import ToolUse
from vlm_worker.gateway.grammar import Grammar, of_schema, validated
from vlm_worker.gateway.responding.enforceable import GrammarError
from vlm_worker.gateway.responding.message import AnswerForm
from vlm_worker.gateway.responding.tool_grammar import content_grammar, grammar_of


def must_write(use: ToolUse, asked: Grammar | None, form: AnswerForm | None) -> bool:
    """Whether `written` has a grammar to write. Arguments are those of `enforced`."""
    if form is None:
        return False
    tools = use.choice == "required" or any(tool.strict for tool in use.offered)
    return asked is not None or (bool(use.offered) and tools)


def written(
    use: ToolUse, asked: Grammar | None, form: AnswerForm | None, control_ids: Mapping[str, int]
) -> tuple[Grammar, ...]:
    """Return the grammars of the schemas of strict tools, and last the one of an answer.

    Each is checked, so that an error names its tool. It takes up to a second. Raises as `enforced`.
    """
    parts = schemas_of(use)
    grammar = enforced(use, asked, form, control_ids)
    assert grammar is not None, "`must_write` is true"
    return (*parts, grammar)


def enforced(
    use: ToolUse, asked: Grammar | None, form: AnswerForm | None, control_ids: Mapping[str, int]
) -> Grammar | None:
    """Return the grammar of an answer; None if it may be any text.

    With tools and a `response_format`, an answer is calls or a JSON text. `asked` is the grammar of
    the format, and `form` is how the answer is read; None: it has no calls and no reasoning.

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
                use, form.template, control_ids=ids, in_reasoning=in_reasoning, content=schema
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
        of_schema(tool.parameters, f"tools[{index}].function.parameters")
        for index, tool in enumerate(use.offered)
        if tool.strict and tool.parameters is not None
    ]


def _path(use: ToolUse) -> str:
    """The part of the request that asks for a grammar."""
    if use.choice == "required":
        return "tool_choice"
    strict = (index for index, tool in enumerate(use.offered) if tool.strict)
    index = next(strict, None)
    return "response_format" if index is None else f"tools[{index}].function.parameters"
