"""The child process that checks grammars: asked, ended, and started again.

    ask(text) ─▶ child ─┬─ answers ───────────────────────▶ its verdict
                        ├─ ends itself: CPU or memory ────▶ TOO_COMPLEX, its verdict too
                        ├─ ends otherwise ─▶ a new child, once ─▶ NoVerdictError
                        └─ is silent ─────────────────────▶ NoVerdictError

A child that the kernel or a signal ends says nothing about the grammar that it had.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Final

from vlm_worker.gateway.grammar import TOO_COMPLEX
from vlm_worker.gateway.grammar_child import LENGTH, MEMORY_BYTES

logger = logging.getLogger(__name__)

CHILD_BYTES: Final = MEMORY_BYTES + (24 << 20)
"""Resident memory of the child, its libraries included; a part of the gateway's `kept`."""

WALL_SECONDS: Final = 10.0
"""Time for one grammar, and for the start of the child, on a busy machine."""

GRACE_SECONDS: Final = 1.0
"""Time between the end of the child's pipe and its own end."""

OWN_LIMITS: Final = (-signal.SIGPROF, -signal.SIGABRT)
"""Exit codes of a child that exceeded its CPU time, or that was refused memory."""


class NoVerdictError(Exception):
    """The child ended or was silent. The message says how; it is for the log."""


class GrammarProcess:
    """A child that is started when it is needed. Its methods block; threads may call them."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._asking = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The child's id; None if there is none."""
        child = self._child
        return None if child is None else child.pid

    def ask(self, text: bytes) -> str:
        """Return what is wrong with a grammar; empty if nothing is.

        Raises:
            NoVerdictError: two children ended, one was silent, or `close` was called.
        """
        with self._asking:
            try:
                return self._ask_once(text)
            except EOFError as error:
                logger.warning("another child checks a grammar", extra={"reason": str(error)})
            try:
                return self._ask_once(text)
            except EOFError as error:
                raise NoVerdictError(str(error)) from error

    def close(self) -> None:
        """End the child; no other is started. A running `ask` ends with an error."""
        self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._asking:
            self._end()

    def _ask_once(self, text: bytes) -> str:
        """Ask the child.

        Raises:
            EOFError: it ended without a verdict.
            NoVerdictError: it is silent, or `close` was called.
        """
        if self._is_closed:
            raise NoVerdictError("the gateway ends")
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._child = _start()
        try:
            return _exchange(self._child, text)
        except TimeoutError as error:
            self._end()
            raise NoVerdictError(f"the child was silent for {WALL_SECONDS:g} s") from error
        except (OSError, EOFError) as error:
            code = self._end(grace_seconds=GRACE_SECONDS)
            if code in OWN_LIMITS:
                return TOO_COMPLEX
            raise EOFError(f"the child ended with code {code}") from error

    def _end(self, *, grace_seconds: float = 0.0) -> int | None:
        """End the child and close its pipes; return its exit code, None without a child.

        A child that ends itself has `grace_seconds` for it, so that the code is its own.
        """
        child, self._child = self._child, None
        if child is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_seconds)
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return child.wait()


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vlm_worker.gateway.grammar_child"]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL  # it may end with a stack trace
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, bufsize=0)  # noqa: S603
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)  # a grammar may be larger than the pipe's buffer
    return child


def _exchange(child: subprocess.Popen[bytes], text: bytes) -> str:
    """Raises EOFError or OSError if the child has ended, and TimeoutError if it is silent."""
    assert child.stdin is not None
    assert child.stdout is not None
    until = time.monotonic() + WALL_SECONDS
    _write(child.stdin, LENGTH.pack(len(text)) + text, until)
    (size,) = LENGTH.unpack(_read(child.stdout, LENGTH.size, until))
    return _read(child.stdout, size, until).decode(errors="replace")


def _write(pipe: IO[bytes], data: bytes, until: float) -> None:
    while data:
        _await(pipe, select.POLLOUT, until)
        data = data[os.write(pipe.fileno(), data) :]


def _read(pipe: IO[bytes], size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        _await(pipe, select.POLLIN, until)
        part = os.read(pipe.fileno(), size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _await(pipe: IO[bytes], event: int, until: float) -> None:
    """Wait until a pipe can be used, or has ended. Raises TimeoutError."""
    ready = select.poll()  # `select.select` takes no descriptor above 1,023
    ready.register(pipe, event)
    if not ready.poll(1000 * max(0.0, until - time.monotonic())):
        raise TimeoutError
