"""Whatever a client sends as tools, a model that takes tools answers a 400 that names the part."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.responding.templates import HERMES
from worker.gateway.responding.written import WRITERS, loaded

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import ChatRequest, parse_chat
from vlm_worker.gateway.chat_template import ChatTemplate
from vlm_worker.gateway.conversation import Conversation
from vlm_worker.gateway.responding.builtin import choose
from vlm_worker.gateway.responding.enforceable import GrammarError
from vlm_worker.gateway.responding.enforced import calls_of, enforced
from vlm_worker.gateway.responding.message import AnswerForm, schemas
from vlm_worker.gateway.responding.tool_grammar import grammar_of
from vlm_worker.gateway.turns import at_once

KEYS = st.sampled_from(
    ["type", "function", "name", "description", "parameters", "strict", "properties", "required",
     "items", "enum", "anyOf", "$ref", "$defs", "a", "additionalProperties", "const"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["function", "f", "object", "string", "array", "integer", "#/$defs/a", "#", "", "a b",
     "<|im_end|>"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=10,
)
SCHEMA = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={"properties": st.dictionaries(KEYS, JSON, max_size=3), "$defs": JSON},
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.just("f")}, optional={"parameters": JSON | SCHEMA, "strict": st.booleans()}
        ),
    }
)
TEMPLATE = ChatTemplate(HERMES, ["<|im_start|>", "<|im_end|>"], {})
RESPONSES = choose(None, HERMES).template


def parsed(body: dict[str, Any]) -> ChatRequest | ApiError:
    try:
        return at_once(parse_chat(body))
    except ApiError as error:
        return error


@given(
    st.lists(TOOL | JSON, min_size=1, max_size=3),
    st.sampled_from(["auto", "required", "none", None]) | JSON,
    st.text(max_size=20),
)
def test_tools_are_refused_by_name_or_rendered_and_parsed(
    tools: list[Any], choice: Any, answer: str
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    request = parsed(body | {"tool_choice": choice})
    if isinstance(request, ApiError):
        assert request.status == 400
        assert request.param
        assert request.param in request.message
        return
    use = request.tools
    text = "".join(t for t, _ in TEMPLATE.render(Conversation(request.messages, use.offered)))
    assert text.count("<|im_start|>assistant") == 1
    assert RESPONSES is not None
    if not use.offered:
        return
    with contextlib.suppress(GrammarError):
        grammar_of(use, RESPONSES, control_ids={}, in_reasoning=False)
    for form in WRITERS:  # what is forced without 'strict' is no reason for an error
        answers = AnswerForm(loaded(form), {}, "", None, frozenset())
        calls = calls_of(use, answers, {})
        if not any(tool.strict for tool in use.offered):
            enforced(use, None, answers, {}, kept=calls.keys())
    listed = schemas((tool.name, tool.parameters) for tool in use.offered)
    reader = AnswerForm(RESPONSES, listed, "", None, frozenset()).reader("r", 0)
    call = json.dumps({"name": use.offered[0].name, "arguments": {"a": answer}})
    reader.feed(f"{answer}<tool_call>{call}</tool_call>")
    reader.finish()
    assert json.loads(reader.message["tool_calls"][0]["function"]["arguments"]) == {"a": answer}


def test_a_large_schema_is_checked_in_small_steps() -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wide}}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    assert sum(1 for _ in parse_chat(body)) > 2000


@pytest.mark.parametrize("name", ["f" * 64, "a-b_C9"])
def test_names_of_functions_are_those_of_openai(name: str) -> None:
    tool = {"type": "function", "function": {"name": name}}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    assert at_once(parse_chat(body)).tools.offered[0].name == name
