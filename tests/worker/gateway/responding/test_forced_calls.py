"""Calls that a request forces keep the schemas of tools that are not strict, where they can be."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from worker.gateway.responding.test_strict_schemas import DEFS, INNER, answer_of, objects, tool_of
from worker.gateway.responding.test_tool_grammar import Checked, tokenizer
from worker.gateway.responding.written import WRITERS, loaded

from vlm_worker.gateway.answer_grammar import AnswerGrammars
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import ChatRequest, Options, parse_chat
from vlm_worker.gateway.grammar import TOO_COMPLEX
from vlm_worker.gateway.grammar_checks import GrammarChecks
from vlm_worker.gateway.request_guard import unguarded
from vlm_worker.gateway.responding.enforceable import GrammarError, read
from vlm_worker.gateway.responding.enforced import MAX_KEPT_BYTES
from vlm_worker.gateway.responding.message import AnswerForm, schemas
from vlm_worker.gateway.responding.tool_grammar import CallTool
from vlm_worker.gateway.turns import at_once

FORMS = pytest.mark.parametrize("form", WRITERS)
TAGS = ("qwen3_xml", "glm4")


class Gateway:
    """Decides on grammars as a gateway does, with a child that checks them."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.checks = GrammarChecks()

    async def enforcing(
        self, form: str, request: ChatRequest, control_ids: Mapping[str, int]
    ) -> Options:
        grammars = AnswerGrammars(self.checks, "tenant", unguarded)
        return await grammars.enforcing(request, answers(form, request), control_ids)

    def grammar(self, form: str, request: ChatRequest) -> str | None:
        options = self.runner.run(self.enforcing(form, request, {}))
        return None if options.sampling.grammar is None else options.sampling.grammar.text


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.checks.close()
    made.runner.close()


def request_of(
    given: dict[str, Any], choice: Any = "required", *, strict: tuple[str, ...] = ()
) -> ChatRequest:
    """A chat with tools by their names and schemas; without a schema, a tool has no parameters."""
    tools = [
        {"type": "function", "function": {"name": name, "strict": name in strict}
         | ({} if schema is None else {"parameters": schema})}
        for name, schema in given.items()
    ]  # fmt: skip
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, "tools": tools, "tool_choice": choice}
    return at_once(parse_chat(body))


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def answers(form: str, request: ChatRequest) -> AnswerForm:
    listed = schemas((tool.name, tool.parameters) for tool in request.tools.offered)
    return AnswerForm(loaded(form), listed, "", None, frozenset())


@dataclasses.dataclass
class Asked:
    text: str

    def accepts(self, answer: str) -> bool:
        matcher = LLMatcher(tokenizer(), LLMatcher.grammar_from_lark(self.text))
        ids = list(answer.encode())
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def is_enforceable(form: str, schema: dict[str, Any]) -> bool:
    """Whether a strict tool may have the schema, and its calls may have arguments."""
    try:
        checked = Checked(form, tools=[CallTool("f", schema)], parallel=False)
        is_open = form in TAGS and not (root := read(schema)).members and root.others is not None
    except GrammarError:
        return False
    return not is_open and not LLMatcher.validate_grammar(checked.text)


def read_calls(form: str, request: ChatRequest, answer: str) -> list[tuple[str, str]]:
    """The calls of an answer, after the ones of a stream were compared with them."""
    whole, stream = (answers(form, request).reader("r", 0) for _ in range(2))
    whole.feed(answer)
    whole.finish()
    deltas = [delta for char in answer for delta in stream.feed(char)] + stream.finish()
    assert stream.message == whole.message
    calls = [(one["function"]["name"], one["function"]["arguments"])
             for one in whole.message.get("tool_calls", [])]  # fmt: skip
    streamed = [["", ""] for _ in calls]
    for one in (call for delta in deltas for call in delta.get("tool_calls", [])):
        streamed[one["index"]][0] += one["function"].get("name", "")
        streamed[one["index"]][1] += one["function"].get("arguments", "")
    assert [tuple(one) for one in streamed] == calls
    assert not whole.message["content"]
    return calls


@FORMS
@given(
    given=st.lists(objects(INNER), min_size=1, max_size=3),
    is_named=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_arguments_keep_each_schema_that_can_be_enforced(
    gateway: Gateway, form: str, given: list[dict[str, Any]], is_named: bool, seed: int
) -> None:
    tools = {f"f{i}": {**schema, "$defs": DEFS} for i, schema in enumerate(given)}
    request = request_of(tools, named("f0") if is_named else "required")
    text = gateway.grammar(form, request)
    assert text is not None
    asked = Asked(text)
    kept = {name for name, schema in tools.items() if is_enforceable(form, schema)}
    for name in ["f0"] if is_named else tools:
        any_object = asked.accepts(WRITERS[form]([(name, {"zz": {"y": [1, "a"]}})]))
        assert any_object or name in kept
    answer = answer_of(asked.text, (), seed)
    if answer is None:
        return
    calls = read_calls(form, request, answer)
    assert calls
    for name, arguments in calls:
        values = json.loads(arguments)
        assert isinstance(values, dict)
        if name in kept:
            jsonschema.validate(values, tools[name])


SEEN: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"], "type": "string"}},
    "required": ["color"],
}
UNENFORCEABLE: dict[str, dict[str, Any]] = {
    "keyword": tool_of({"type": "array", "uniqueItems": True}),
    "negation": tool_of({"not": {"type": "string"}}),
    "type": tool_of({"type": "any"}),
    "reference": tool_of({"$ref": "https://example.com/schema"}),
    "pattern": tool_of({"type": "string", "pattern": "(?=a)b"}),
    "option": {**tool_of({"type": "string"}), "x-guidance": {"lenient": True}},
    "required": {"type": "object", "required": 1 * ["b"], "allOf": [{"not": {}}]},
}
RED, GREEN, OTHER = {"color": "red"}, {"color": "green"}, {"zz": 1}


@FORMS
@pytest.mark.parametrize("name", UNENFORCEABLE)
def test_a_schema_that_cannot_be_enforced_is_a_hint_and_others_are_enforced(
    gateway: Gateway, form: str, name: str
) -> None:
    write = WRITERS[form]
    tools = {"seen": SEEN, "bad": UNENFORCEABLE[name], "none": None, "also": SEEN}
    asked = Asked(gateway.grammar(form, request_of(tools)) or "")
    for tool in ("seen", "also"):
        assert asked.accepts(write([(tool, RED)]))
        assert not asked.accepts(write([(tool, GREEN)]))
    for tool in ("bad", "none"):
        assert asked.accepts(write([(tool, OTHER)]))
    alone = Asked(gateway.grammar(form, request_of(tools, named("bad"))) or "")
    assert alone.accepts(write([("bad", OTHER)]))
    assert not alone.accepts(write([("seen", RED)]))


@FORMS
def test_a_strict_tool_beside_others_keeps_its_error(gateway: Gateway, form: str) -> None:
    tools = {"seen": SEEN, "bad": UNENFORCEABLE["keyword"]}
    with pytest.raises(ApiError) as refused:
        gateway.grammar(form, request_of(tools, strict=("bad",)))
    assert refused.value.code == "invalid_json_schema"
    assert refused.value.param == "tools[1].function.parameters.properties.a.uniqueItems"


@FORMS
def test_what_may_be_called_is_not_forced(gateway: Gateway, form: str) -> None:
    assert gateway.grammar(form, request_of({"seen": SEEN}, "auto")) is None
    if form != "llama3_json":
        both = request_of({"seen": SEEN, "free": SEEN}, "auto", strict=("seen",))
        asked = Asked(gateway.grammar(form, both) or "")
        assert asked.accepts(WRITERS[form]([("free", GREEN)]))
        assert not asked.accepts(WRITERS[form]([("seen", GREEN)]))


@FORMS
def test_schemas_that_are_too_large_are_hints(gateway: Gateway, form: str) -> None:
    wide = {f"p{number}": {"type": "string"} for number in range(MAX_KEPT_BYTES // 20)}
    tools = {"seen": SEEN, "wide": {"type": "object", "properties": wide, "required": list(wide)}}
    asked = Asked(gateway.grammar(form, request_of(tools)) or "")
    assert asked.accepts(WRITERS[form]([("wide", OTHER)]))
    only = Asked(gateway.grammar(form, request_of(tools, named("seen"))) or "")
    assert not only.accepts(WRITERS[form]([("seen", GREEN)]))


def test_a_schema_that_takes_too_long_costs_two_checks(gateway: Gateway) -> None:
    slow = tool_of({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(30)]})
    tools = {"slow": slow, "seen": SEEN, **{f"f{number}": slow for number in range(20)}}
    before = gateway.checks.num_checked
    asked = Asked(gateway.grammar("hermes", request_of(tools)) or "")
    assert gateway.checks.num_checked == before + 2
    assert TOO_COMPLEX in gateway.checks._verdicts.values(), "none was too slow"
    for name in ("slow", "seen"):
        assert asked.accepts(WRITERS["hermes"]([(name, OTHER)]))


def test_a_request_that_is_sent_again_needs_no_check(gateway: Gateway) -> None:
    tools = {"seen": SEEN, "bad": UNENFORCEABLE["negation"]}
    first = gateway.grammar("hermes", request_of(tools))
    before = gateway.checks.num_checked
    assert gateway.grammar("hermes", request_of(tools)) == first
    assert gateway.checks.num_checked == before


class Watched(dict[str, int]):
    """Control tokens that note the thread that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __iter__(self) -> Iterator[str]:
        self.threads.add(threading.get_ident())
        return super().__iter__()


@FORMS
def test_a_large_grammar_is_not_written_on_the_event_loop(gateway: Gateway, form: str) -> None:
    wide = {f"p{number}": {"type": "integer"} for number in range(100)}
    for strict in ((), ("wide",)):
        control_ids = Watched()
        request = request_of({"wide": {"type": "object", "properties": wide}}, strict=strict)
        gateway.runner.run(gateway.enforcing(form, request, control_ids))
        assert control_ids.threads
        assert threading.get_ident() not in control_ids.threads
