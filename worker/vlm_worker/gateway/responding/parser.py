"""Splits the text of an answer into content, reasoning and tool calls, as it arrives. Pure.

    feed("I'll look. <tool_call>{"na") ─▶ Text(CONTENT, "I'll look.")
    feed("me": "f", "arguments": {"x": 1") ─▶ CallBegins(0, "f"), CallArguments(0, '{"x": 1')
    feed("}}</tool_call>") ─▶ CallArguments(0, "}"), CallEnds(0)

The joined events do not depend on how the text is cut. Text that is no call stays content, with its
anchors; what a call read before it failed is not searched for others. White space at the beginning
and the end of content and reasoning is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from typing import Final

from vlm_worker.gateway.responding.calls import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallEvent,
    JsonReader,
    Reader,
    TagReader,
    Tools,
    first_of,
)
from vlm_worker.gateway.responding.patterns import MAX_MATCH, Match, Pattern, Pending
from vlm_worker.gateway.responding.template import (
    JsonCalls,
    Kind,
    Region,
    ResponseTemplate,
)

_STEP: Final = 64
"""Characters that are read at once. All that is not read is searched at each anchor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Text of content or of reasoning."""

    kind: Kind
    text: str


Event = Text | CallEvent
_Reading = Generator[Event, None, bool]
"""Yields events; returns whether there is more to do."""


class _Stripper:
    """Drops white space at the beginning of all texts of one kind, and at their end."""

    def __init__(self, *, strip: bool) -> None:
        self._strip = strip
        self._held = ""
        self._has_text = False

    def feed(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if not self._strip:
            self._has_text |= bool(text)
            return text
        if not self._has_text:
            text = text.lstrip()
        core = text.rstrip()
        self._held = text[len(core) :]
        self._has_text |= bool(core)
        return core

    def join(self, text: str) -> None:
        """Put `text` before what follows, if something precedes it."""
        if self._has_text:
            self._held = text


class AnswerParser:
    """Parses one answer. One task calls it; after `finish`, nothing is fed.

    Args:
        opening: the beginning of the answer that the prompt has; it yields no events.
        tools: the tools of the request; without tools, calls are content.
        max_calls: the answer ends after this many calls; None: no limit.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        tools: Tools,
        opening: str = "",
        max_calls: int | None = None,
    ) -> None:
        self._tools = tools
        self._max_calls = max_calls
        self._outer = next(r for r in template.regions if r.kind is Kind.CONTENT)
        self._regions = tuple(
            region
            for region in template.regions
            if region.begin is not None and (tools or region.kind is not Kind.CALLS)
        )
        self._strippers = {r.kind: _Stripper(strip=r.strip) for r in template.regions}
        self._buffer = ""
        self._region: Region | None = None  # None: outside of all regions
        self._reader: Reader | None = None
        self._opened = ""  # the text of the anchor of `_reader`'s region
        self._closing: Pattern | None = None  # an anchor that may follow a complete call
        self.num_calls = 0
        self.done = False
        for _ in self.feed(opening):
            pass
        self._strippers = {r.kind: _Stripper(strip=r.strip) for r in template.regions}

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._region is not None and self._region.kind is Kind.REASONING

    def feed(self, text: str) -> list[Event]:
        """Add text; return the events that it decides."""
        return _merged(self._fed(text))

    def finish(self) -> list[Event]:
        """End the answer; return the remaining events."""
        return _merged(self._run(final=True))

    def _fed(self, text: str) -> Iterator[Event]:
        for at in range(0, len(text), _STEP):
            self._buffer += text[at : at + _STEP]
            yield from self._run(final=False)

    def _run(self, *, final: bool) -> Iterator[Event]:
        while not self.done:
            if self._reader is not None:
                more = yield from self._in_call(final=final)
            elif self._closing is not None:
                more = self._at_close(final=final)
            else:
                more = yield from self._in_text(final=final)
            if not more:
                return

    def _in_text(self, *, final: bool) -> _Reading:
        """Read content or reasoning."""
        region = self._region
        if region is None:
            watched = [self._outer.end, *(one.begin for one in self._regions)]
        else:
            watched = [region.end]
        found = first_of(watched, self._buffer, final=final)
        end = found.hold if found.match is None else found.match.start
        yield from self._say(self._buffer[:end])
        if found.match is None:
            self._buffer = self._buffer[end:]
            return False
        match, self._region = found.match, None
        matched, self._buffer = self._buffer[end : match.end], self._buffer[match.end :]
        if region is None and found.which > 0:
            self._enter(self._regions[found.which - 1], match, matched)
        return True

    def _enter(self, region: Region, match: Match, matched: str) -> None:
        if region.kind is not Kind.CALLS:
            self._region = region
            self._strippers[region.kind].join(region.join)
            return
        name, tools, index = match.groups.get("name", ""), self._tools, self.num_calls
        if isinstance(region.calls, JsonCalls):
            self._reader = JsonReader(region.calls, region.end, name=name, tools=tools, index=index)
        else:
            assert region.calls is not None
            self._reader = TagReader(region.calls, region.end, name=name, tools=tools, index=index)
        self._opened, self._region = matched, region

    def _in_call(self, *, final: bool) -> _Reading:
        reader, region = self._reader, self._region
        assert reader is not None
        assert region is not None
        text, self._buffer = self._buffer, ""
        for event in reader.feed(text, final=final):
            yield event
            if isinstance(event, CallBegins):
                self._opened = ""
            elif isinstance(event, CallEnds):
                self.num_calls += 1
                if self._max_calls is not None and self.num_calls >= self._max_calls:
                    self.done = True
                    return False
        if not (reader.done or reader.failed):
            return False
        self._reader = self._region = None
        self._buffer = reader.rest
        if reader.failed:
            # At least one character is content, so that the same anchor is not found again.
            said = self._opened + reader.said or self._buffer[:1]
            self._buffer = self._buffer[len(said) - len(self._opened + reader.said) :]
            yield from self._say(said)
        else:
            self._closing = region.end
        return True

    def _at_close(self, *, final: bool) -> bool:
        """Drop the anchor that ends a region, if it follows the complete call."""
        assert self._closing is not None
        text = self._buffer
        num_space = min(len(text) - len(text.lstrip()), MAX_MATCH)
        found = self._closing.search(text, 0, final=final)
        may_close = isinstance(found, Pending) and found.start <= num_space
        if isinstance(found, Match) and found.start <= num_space:
            self._buffer = text[found.end :]
        elif may_close or (not final and num_space == len(text)):
            return False
        self._closing = None
        return True

    def _say(self, text: str) -> Iterator[Event]:
        kind = Kind.CONTENT if self._region is None else self._region.kind
        if said := self._strippers[kind].feed(text):
            yield Text(kind, said)


def _merged(events: Iterator[Event]) -> list[Event]:
    """Join neighbours of one kind."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Text) and isinstance(last, Text) and last.kind is event.kind:
            merged[-1] = Text(event.kind, last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and last.index == event.index
        ):
            merged[-1] = CallArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
