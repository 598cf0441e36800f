"""Turns what a model says into output items, and into the events of a stream. Pure.

    deltas of a message ─▶ Output ─▶ items: reasoning, message, function_call
                             └─▶ events: output_item.added, ….delta, ….done, output_item.done

A whole answer has the items, and a stream has the events of the same object. So they agree.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from vlm_worker.gateway.detokenization import ChosenToken, TextChunk
from vlm_worker.gateway.responding.template import Kind
from vlm_worker.gateway.responses import Delta

Event = dict[str, Any]
"""An event without its `sequence_number`."""


class Output:
    """The output of one answer. One task calls it; after `end`, nothing is added."""

    def __init__(self, answer_id: str, *, with_logprobs: bool) -> None:
        """`answer_id` makes the ids of the items."""
        self._answer_id = answer_id
        self._tokens = _TokenTexts() if with_logprobs else None
        self._items: list[_Item] = []
        self._is_open = False

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items as they are now."""
        return [item.body for item in self._items]

    def add(self, deltas: Sequence[Delta], piece: TextChunk) -> list[Event]:
        """Add what a piece of text says; return the events.

        Args:
            deltas: of the message, as `MessageReader` has them; a str is content.
            piece: the text that the deltas are read from, with its tokens.
        """
        if self._tokens is not None:
            self._tokens.add(piece)
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, str):
                events += self._text(_Message, delta, piece.tokens if self._tokens else ())
                continue
            for name, value in delta.items():
                events += self._said(name, value)
        if deltas and self._tokens is not None and not self._in_message:
            self._tokens.drop()
        return events

    def end(self, *, is_cut: bool) -> list[Event]:
        """End the answer. If it is cut, its last item is incomplete."""
        events = [] if self._items else self._open(_Message(self._id(_Message.prefix)))
        return [*events, *self._close(is_cut=is_cut)]

    @property
    def _in_message(self) -> bool:
        return self._is_open and isinstance(self._items[-1], _Message)

    def _said(self, name: str, value: Any) -> list[Event]:
        if name == Kind.CALLS.value:
            return [event for call in value for event in self._call(call)]
        if name == Kind.CONTENT.value:
            tokens = self._tokens.take(value) if self._tokens is not None else ()
            return self._text(_Message, value, tokens)
        if self._tokens is not None:
            self._tokens.skip(value)
        return self._text(_Reasoning, value, ())

    def _text(
        self, kind: type[_Message | _Reasoning], text: str, tokens: Sequence[ChosenToken]
    ) -> list[Event]:
        if not text and not tokens:
            return []
        events: list[Event] = []
        if not (self._is_open and isinstance(self._items[-1], kind)):
            events += self._close()
            events += self._open(kind(self._id(kind.prefix)))
        return [*events, self._at(self._items[-1].say(text, tokens))]

    def _call(self, call: dict[str, Any]) -> list[Event]:
        function = call["function"]
        if "id" in call:
            item = _Call(self._id(_Call.prefix), call["id"], function["name"])
            return [*self._close(), *self._open(item)]
        return [self._at(self._items[-1].say(function["arguments"], []))]

    def _open(self, item: _Item) -> list[Event]:
        self._items.append(item)
        self._is_open = True
        added = {"type": "response.output_item.added", "item": item.empty}
        return [self._at(added, is_item=True), *map(self._at, item.opened())]

    def _close(self, *, is_cut: bool = False) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item.status = "incomplete" if is_cut else "completed"
        done = {"type": "response.output_item.done", "item": item.body}
        return [*map(self._at, item.closed()), self._at(done, is_item=True)]

    def _at(self, event: Event, *, is_item: bool = False) -> Event:
        """Add the place of the last item to its event."""
        place: Event = {"output_index": len(self._items) - 1}
        return event | place | ({} if is_item else {"item_id": self._items[-1].id})

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._answer_id}_{len(self._items)}"


@dataclasses.dataclass(slots=True)
class _Item(abc.ABC):
    """One item. `Output` is the only writer."""

    id: str
    status: str = dataclasses.field(default="in_progress", init=False)
    texts: list[str] = dataclasses.field(default_factory=list, init=False)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    @abc.abstractmethod
    def body(self) -> dict[str, Any]:
        """The item as it is now."""

    @property
    @abc.abstractmethod
    def empty(self) -> dict[str, Any]:
        """The item before its text."""

    @abc.abstractmethod
    def say(self, text: str, tokens: Sequence[ChosenToken]) -> Event:
        """Add text, with the tokens in it."""

    @abc.abstractmethod
    def opened(self) -> list[Event]:
        """Events behind the one that adds the item."""

    @abc.abstractmethod
    def closed(self) -> list[Event]:
        """Events before the one that ends the item."""


class _Message(_Item):
    """Text of the model, in one part."""

    prefix: ClassVar = "msg"

    def __init__(self, item_id: str) -> None:
        super().__init__(item_id)
        self.logprobs: list[dict[str, Any]] = []

    @property
    def part(self) -> dict[str, Any]:
        return _text_part(self.text, self.logprobs)

    @property
    def body(self) -> dict[str, Any]:
        return self.empty | {"status": self.status, "content": [self.part]}

    @property
    def empty(self) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self.id,
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }

    def say(self, text: str, tokens: Sequence[ChosenToken]) -> Event:
        self.texts.append(text)
        logprobs = [_logprob(token) for token in tokens]
        self.logprobs += logprobs
        return _part_event("output_text.delta", delta=text, logprobs=logprobs)

    def opened(self) -> list[Event]:
        return [_part_event("content_part.added", part=_text_part("", []))]

    def closed(self) -> list[Event]:
        return [
            _part_event("output_text.done", text=self.text, logprobs=self.logprobs),
            _part_event("content_part.done", part=self.part),
        ]


class _Reasoning(_Item):
    """Text of a region of reasoning, in one part."""

    prefix: ClassVar = "rs"

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    @property
    def body(self) -> dict[str, Any]:
        return self.empty | {"status": self.status, "content": [self.part]}

    @property
    def empty(self) -> dict[str, Any]:
        return {
            "type": "reasoning",
            "id": self.id,
            "summary": [],
            "content": [],
            "encrypted_content": None,
            "status": "in_progress",
        }

    def say(self, text: str, tokens: Sequence[ChosenToken]) -> Event:
        del tokens  # `include` asks for those of messages
        self.texts.append(text)
        return _part_event("reasoning_text.delta", delta=text)

    def opened(self) -> list[Event]:
        return [_part_event("content_part.added", part={"type": "reasoning_text", "text": ""})]

    def closed(self) -> list[Event]:
        return [
            _part_event("reasoning_text.done", text=self.text),
            _part_event("content_part.done", part=self.part),
        ]


class _Call(_Item):
    """A call of a function."""

    prefix: ClassVar = "fc"

    def __init__(self, item_id: str, call_id: str, name: str) -> None:
        super().__init__(item_id)
        self._call_id = call_id
        self._name = name

    @property
    def body(self) -> dict[str, Any]:
        return self.empty | {"status": self.status, "arguments": self.text}

    @property
    def empty(self) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self.id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "",
            "status": "in_progress",
        }

    def say(self, text: str, tokens: Sequence[ChosenToken]) -> Event:
        del tokens
        self.texts.append(text)
        return {"type": "response.function_call_arguments.delta", "delta": text}

    def opened(self) -> list[Event]:
        return []

    def closed(self) -> list[Event]:
        kind = "response.function_call_arguments.done"
        return [{"type": kind, "name": self._name, "arguments": self.text}]


class _TokenTexts:
    """Finds the tokens of a message in the text of the answer, which also has anchors and calls.

    text     <think>Hm.</think>⏎⏎Red.     tokens by their offsets in it
    message                     Red.      those that have a character of it
    """

    def __init__(self) -> None:
        self._text = ""
        self._begin = 0  # the offset of `_text` in the answer
        self._tokens: list[ChosenToken] = []

    def add(self, piece: TextChunk) -> None:
        self._text += piece.text
        self._tokens += piece.tokens

    def take(self, said: str) -> list[ChosenToken]:
        """Return the tokens of a message's text, and forget them and those before."""
        begin, end = self._find(said)
        taken = [
            token
            for token, until in self._placed()
            if token.offset < end and (until > begin or token.offset >= begin)
        ]
        self._forget(end, [token for token, _ in self._placed() if token.offset >= end])
        return taken

    def skip(self, said: str) -> None:
        """Forget a text that is no message's; its last token may also be of what follows."""
        _, end = self._find(said)
        self._forget(end, [token for token, until in self._placed() if until > end])

    def drop(self) -> None:
        """Forget all text so far: it is no message's."""
        self._forget(self._begin + len(self._text), [])

    def _find(self, said: str) -> tuple[int, int]:
        """Return the offsets of a text: its last place, because an anchor before may contain it."""
        at = self._text.rfind(said)
        if at < 0:
            return self._begin, self._begin + len(self._text)
        return self._begin + at, self._begin + at + len(said)

    def _placed(self) -> list[tuple[ChosenToken, int]]:
        """Return the tokens, each with the offset at which its text ends."""
        ends = [token.offset for token in self._tokens[1:]]
        ends += [self._begin + len(self._text)] * (len(self._tokens) - len(ends))
        return list(zip(self._tokens, ends, strict=True))

    def _forget(self, end: int, kept: list[ChosenToken]) -> None:
        self._text = self._text[end - self._begin :]
        self._begin, self._tokens = end, kept


def _part_event(name: str, **fields: Any) -> Event:
    return {"type": f"response.{name}", "content_index": 0, **fields}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprob(token: ChosenToken) -> dict[str, Any]:
    return token.chosen.body | {"top_logprobs": [likely.body for likely in token.top]}
