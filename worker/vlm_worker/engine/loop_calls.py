"""Calls into the loop by a thread that goes on: the loop has the interpreter when it lets go of it.

    engine thread   call -> the model computes, without the interpreter
    loop                    '-> the calls, meanwhile

`call_soon_threadsafe` lets go of the interpreter to wake the loop. Where the loop is faster, it
runs all that it was given first, and the model, which needs the interpreter to begin, waits for it.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

_eventfd_write = ctypes.PyDLL(None).eventfd_write  # of PyDLL: it keeps the interpreter
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


class LoopCalls:
    """Calls in order, by any thread, once `open` was called on the loop, and until `close` was."""

    def __init__(self) -> None:
        self._calls: collections.deque[tuple[Callable[..., None], tuple[Any, ...]]]
        self._calls = collections.deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._lock = threading.Lock()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have calls made on `loop`. On the loop."""
        self._loop = loop
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._fd, self._make)

    def call(self, callback: Callable[..., None], *args: Any) -> None:
        """Have the loop call `callback(*args)`.

        Raises:
            RuntimeError: the loop is closed, or `close` was called.
        """
        assert self._loop is not None
        if self._loop.is_closed():
            raise RuntimeError("the loop is closed")
        # else the loop could close it in between, and the number be another file's
        with self._lock:
            if self._fd < 0:
                raise RuntimeError("no more calls are taken")
            self._calls.append((callback, args))
            _eventfd_write(self._fd, 1)

    def close(self) -> None:
        """The last call was made. On the loop."""
        assert self._loop is not None
        with self._lock:
            fd, self._fd = self._fd, -1
            self._loop.remove_reader(fd)
            os.close(fd)

    def _make(self) -> None:
        assert self._loop is not None
        if self._fd < 0:
            return
        os.eventfd_read(self._fd)
        while self._calls:
            callback, args = self._calls.popleft()
            self._loop.call_soon(callback, *args)
