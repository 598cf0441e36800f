"""What the engine thread has to say: collected, and delivered on the loop in one call.

step k-1 ends -> books, commands, schedule, inputs -> post -> step k computes
                                                      |-> the loop hands out k-1's tokens meanwhile

So the loop has the interpreter while kernels and copies do not need it, and not while the engine
plans: two threads of Python take turns, and the engine would wait until the last token is out.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vlm_worker.engine.events import EventStream
from vlm_worker.types import FailedEvent

Letter = tuple[EventStream[Any] | asyncio.Future[Any], Any]


class Outbox:
    """Letters to streams and futures. Written by the engine thread, delivered on the loop.

    `send` is who takes them to the loop; without, they stay until `take`.
    """

    def __init__(self, send: Callable[[Iterator[Letter]], None] | None = None) -> None:
        self._letters: list[Iterable[Letter]] = []
        self._send = send

    def emit(self, stream: EventStream[Any] | None, event: Any) -> None:
        """Add an event; None as a stream is nobody listening."""
        if stream is not None:
            self._letters.append(((stream, event),))

    def emit_all(self, streams: Sequence[EventStream[Any] | None], events: Iterable[Any]) -> None:
        """Add an event for each stream. An iterator of events is run by who delivers them."""
        pairs = zip(streams, events, strict=True)
        self._letters.append((stream, event) for stream, event in pairs if stream is not None)

    def end(self, stream: EventStream[Any] | None) -> None:
        """The stream has had its last word."""
        self.emit(stream, None)

    def fail(self, stream: EventStream[Any] | None, error: Exception) -> None:
        """An error as the last word."""
        self.emit(stream, FailedEvent(error))
        self.end(stream)

    def answer(self, future: asyncio.Future[Any], result: Any) -> None:
        """Resolve a future; an exception as result is raised there."""
        self._letters.append(((future, result),))

    def post(self) -> None:
        """Send what there is: the model is about to compute, bytes to be copied, or all is done."""
        if self._letters and self._send is not None:
            self._send(self.take())

    def take(self) -> Iterator[Letter]:
        """All letters since the last call."""
        letters, self._letters = self._letters, []
        return itertools.chain.from_iterable(letters)


def deliver(letters: Iterable[Letter]) -> None:
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
