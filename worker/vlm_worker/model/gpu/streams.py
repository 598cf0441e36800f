"""Steps and pictures of one GPU beside each other: a stream for each, and a thread for pictures.

    engine thread     steps      ─ step ─ step ─ step ─ wait ─ a step that reads the rows ─
    encoder thread    pictures   ─ tower ─ ─ ─ rows ─ event ─┘

A tower reads sizes back from the device, and Python launches its kernels one by one: a thread of
its own waits for both. Kernels of steps go before those of pictures that have not begun yet.

Rows are handed over by an event, which the stream of steps waits for and no thread does. Their
memory belongs to the stream of pictures, which would give it to the next ones as soon as nobody
holds it; a step that reads rows keeps it from that until the step is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

FIRST, LAST = -1, 0
"""Priorities of streams, as CUDA counts them; the default stream has the last."""


class Queues(Protocol):
    """What a device has of streams and events; their types are its own."""

    def stream(self, *, priority: int) -> Any:
        """A new one."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """This thread launches there, inside."""

    def record(self) -> Any:
        """An event behind all that the current stream was given so far."""

    def wait(self, event: Any) -> None:
        """What the current stream is given from now on begins after an event."""

    def keep(self, x: torch.Tensor) -> None:
        """Give its memory to nobody before all is over that the current stream has when x goes."""


class OneStream:
    """One thing after the other on the stream that is current: CPUs, and workers of one half."""

    def steps(self) -> contextlib.AbstractContextManager[Any]:
        """What is launched inside is part of a step, or stands between two."""
        return contextlib.nullcontext()

    def pictures(self) -> contextlib.AbstractContextManager[Any]:
        """What is launched inside is part of the encoder's work."""
        return contextlib.nullcontext()

    def beside(self, call: Callable[[], T]) -> Future[T] | None:
        """Begin a call beside steps; None where it has to be made in turn with them."""
        del call
        return None

    def made(self) -> Any:
        """An event behind what was launched, to hand it over by; None where none is needed."""
        return None

    def take(self, x: torch.Tensor, made: Any) -> None:
        """Before x is read: wait for the event, and keep the memory for as long as that takes."""


class TwoStreams(OneStream):
    """Pictures beside steps. Begins behind what the current stream has been given."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._steps, self._pictures = (queues.stream(priority=at) for at in (FIRST, LAST))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        loaded = queues.record()
        for stream in (self._steps, self._pictures):
            with queues.on(stream):
                queues.wait(loaded)

    def steps(self) -> contextlib.AbstractContextManager[Any]:
        """See `OneStream`."""
        return self._queues.on(self._steps)

    def pictures(self) -> contextlib.AbstractContextManager[Any]:
        """See `OneStream`."""
        return self._queues.on(self._pictures)

    def beside(self, call: Callable[[], T]) -> Future[T] | None:
        """See `OneStream`; one call after the other."""
        return self._thread.submit(call)

    def made(self) -> Any:
        """See `OneStream`; asked for inside `pictures`."""
        return self._queues.record()

    def take(self, x: torch.Tensor, made: Any) -> None:
        """See `OneStream`; called inside `steps`."""
        if made is not None:
            self._queues.wait(made)
            self._queues.keep(x)


class CudaQueues:
    """Of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self, *, priority: int) -> Any:
        """See `Queues`."""
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """See `Queues`; its GPU is the current one, too."""
        return torch.cuda.stream(stream)

    def record(self) -> Any:
        """See `Queues`."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, event: Any) -> None:
        """See `Queues`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def keep(self, x: torch.Tensor) -> None:
        """See `Queues`."""
        x.record_stream(torch.cuda.current_stream(self._device))


def streams_for(device: torch.device, *, has_encoder: bool, has_lm: bool) -> OneStream:
    """Two where a GPU has both halves of a model, else one."""
    if device.type == "cuda" and has_encoder and has_lm:
        return TwoStreams(CudaQueues(device))
    return OneStream()
