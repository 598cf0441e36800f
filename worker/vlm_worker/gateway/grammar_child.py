"""A child process that says what is wrong with grammars: a hostile one costs it alone.

    stdin   length (uint32, big-endian) and text of a grammar
    stdout  length and text of its problem, empty if there is none

    text ─▶ matcher ─▶ two short answers, byte by byte, with the masks ─▶ no problem
               │ error                  │ a limit
               ▼                        ▼
       the library's reason     EXCEEDED and the library's reason

Some limits count what a matcher holds after the tokens of an answer, so a text alone exceeds none.
The answers enter most objects of usual schemas, but not all.

A grammar that needs more CPU time or memory to compile ends the process; the gateway starts another
one. The answers are followed in a fork, whose end for that reason refuses no grammar.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import string
import struct
import sys
import time
from typing import BinaryIO, Final

from llguidance import LLMatcher, LLTokenizer

from vlm_worker.core.grammar_limits import EXCEEDED, parser_limits

CPU_SECONDS: Final = 0.25
"""To compile a grammar, and for its answers."""
ANSWER_SECONDS: Final = 0.05
"""CPU time after which an answer is followed no further."""
ANSWER_BYTES: Final = 400
MEMORY_BYTES: Final = 64 << 20
LENGTH: Final = struct.Struct(">I")

_LETTERS: Final = string.ascii_letters.encode()
LONG: Final = b'{["],:' + _LETTERS + b"}"
"""First choices of an answer with all properties, and one item per array."""
SHORT: Final = b'}]":,{[/' + _LETTERS
"""First choices of an answer with required properties alone."""
_SPACE: Final = b"\t\n\r "
"""Last choices: a grammar may allow much white space."""

_EOS: Final = 256
_CONTROL: Final = tuple(range(_EOS + 1, _EOS + 65))
_CONTROL_ID: Final = re.compile(r"<\[(\d+)\]>")
_OF_TEXT: Final = b'"z '
"""Bytes that may all be next in a text alone: a string of JSON, or a text that tags end."""
_ENDS: Final = b'"\n</parameter>\n</think>\n</arg_value>\n<|"|>'
"""Bytes that are written in a text, in turn. A string of JSON ends at the first."""


class _Bytes:
    """A vocabulary of bytes, an end, and control tokens."""

    is_tokenizer_wrapper = True
    eos_token_id = _EOS
    bos_token_id = None
    tokens = (*(bytes((one,)) for one in range(256)), *(b"<%d>" % one for one in (_EOS, *_CONTROL)))
    special_token_ids = (_EOS, *_CONTROL)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def compiled(text: str) -> LLMatcher:
    """A matcher of a grammar, or of its error. Its tokens are bytes and a few control tokens."""
    ids = list(dict.fromkeys(_CONTROL_ID.findall(text)))
    own = {one: f"<[{_CONTROL[at % len(_CONTROL)]}]>" for at, one in enumerate(ids)}
    renamed = _CONTROL_ID.sub(lambda found: own[found[1]], text)
    tokenizer = LLTokenizer(_Bytes(), n_vocab=len(_Bytes.tokens))  # type: ignore[arg-type]
    return LLMatcher(tokenizer, renamed, log_level=0, limits=parser_limits())


def limit_of(matcher: LLMatcher) -> str:
    """The limit that an answer exceeds; empty if the answers that are tried exceed none."""
    for preferred in (LONG, SHORT):
        if limit := _followed(matcher.deep_copy(), preferred):
            return f"{EXCEEDED}: {limit}"
    return ""


def _followed(matcher: LLMatcher, preferred: bytes) -> str:
    """The limit that one answer exceeds; empty if none."""
    others = (one for one in range(_EOS) if one not in preferred + _SPACE)
    order = (*_CONTROL, *preferred, *others, *_SPACE)
    until, num_in_text = time.process_time() + ANSWER_SECONDS, 0
    for _ in range(ANSWER_BYTES):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            break
        token = next((one for one in order if mask >> one & 1), None)
        if all(mask >> one & 1 for one in _OF_TEXT):
            end = _ENDS[num_in_text % len(_ENDS)]
            token, num_in_text = end if mask >> end & 1 else token, num_in_text + 1
        else:
            num_in_text = 0
        if token is None or time.process_time() > until or not matcher.consume_token(token):
            break
    return (matcher.get_error() or "unknown") if matcher.is_error() else ""


def _problem_of(text: str) -> str:
    """Why a text is no grammar, or cannot be followed; empty if it can."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    matcher = compiled(text)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if matcher.is_error():
        return matcher.get_error() or "refused"
    return _forked(matcher)


def _forked(matcher: LLMatcher) -> str:
    """The result of `limit_of` in a process of its own; empty if that exceeds CPU time or memory.

    The first mask of a long literal needs more memory than its grammar. Workers have that memory.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            os.write(writer, limit_of(matcher).encode()[:4096])
        finally:
            os._exit(0)  # after any error: two processes may not read requests
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        limit = pipe.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return limit


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Check grammars until the gateway closes the pipe."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        problem = _problem_of(requests.read(LENGTH.unpack(head)[0]).decode())
        encoded = problem.encode()[: 64 << 10]
        replies.write(LENGTH.pack(len(encoded)) + encoded)
        replies.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
