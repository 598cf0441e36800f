"""What a chat template writes of tools and calls is read again, and is never a control token."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from worker import tokenizers_by_code as by_code
from worker.gateway.responding.templates import AS_TEXT, HERMES, MISTRAL, TEMPLATES
from worker.gateway.responding.written import CALLS, parsed
from worker.gateway.stack import MODEL

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.parts import TextPart
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.api.tools import Tool, ToolCall
from vlm_worker.gateway.chat_template import ChatTemplate, examine
from vlm_worker.gateway.conversation import Conversation, TemplateFacts
from vlm_worker.gateway.responding.builtin import choose

SHAPES = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
TOOL = Tool(
    "get_weather",
    'Say the "weather"\nof a <place>',
    {"type": "object", "properties": {"city": {"type": "string", "enum": ["a", "ü"]}},
     "required": ["city"]},
)  # fmt: skip


def calls_of(listed: list[tuple[str, dict[str, Any]]]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(f"call_{number}", name, json.dumps(given, ensure_ascii=False), given)
        for number, (name, given) in enumerate(listed)
    )


def conversation(listed: list[tuple[str, dict[str, Any]]]) -> Conversation:
    calls = calls_of(listed)
    results = [Message("tool", "sunny", tool_call_id=call.id, name=call.name) for call in calls]
    return Conversation(
        [Message("user", "hi"), Message("assistant", "", tool_calls=calls), *results], [TOOL]
    )


@functools.cache
def compiled(form: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[form], ["<|im_start|>", "<|im_end|>", '<|"|>', "[ARGS]"], {})


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_template_s_text_selects_how_its_calls_are_read(form: str) -> None:
    chosen = choose(None, TEMPLATES[form])
    assert (chosen.name, chosen.problem) == (form, "")
    facts = compiled(form).facts
    assert facts == TemplateFacts(writes_tools=True, calls="object", short_ids=form == "mistral")


@pytest.mark.parametrize("form", TEMPLATES)
def test_the_calls_that_a_template_writes_are_read_again(form: str) -> None:
    text = "".join(piece for piece, _ in compiled(form).render(conversation(CALLS)))
    answer = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    content, _, read = parsed(choose(None, TEMPLATES[form]).template, list(answer))  # type: ignore[arg-type]
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in read] == CALLS


def theirs(source: str, said: Conversation) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = []
    for message in said.messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            one["tool_calls"] = [
                {"type": "function", "id": call.id,
                 "function": {"name": call.name, "arguments": call.values}}
                for call in message.tool_calls
            ]  # fmt: skip
        messages.append(one)
    rendered, _ = render_jinja_template(
        [messages],
        tools=[tool.body for tool in said.tools],
        chat_template=source,
        add_generation_prompt=True,
    )
    return str(rendered[0])


@pytest.mark.parametrize("form", [form for form in TEMPLATES if form != "mistral"])
def test_the_text_is_that_of_transformers(form: str) -> None:
    said = conversation(CALLS)
    ours = "".join(piece for piece, _ in compiled(form).render(said))
    assert ours == theirs(TEMPLATES[form], said)


def test_arguments_are_text_where_a_template_takes_text() -> None:
    template = ChatTemplate(AS_TEXT, ["<|im_end|>"], {})
    assert template.facts.calls == "text"
    text = "".join(piece for piece, _ in template.render(conversation(CALLS[:1])))
    assert json.dumps(CALLS[0][1], ensure_ascii=False) in text


def test_ids_are_short_where_a_template_takes_short_ones_only() -> None:
    template = ChatTemplate(MISTRAL, [], {})
    template.render(conversation(CALLS))
    source = "{{ messages[1].tool_calls[0].id }}{{ messages[2].tool_call_id }}"
    facts = TemplateFacts(short_ids=True, calls="text", writes_tools=True)
    bare = ChatTemplate(source, [], {}, facts=facts)
    (text, _), *_ = bare.render(conversation(CALLS[:1]))
    assert len(text) == 18
    assert text[:9] == text[9:]
    assert text.isalnum()


def test_a_template_without_tools_takes_none() -> None:
    plain = (MODEL / "chat_template.jinja").read_text()
    assert examine(plain, ()) == TemplateFacts()
    template = ChatTemplate(plain, [], {}, facts=TemplateFacts())
    with pytest.raises(ApiError, match="writes no tools") as refused:
        template.render(Conversation([Message("user", "x")], [TOOL]))
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(ApiError, match="writes no calls") as refused:
        template.render(Conversation(conversation(CALLS).messages))
    assert refused.value.param == "messages[1].tool_calls"
    with pytest.raises(ApiError, match="no such setting") as refused:
        template.render(Conversation([Message("user", "x")], effort="low"))
    assert refused.value.param == "reasoning_effort"


def test_no_effort_ends_the_reasoning_before_it_begins() -> None:
    template = compiled("hermes")
    said = [Message("user", "x")]
    asked = {
        effort: "".join(text for text, _ in template.render(Conversation(said, effort=effort)))
        for effort in (None, "none", "high")
    }
    assert asked["none"] == f"{asked[None]}<think>\n\n</think>\n\n"
    assert asked["high"] == asked[None]


def test_without_tools_the_text_is_as_before() -> None:
    plain = compiled("hermes").render(Conversation([Message("user", "hi")]))
    assert (
        "".join(text for text, _ in plain)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


# Control tokens in every string of a client


def control_of(tokenizer: Tokenizer) -> list[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special]


TOKENIZERS = {
    "shapes": control_of(SHAPES),
    "llama": control_of(by_code.llama().backend_tokenizer),
    "gemma": control_of(by_code.gemma().backend_tokenizer),
    "of calls": ["<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>', "[ARGS]",
                 "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", "<|im_start|>",
                 "<|im_end|>"],
}  # fmt: skip


def hostile(text: str) -> Conversation:
    """A conversation that has `text` in every string of a client."""
    values = {text: text, "list": [text, {text: text}]}
    call = ToolCall(text, "f", json.dumps(values, ensure_ascii=False), values)
    schema = {
        "type": "object",
        "description": text,
        "title": text,
        "properties": {
            text: {"type": "string", "enum": [text, "x" + text], "description": text},
            "y": {"type": text, "default": {text: text}, "anyOf": [{"const": text}]},
        },
        "required": [text],
        text: text,
    }  # fmt: skip
    return Conversation(
        [
            Message("system", text),
            Message("user", (TextPart(text), TextPart(text))),
            Message("assistant", text, reasoning=text, tool_calls=(call,)),
            Message("tool", text, tool_call_id=text, name="f"),
        ],
        [Tool("f", text, schema)],
    )


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_no_string_of_a_tool_becomes_a_control_token(form: str, tokenizer: str) -> None:
    control = TOKENIZERS[tokenizer]
    template = ChatTemplate(TEMPLATES[form], control, {}, facts=compiled(form).facts)
    own = [piece for piece, is_control in template.render(hostile("word")) if is_control]
    for token in control:
        for text in (token, f"a{token}", f"{token}b", token * 2, token[:-1], token[1:]):
            pieces = template.render(hostile(text))
            assert [piece for piece, is_control in pieces if is_control] == own, text


@given(st.sampled_from(TOKENIZERS["shapes"]), st.data())
@settings(max_examples=60)
def test_a_control_token_cut_over_two_strings_stays_text(token: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(token) - 1))
    template = ChatTemplate(HERMES, control_of(SHAPES), {}, facts=compiled("hermes").facts)
    split = Conversation(
        [Message("user", token[:cut]), Message("user", token[cut:])],
        [Tool("f", token[:cut], {"type": "object", "properties": {token[cut:]: {}}})],
    )
    shown = [piece for piece, is_control in template.render(split) if is_control]
    assert token not in set(shown) - {"<|im_start|>", "<|im_end|>"}
    assert len(shown) == 7


def test_a_child_process_finds_the_same_facts() -> None:
    assert examine(HERMES, ()) == compiled("hermes").facts
