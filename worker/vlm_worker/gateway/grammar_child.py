"""A child process that says what is wrong with grammars: a hostile one costs it alone.

    stdin   length (uint32, big-endian) and text of a grammar
    stdout  length and text of its problem, empty if there is none

A grammar that needs more CPU time or memory ends the process; the gateway starts another one.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
from typing import BinaryIO, Final

from llguidance import LLMatcher

from vlm_worker.core.grammar_limits import parser_limits

CPU_SECONDS: Final = 0.25
MEMORY_BYTES: Final = 64 << 20
LENGTH: Final = struct.Struct(">I")


def problem_of(text: str) -> str:
    """Why a text is no grammar; empty if it is one."""
    is_refused, messages = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    return (messages[0] or "refused") if is_refused else ""


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Check grammars until the gateway closes the pipe."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        text = requests.read(LENGTH.unpack(head)[0]).decode()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        problem = problem_of(text).encode()[: 64 << 10]
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(LENGTH.pack(len(problem)) + problem)
        replies.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
