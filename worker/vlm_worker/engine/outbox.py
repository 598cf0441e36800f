"""What the engine thread has to say: collected in a turn, delivered on the loop in one call."""

from __future__ import annotations

import asyncio
from typing import Any

from vlm_worker.engine.events import EventStream
from vlm_worker.types import FailedEvent

Letter = tuple[EventStream[Any] | asyncio.Future[Any], Any]


class Outbox:
    """Letters to streams and futures. Written by the engine thread, delivered on the loop."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []

    def emit(self, stream: EventStream[Any] | None, event: Any) -> None:
        """Add an event; None as a stream is nobody listening."""
        if stream is not None:
            self._letters.append((stream, event))

    def end(self, stream: EventStream[Any] | None) -> None:
        """The stream has had its last word."""
        if stream is not None:
            self._letters.append((stream, None))

    def fail(self, stream: EventStream[Any] | None, error: Exception) -> None:
        """An error as the last word."""
        self.emit(stream, FailedEvent(error))
        self.end(stream)

    def answer(self, future: asyncio.Future[Any], result: Any) -> None:
        """Resolve a future; an exception as result is raised there."""
        self._letters.append((future, result))

    def take(self) -> list[Letter]:
        """All letters since the last call."""
        letters, self._letters = self._letters, []
        return letters


def deliver(letters: list[Letter]) -> None:
    """Hand letters to their readers. On the loop."""
    for target, content in letters:
        if isinstance(target, EventStream):
            target.push(content)
        elif target.done():  # its awaiter was cancelled
            continue
        elif isinstance(content, Exception):
            target.set_exception(content)
        else:
            target.set_result(content)
