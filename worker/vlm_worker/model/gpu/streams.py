"""Overlaps steps and image encoding on one GPU: a stream for each, and a thread for images.

    engine thread     steps      ─ step ─ step ─ step ─ wait ─ a step that reads the rows ─
    encoder thread    images   ─ tower ─ ─ ─ rows ─ event ─┘

A tower copies sizes back from the device, and Python launches its kernels one by one. A separate
thread waits for both. Kernels of steps have priority over those of images that have not begun.

An event hands over embedding rows: the stream of steps waits for it, no thread does. The allocator
would reuse the memory of rows for later images as soon as no tensor references it. A step that
reads rows prevents this until it has ended (`record_stream`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

FIRST, LAST = -1, 0
"""CUDA priorities of streams: a lower number goes first; the default stream has LAST."""


class DeviceStreams(Protocol):
    """Streams and events of a device; their types are opaque."""

    def stream(self, *, priority: int) -> Any:
        """Make a stream."""

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which this thread launches on `stream`."""

    def record(self) -> Any:
        """An event after all work that was launched on the current stream."""

    def wait(self, event: Any) -> None:
        """Make later work of the current stream wait for an event."""

    def keep(self, x: torch.Tensor) -> None:
        """Delay reuse of x's memory until the current stream has ended its work.

        This is the work that is on the stream when x is freed.
        """


class SingleStream:
    """Runs steps and images in turn on the current stream: on CPUs, or with one half of a model."""

    def steps(self) -> contextlib.AbstractContextManager[Any]:
        """A context to launch the work of steps, and work between steps, in."""
        return contextlib.nullcontext()

    def images(self) -> contextlib.AbstractContextManager[Any]:
        """A context to launch the encoder's work in."""
        return contextlib.nullcontext()

    def encode_async(self, call: Callable[[], T]) -> Future[T] | None:
        """Start `call` overlapped with steps; None if the caller must run it between steps."""
        del call
        return None

    def made(self) -> Any:
        """An event after the launched work, to pass to `take`; None if none is needed."""
        return None

    def take(self, x: torch.Tensor, made: Any) -> None:
        """Call before a read of x: the stream waits for the event, and keeps the memory of x."""


class OverlappedStreams(SingleStream):
    """Encodes images concurrently with steps, after the work of the current stream."""

    def __init__(self, queues: DeviceStreams) -> None:
        self._queues = queues
        self._steps, self._images = (queues.stream(priority=at) for at in (FIRST, LAST))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        loaded = queues.record()
        for stream in (self._steps, self._images):
            with queues.on(stream):
                queues.wait(loaded)

    def steps(self) -> contextlib.AbstractContextManager[Any]:
        return self._queues.on(self._steps)

    def images(self) -> contextlib.AbstractContextManager[Any]:
        return self._queues.on(self._images)

    def encode_async(self, call: Callable[[], T]) -> Future[T] | None:
        """Calls run one after the other."""
        return self._thread.submit(call)

    def made(self) -> Any:
        """Called inside `images`."""
        return self._queues.record()

    def take(self, x: torch.Tensor, made: Any) -> None:
        """Called inside `steps`."""
        if made is not None:
            self._queues.wait(made)
            self._queues.keep(x)


class CudaStreams:
    """The streams of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self, *, priority: int) -> Any:
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Also makes the stream's GPU the current device."""
        return torch.cuda.stream(stream)

    def record(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def keep(self, x: torch.Tensor) -> None:
        x.record_stream(torch.cuda.current_stream(self._device))


def streams_for(device: torch.device, *, has_encoder: bool, has_lm: bool) -> SingleStream:
    """Overlapped streams if a GPU has both halves of a model, else a single stream."""
    if device.type == "cuda" and has_encoder and has_lm:
        return OverlappedStreams(CudaStreams(device))
    return SingleStream()
