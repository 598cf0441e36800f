"""Writes what a parser finds as OpenAI's message and its deltas. Pure.

text ─▶ AnswerParser ─▶ events ─▶ deltas of a stream, and the whole message
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vlm_worker.gateway.responding.calls import CallArguments, CallBegins, Tools
from vlm_worker.gateway.responding.parser import AnswerParser, Event, Text
from vlm_worker.gateway.responding.template import Kind, ResponseTemplate
from vlm_worker.types import FinishReason

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that ends with calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the answers to one request are read.

    `opening` is the beginning of the answer in the prompt. `kept_ids` are the control tokens that
    the parser needs as text.
    """

    template: ResponseTemplate
    tools: Tools
    opening: str
    max_calls: int | None
    kept_ids: frozenset[int]

    @property
    def in_reasoning(self) -> bool:
        """Whether the prompt has begun the reasoning."""
        return self._parser().in_reasoning

    def reader(self, request_id: str, choice: int) -> MessageReader:
        return MessageReader(self._parser(), f"{request_id}/{choice}")

    def _parser(self) -> AnswerParser:
        return AnswerParser(
            self.template, tools=self.tools, opening=self.opening, max_calls=self.max_calls
        )


class MessageReader:
    """Reads the text of one choice. `answer_id` makes the ids of its calls. One task calls it.

    Attributes:
        num_reasoning_tokens: tokens with a part of the text of the reasoning. Those of its anchors
            and of white space behind it are not counted.
    """

    def __init__(self, parser: AnswerParser, answer_id: str) -> None:
        self._parser = parser
        self._answer_id = answer_id
        self._texts = {Kind.CONTENT: "", Kind.REASONING: ""}
        self._calls: list[dict[str, Any]] = []
        self._num_undecided = 0  # tokens since the last that decided something
        self.num_reasoning_tokens = 0

    @property
    def done(self) -> bool:
        """Whether the answer needs no more tokens."""
        return self._parser.done

    def feed(self, text: str, *, num_tokens: int = 1) -> list[dict[str, Any]]:
        """Add the text of tokens; return the deltas that may be sent."""
        was_in_reasoning = self._parser.in_reasoning
        events = self._parser.feed(text)
        self._count(events, num_tokens, was_in_reasoning=was_in_reasoning)
        return self._deltas(events)

    def finish(self) -> list[dict[str, Any]]:
        """End the answer; return the remaining deltas."""
        was_in_reasoning = self._parser.in_reasoning
        events = self._parser.finish()
        self._count(events, 0, was_in_reasoning=was_in_reasoning)
        return self._deltas(events)

    def _count(self, events: Sequence[Event], num_tokens: int, *, was_in_reasoning: bool) -> None:
        """Count the tokens that have added text to the reasoning.

        The parser holds text that may be an anchor, and white space. What follows decides.
        """
        self._num_undecided += num_tokens
        if any(isinstance(event, Text) and event.kind is Kind.REASONING for event in events):
            self.num_reasoning_tokens += self._num_undecided
        elif not events and was_in_reasoning == self._parser.in_reasoning:
            return
        self._num_undecided = 0

    def finish_reason(self, reason: str) -> str:
        """Return the reason for clients: calls, unless the answer was cut."""
        return TOOL_CALLS if self._calls and reason == FinishReason.STOP else reason

    @property
    def message(self) -> dict[str, Any]:
        """The whole message so far."""
        content, reasoning = self._texts[Kind.CONTENT], self._texts[Kind.REASONING]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self._calls else ""),
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _deltas(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, Text):
                self._texts[event.kind] += event.text
                deltas.append({event.kind.value: event.text})
            elif isinstance(event, CallBegins):
                deltas.append(self._begin(event))
            elif isinstance(event, CallArguments):
                self._calls[event.index]["function"]["arguments"] += event.text
                fragment = {"index": event.index, "function": {"arguments": event.text}}
                deltas.append({"tool_calls": [fragment]})
        return deltas

    def _begin(self, event: CallBegins) -> dict[str, Any]:
        call_id = call_id_of(self._answer_id, event.index)
        function = {"name": event.name, "arguments": ""}
        self._calls.append({"id": call_id, "type": "function", "function": function})
        begun = {"id": call_id, "type": "function", "function": dict(function)}
        return {"tool_calls": [{"index": event.index, **begun}]}


def call_id_of(answer_id: str, index: int) -> str:
    """Return the id of a call: the same for the same call of an answer, in any retry."""
    return "call_" + hashlib.blake2b(f"{answer_id}/{index}".encode(), digest_size=12).hexdigest()


def schemas(tools: Iterable[tuple[str, Mapping[str, Any] | None]]) -> Tools:
    """Return the schemas of tools by name; a tool without one takes any arguments."""
    return {name: parameters or {} for name, parameters in tools}
