"""An engine's side of the talk with the driver: a list of calls in, seconds and tokens out.

Only the standard library: each engine runs in an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Run = Callable[[Sequence[dict[str, Any]]], int]

USER = "<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def prompt(call: dict[str, Any], image: str = IMAGE) -> str:
    """A call's text as the chat template writes it, for engines that take whole prompts."""
    content = (image if call["image"] else "") + call["text"]
    return USER.format(content=content)


def options() -> dict[str, int]:
    """The settings that this run uses, of those that the engine's sweep tries."""
    return dict(json.loads(sys.argv[3]))


def serve(run: Run) -> None:
    """Answer each line of stdin on the descriptor that the command line names, until stdin ends.

    Args:
        run: answers calls (`text`, `num_output`, `image`: a file or None), all at once; returns
            how many tokens it answered.
    """
    with os.fdopen(int(sys.argv[2]), "w") as out:
        print("{}", file=out, flush=True)
        for line in sys.stdin:
            calls = json.loads(line)
            began = time.perf_counter()
            num_tokens = run(calls)
            seconds = time.perf_counter() - began
            print(json.dumps({"seconds": seconds, "tokens": num_tokens}), file=out, flush=True)
