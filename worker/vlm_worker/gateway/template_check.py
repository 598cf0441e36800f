"""A chat template is rendered once before it is used, in a process with bounds of time and memory.

    gateway ─ source, names of tokens ─▶ child: setrlimit, render ─▶ whether a text alone is dropped
                                           └─ too long, too large ─▶ ModelConfigError

A template is code of the model's publisher. What a rendering may take while requests run is bounded
in `template.py`; this finds those that no bound inside of Python stops.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
from typing import Final

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.gateway.template import ChatTemplate

CPU_SECONDS: Final = 5
DEADLINE_SECONDS: Final = 60.0
"""Of the child with its start, on a machine with other work."""
MEMORY_BYTES: Final = 1 << 30
"""Of addresses; the interpreter and its libraries have a tenth of it."""
_COMMAND = "from vlm_worker.gateway.template_check import child; child()"


@functools.lru_cache(maxsize=64)
def drops_strings(source: str, named_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template shows a text only as a part of a message.

    Raises:
        ModelConfigError: it takes more time or memory than any conversation's rendering may.
    """
    # What is wrong with its syntax is said here, with the line.
    ChatTemplate(source, [], dict(named_tokens), as_parts=False)
    question = json.dumps([source, named_tokens, CPU_SECONDS, MEMORY_BYTES])
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-S", "-c", _COMMAND],
            input=question.encode(),
            capture_output=True,
            timeout=DEADLINE_SECONDS,
            check=False,
            env={
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
    except subprocess.TimeoutExpired as error:
        raise _unusable(f"was not rendered in {DEADLINE_SECONDS:g} s") from error
    if done.returncode != 0:
        raise _unusable(
            f"takes more than {CPU_SECONDS} s or {MEMORY_BYTES >> 20} MiB to render "
            "one short message"
        )
    return bool(json.loads(done.stdout))


def child() -> None:
    """The other process."""
    source, named_tokens, cpu_seconds, memory_bytes = json.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = ChatTemplate(source, [], dict(named_tokens), as_parts=False)
    sys.stdout.write(json.dumps(template.drops_strings()))


def _unusable(why: str) -> ModelConfigError:
    return ModelConfigError(
        f"the model's chat template (chat_template.jinja, or chat_template in "
        f"tokenizer_config.json) {why}; serve the model without it, or repair it"
    )
