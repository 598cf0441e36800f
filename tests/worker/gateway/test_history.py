"""The tokens before the last user turn: what the worker may prune (`core.pruning`)."""

from __future__ import annotations

import functools
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.gateway.image_files import ask, png
from worker.gateway.stack import COLOCATED, E_PD, MODEL, Stack, stack

from vlm_worker.gateway.api.parts import ImagePart, TextPart
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.chat_template import ChatTemplate
from vlm_worker.gateway.conversation import Conversation, TemplateFacts
from vlm_worker.gateway.prompts import PromptBuilder
from vlm_worker.types import Role

TEXT = st.text("ab <|im_end|>\n", max_size=20)
TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT, st.booleans()), max_size=7
)


@functools.cache
def language() -> PromptBuilder:
    return PromptBuilder(MODEL)


def message(role: Any, text: str, *, has_image: bool = False) -> Message:
    image = (ImagePart("data:,", "auto", "image"),) if has_image else ()
    return Message(role, (*image, TextPart(text)))


@settings(deadline=None, max_examples=60)
@given(TURNS)
def test_the_history_is_the_prompt_of_the_earlier_turns(turns: list[tuple[Any, str, bool]]) -> None:
    messages = [
        message(role, text, has_image=role == "user" and has_image)
        for role, text, has_image in turns
    ]
    messages.append(message("user", "what?"))
    counts = [
        9 + number
        for number, _ in enumerate(
            part for one in messages for part in one.parts if isinstance(part, ImagePart)
        )
    ]
    plain = language().chat(Conversation(messages), counts)
    marked = language().chat(Conversation(messages), counts, mark_history=True)
    assert (plain.num_history_tokens, marked.token_ids) == (0, plain.token_ids)
    assert (marked.offsets, marked.counts) == (plain.offsets, plain.counts)
    history = marked.token_ids[: marked.num_history_tokens]
    last = language().tokenizer.decode(
        list(marked.token_ids[len(history) :]), skip_special_tokens=False
    )
    if not any(one.role == "user" for one in messages[:-1]):
        assert not history
        return
    assert last.startswith("<|im_start|>user")
    assert "what?" in last
    assert sum(offset < len(history) for offset in marked.offsets) == len(counts)
    longer = [*messages[:-1], message("user", "or something else?")]
    other = language().chat(Conversation(longer), counts, mark_history=True)
    assert other.token_ids[: other.num_history_tokens] == history


def test_a_template_that_refuses_the_earlier_turns_alone_marks_no_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = (
        "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    builder = PromptBuilder(MODEL)
    template = ChatTemplate(source, ["<|im_start|>", "<|im_end|>"], {}, facts=TemplateFacts())
    monkeypatch.setattr(builder, "_template", template)
    turns = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    assert builder.chat(Conversation(turns), [], mark_history=True).num_history_tokens == 0


CONVERSATION = (
    ask(png(), "what is this? " * 40),
    ask("it is one colour, all of it. " * 20, role="assistant"),
    ask("which colour?"),
)


async def answer_of(served: Stack) -> str:
    body = {"model": "shapes", "messages": CONVERSATION, "max_tokens": 24, "temperature": 0}
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"{served.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def num_pruned(served: Stack) -> int:
    (decode,) = served.of(Role.DECODE)
    return int(decode.components.engine.stats().count("kv_pruned_sequences"))


@pytest.mark.parametrize("topology", [COLOCATED, E_PD], ids=["colocated", "E-PD"])
async def test_a_conversation_is_pruned_if_worker_and_gateway_are_told_to(topology: Any) -> None:
    answers = {}
    for permille, mark_history in ((0, False), (0, True), (600, False), (600, True)):
        async with stack(*topology, kv_prune_text=permille, mark_history=mark_history) as served:
            answers[permille, mark_history] = await answer_of(served)
            assert await answer_of(served) == answers[permille, mark_history]
            assert num_pruned(served) == (2 if permille and mark_history else 0)
            await served.until_idle()
    assert answers[0, False] == answers[0, True] == answers[600, False] != answers[600, True]
