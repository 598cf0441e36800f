"""Has a child process check grammars, so that no grammar stops the gateway.

    check(grammar) ─▶ earlier verdicts ─▶ child, one grammar at a time ─▶ ApiError or nothing

The library has no bound on its time for every text: an intersection of patterns may take minutes.
The child ends itself after `grammar_child.CPU_SECONDS` of CPU time, or if it exceeds its memory.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import logging
import select
import subprocess
import sys
from typing import IO, Final

from vlm_worker.gateway.grammar import TOO_COMPLEX, Grammar, error_of
from vlm_worker.gateway.grammar_child import LENGTH, MEMORY_BYTES

logger = logging.getLogger(__name__)

MAX_VERDICTS: Final = 1024
CHILD_BYTES: Final = MEMORY_BYTES + (24 << 20)
"""Resident memory of the child, its libraries included; a part of the gateway's `kept`."""

WALL_SECONDS: Final = 10.0
"""Time for one grammar, and for the start of the child, on a busy machine."""


class GrammarChecks:
    """The verdicts on grammars, and the child that gives them. One event loop uses it.

    Attributes:
        num_checked: grammars that the child has checked.
        num_refused: those of them that it refused.
    """

    def __init__(self) -> None:
        self._verdicts: collections.OrderedDict[bytes, str] = collections.OrderedDict()
        self._turn = asyncio.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self.num_checked = 0
        self.num_refused = 0

    async def check(self, grammar: Grammar) -> None:
        """Raise ApiError (400 `invalid_json_schema`) if the grammar cannot be used."""
        digest = hashlib.sha256(grammar.text.encode()).digest()
        if digest not in self._verdicts:
            async with self._turn:
                if digest not in self._verdicts:
                    self._keep(digest, await asyncio.to_thread(self._ask, grammar.text.encode()))
        self._verdicts.move_to_end(digest)
        if problem := self._verdicts[digest]:
            logger.info("a grammar was refused", extra={"reason": problem[:200]})
            raise error_of(grammar, problem)

    def __del__(self) -> None:
        """End the child of checks that nobody closed, as those of a test."""
        self.close()

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            _end(child)

    def _keep(self, digest: bytes, problem: str) -> None:
        self.num_checked += 1
        self.num_refused += bool(problem)
        self._verdicts[digest] = problem
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _ask(self, text: bytes) -> str:
        """The child's verdict; blocks until it answers or ends."""
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = _start()
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(LENGTH.pack(len(text)) + text)
            child.stdin.flush()
            (size,) = LENGTH.unpack(_read(child.stdout, LENGTH.size))
            return _read(child.stdout, size).decode(errors="replace") if size else ""
        except (OSError, EOFError, TimeoutError) as error:
            code = child.poll() if isinstance(error, TimeoutError) else child.wait(WALL_SECONDS)
            self.close()
            if code is not None and code >= 0:  # it failed: no limit was exceeded
                raise RuntimeError(f"the child that checks grammars ended with {code}") from error
            return TOO_COMPLEX


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vlm_worker.gateway.grammar_child"]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL  # it may end with a stack trace
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, bufsize=0)  # noqa: S603


def _read(pipe: IO[bytes], size: int) -> bytes:
    """Raises EOFError if the child has ended, and TimeoutError if it says nothing."""
    data = b""
    while len(data) < size:
        ready, _, _ = select.select([pipe], [], [], WALL_SECONDS)
        if not ready:
            raise TimeoutError
        part = pipe.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
