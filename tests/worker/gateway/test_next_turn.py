"""What a gateway prefetches of a next turn is the beginning of every next turn's prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker.checkpoints import make_processor
from worker.gateway.responding.templates import HERMES
from worker.gateway.responding.templates import TEMPLATES as CALL_TEMPLATES
from worker.gateway.stack import MODEL
from worker.gateway.test_prompts import our_part

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.api.tools import Tool, ToolCall
from vlm_worker.gateway.chat_template import ChatTemplate
from vlm_worker.gateway.conversation import Conversation, TemplateFacts, continued
from vlm_worker.gateway.prompts import PromptBuilder

ANSWER = Message("assistant", "b")
COUNT = 4  # visual tokens of each image
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ CONTENT }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "plain": CHATML.replace("CONTENT", "m['content']"),
    "trims": CHATML.replace("CONTENT", "m['content'] | trim"),
    # as templates of models that think: all answers but the last lose a part
    "forgets": CHATML.replace(
        "CONTENT", "m['content'] if loop.last else m['content'].split('END')[-1]"
    ),
    "counts": "{{ messages | length }}" + CHATML.replace("CONTENT", "m['content']"),
    "marks the last": CHATML.replace(
        "CONTENT", "('>' if loop.last and m['role'] == 'user' else '') + m['content']"
    ),
}

ALPHABET = "ab the\n\n\n .é😀<|im_end|>ENDing"
TEXTS = st.text(st.sampled_from(ALPHABET), max_size=12) | st.sampled_from(
    ["<|im_start|>", " <|im_end|>\n", "\u0301", "", " ", "END"]
)
PARTS = st.lists(TEXTS | st.just((56, 56)), min_size=1, max_size=3)
CONTENTS = TEXTS | PARTS
TURNS = st.lists(CONTENTS, min_size=1, max_size=3)


def content_of(told: Any) -> Any:
    return told if isinstance(told, str) else tuple(map(our_part, told))


def conversation(turns: list[Any]) -> list[Message]:
    roles: tuple[Any, Any] = ("user", "assistant")
    turns = turns if len(turns) % 2 else turns[:-1]
    return [Message(roles[i % 2], content_of(told)) for i, told in enumerate(turns)]


def counts_of(messages: list[Message]) -> list[int]:
    return [COUNT for m in messages for part in m.parts if hasattr(part, "url")]


def check(builder: PromptBuilder, turns: list[Any], answer: str, following: Any) -> bool:
    """Whether there is a beginning; it is one of the real next prompt."""
    messages = conversation(turns)
    counts = counts_of(messages)
    begun = builder.next_turn(Conversation(messages), Message("assistant", answer), counts)
    after = [*messages, Message("assistant", answer), Message("user", content_of(following))]
    try:
        real = builder.chat(Conversation(after), counts_of(after))
    except ApiError:
        return begun is not None
    if begun is None:
        return False
    length = len(begun.token_ids)
    assert real.token_ids[:length] == begun.token_ids
    assert real.offsets[: len(begun.offsets)] == begun.offsets
    assert all(offset >= length for offset in real.offsets[len(begun.offsets) :])
    return True


@pytest.fixture(scope="module", params=["shapes", "gemma3", "llava", *TEMPLATES])
def builder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name = request.param
    if name in ("gemma3", "llava"):
        directory: Path = tmp_path_factory.mktemp("next") / name
        make_processor(directory, name)
        return PromptBuilder(directory)
    builder = PromptBuilder(MODEL)
    if name in TEMPLATES:
        tokens = builder._pieces.control_tokens
        builder._template = ChatTemplate(TEMPLATES[name], tokens, {})
    return builder


@given(turns=TURNS, answer=TEXTS, following=CONTENTS)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_it_is_a_beginning_of_every_next_prompt(
    builder: PromptBuilder, turns: list[Any], answer: str, following: Any
) -> None:
    check(builder, turns, answer, following)


@pytest.mark.parametrize("name", ["shapes", "gemma3", *TEMPLATES])
def test_it_has_the_whole_answer(name: str, tmp_path: Path) -> None:
    """A control token follows the answer in these templates; that of LLaVA has text alone."""
    if name == "gemma3":
        make_processor(tmp_path / name, name)
        builder = PromptBuilder(tmp_path / name)
    else:
        builder = PromptBuilder(MODEL)
        if name in TEMPLATES:
            tokens = builder._pieces.control_tokens
            builder._template = ChatTemplate(TEMPLATES[name], tokens, {})
    turns = ["what is this?"]
    assert check(builder, turns, "a red square", "and that?")
    prompt = builder.chat(Conversation(conversation(turns)), [])
    begun = builder.next_turn(
        Conversation(conversation(turns)), Message("assistant", "a red square"), []
    )
    assert begun is not None
    assert len(begun.token_ids) > len(prompt.token_ids)


def test_a_template_without_control_tokens_gives_nothing() -> None:
    builder = PromptBuilder(MODEL)
    source = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    builder._template = ChatTemplate(source, builder._pieces.control_tokens, {})
    assert builder.next_turn(Conversation(conversation(["a"])), ANSWER, []) is None


def test_a_template_that_refuses_a_next_turn_gives_nothing() -> None:
    builder = PromptBuilder(MODEL)
    source = "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}<|im_start|>"
    builder._template = ChatTemplate(
        source, builder._pieces.control_tokens, {}, facts=TemplateFacts()
    )
    assert builder.next_turn(Conversation(conversation(["a"])), ANSWER, []) is None


def test_a_model_without_a_template_gives_nothing() -> None:
    builder = PromptBuilder(MODEL)
    builder._template = None
    assert builder.next_turn(Conversation(conversation(["a"])), ANSWER, []) is None


# ---- tools, calls and reasoning ------------------------------------------------------------------

THINKS = HERMES.replace(  # as Qwen3: reasoning before the last question is left out
    "{%- if message.reasoning_content %}",
    "{%- if message.reasoning_content and (loop.last or messages[-1].role == 'tool') %}",
)
CALLING = {**CALL_TEMPLATES, "thinks": THINKS}
TOOLS = [Tool("f", "what it does", {"type": "object", "properties": {"x": {"type": "string"}}})]


@st.composite
def answers(draw: st.DrawFn) -> Message:
    calls = []
    for index in range(draw(st.integers(0, 3))):
        values = {"x": draw(TEXTS), "n": draw(st.integers(0, 9))}
        calls.append(ToolCall(f"call_{index}abc", "f", json.dumps(values), values))
    return Message("assistant", draw(TEXTS), draw(st.none() | TEXTS), tuple(calls))


def told_again(answer: Message, *, keeps_reasoning: bool) -> Message:
    return answer if keeps_reasoning else dataclasses.replace(answer, reasoning=None)


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("effort", [None, "none", "high"])
@given(
    answer=answers(),
    keeps_reasoning=st.booleans(),
    has_sent_reasoning=st.booleans(),
    results=st.lists(TEXTS, max_size=3),
    order=st.randoms(use_true_random=False),
    following=CONTENTS,
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_it_is_a_beginning_with_tools_calls_and_reasoning(
    name: str,
    effort: Any,
    answer: Message,
    keeps_reasoning: bool,
    has_sent_reasoning: bool,
    results: list[str],
    order: Any,
    following: Any,
) -> None:
    builder = calling(name)
    question = Message("user", "what is this?")
    earlier = [question, Message("assistant", "red", "hm")] if has_sent_reasoning else []
    said = Conversation([*earlier, question], TOOLS, effort)
    begun = builder.next_turn(said, answer, [])
    calls = list(answer.tool_calls)
    order.shuffle(calls)
    after: list[Message] = [
        Message("tool", text, tool_call_id=call.id, name=call.name)
        for text, call in zip(results, calls, strict=False)
    ]
    if not after:
        after = [Message("user", content_of(following))]
    again = told_again(answer, keeps_reasoning=keeps_reasoning or has_sent_reasoning)
    told = dataclasses.replace(said, messages=(*said.messages, again, *after))
    try:
        real = builder.chat(told, counts_of(list(told.messages)))
    except ApiError:
        return
    if begun is not None:
        assert real.token_ids[: len(begun.token_ids)] == begun.token_ids


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_it_has_the_tools_and_the_calls_of_the_answer(name: str) -> None:
    builder = calling(name)
    values = {"x": "red"}
    call = ToolCall("call_1", "f", json.dumps(values), values)
    said = Conversation([Message("user", "what is this?")], TOOLS)
    prompt = builder.chat(said, [])
    begun = builder.next_turn(said, Message("assistant", "", tool_calls=(call,)), [])
    assert begun is not None
    assert len(begun.token_ids) > len(prompt.token_ids)
    assert begun.token_ids[: len(prompt.token_ids)] == prompt.token_ids


def test_reasoning_is_in_it_if_the_client_has_sent_it_before() -> None:
    builder = calling("hermes")
    answer = Message("assistant", "blue", "a long thought " * 8)
    question = Message("user", "what is this?")
    lengths = []
    for earlier in (None, "hm"):
        told = [question, Message("assistant", "red", earlier), question]
        begun = builder.next_turn(Conversation(told), answer, [])
        assert begun is not None
        lengths.append(len(begun.token_ids) - len(builder.chat(Conversation(told), []).token_ids))
    assert lengths[0] <= 0 < lengths[1]


@functools.cache
def calling(name: str) -> PromptBuilder:
    builder = PromptBuilder(MODEL)
    tokens = builder._pieces.control_tokens
    builder._template = ChatTemplate(CALLING[name], tokens, {})
    return builder


# ---- long conversations --------------------------------------------------------------------------


@st.composite
def turns(draw: st.DrawFn) -> list[Message]:
    """A question, and calls with their results before its answer."""
    told = [Message("user", draw(TEXTS) or "q")]
    for index in range(draw(st.integers(0, 2))):
        call = ToolCall(f"call_{index}xyz", "f", "{}", {})
        told.append(Message("assistant", draw(TEXTS), draw(st.none() | TEXTS), (call,)))
        told.append(Message("tool", draw(TEXTS), tool_call_id=call.id, name="f"))
    return [*told, Message("assistant", draw(TEXTS), draw(st.none() | TEXTS))]


def by_all_ways(builder: PromptBuilder, said: Conversation, answer: Message) -> Any:
    """The beginning by its definition: what all renderings of the conversation share."""
    sends = any(message.reasoning is not None for message in said.messages)
    rendered = []
    for way in continued(answer, sends_reasoning=sends):
        with contextlib.suppress(ApiError):
            after = dataclasses.replace(said, messages=(*said.messages, *way))
            rendered.append(builder._template.render(after))  # type: ignore[union-attr]
    return builder._pieces.shared(rendered)


@pytest.mark.parametrize("name", CALLING)
@given(earlier=st.lists(turns(), max_size=4), answer=answers(), system=st.none() | TEXTS)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_two_or_three_renderings_give_what_all_of_them_share(
    name: str, earlier: list[list[Message]], answer: Message, system: str | None
) -> None:
    builder = calling(name)
    first = [] if system is None else [Message("system", system)]
    messages = [*first, *(m for turn in earlier for m in turn)]
    # without the last answer: the calls before it have reasoning that depends on what follows
    said = Conversation(messages[:-1] if earlier else [*first, Message("user", "q")], TOOLS)
    begun = builder.next_turn(said, answer, [])
    pieces = by_all_ways(builder, said, answer)
    if not pieces:
        assert begun is None
        return
    assert begun is not None
    ids = builder._pieces.encode(pieces)
    assert begun.token_ids[len(begun.token_ids) - len(ids) :] == tuple(ids)


class Counting(ChatTemplate):
    """Notes how many messages and characters each rendering has."""

    def _rendered(self, messages: Any, tools: Any, settings: Any, *, asks: bool = True) -> str:
        self.sizes = [*getattr(self, "sizes", []), (len(messages), len(str((messages, tools))))]
        return super()._rendered(messages, tools, settings, asks=asks)


@pytest.mark.parametrize("num_turns", [40, 400])
def test_a_long_conversation_is_rendered_few_times(num_turns: int) -> None:
    """Each rendering is one with marks and one without."""
    builder = PromptBuilder(MODEL)
    template = Counting(CALLING["thinks"], builder._pieces.control_tokens, {})
    builder._template, template.sizes = template, []
    turn = [Message("user", "what is it? " * 9), Message("assistant", "red " * 99)]
    call = ToolCall("call_0abc", "f", '{"x": "y"}', {"x": "y"})
    answer = Message("assistant", "x " * 999, "hm " * 999, (call,))
    tools = [dataclasses.replace(TOOLS[0], name=f"f{number}") for number in range(64)]
    begun = builder.next_turn(Conversation([*turn * num_turns, turn[0]], tools), answer, [])
    assert begun is not None
    long = [size for size, _ in template.sizes if size > 2 * num_turns]
    others = [length for size, length in template.sizes if size <= 2 * num_turns]
    assert len(long) == 2 * 3
    assert max(others) < 2_000
    assert len(others) <= 2 * 28
