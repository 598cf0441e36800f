"""What the scripts of Python clients share: one JSON line per call, and the facts of the image.

A script runs in its client's own environment, so this file imports the standard library alone.
"""

from __future__ import annotations

import base64
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path

URL = os.environ["BASE_URL"]
"""Of the gateway, with `/v1`."""

MODEL = os.environ["MODEL"]
IMAGE = Path(os.environ["IMAGE"])
IMAGE_URL = "data:image/png;base64," + base64.b64encode(IMAGE.read_bytes()).decode()
QUESTION, ANSWER = "What shape is yellow?", "square"

PARTS = [
    {"type": "image_url", "image_url": {"url": IMAGE_URL}},
    {"type": "text", "text": QUESTION},
]


def call(name: str) -> Callable[[Callable[[], None]], None]:
    """Run the decorated function at once, and print whether it raised."""

    def run(function: Callable[[], None]) -> None:
        error = None
        try:
            function()
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"[:300]
        print(json.dumps({"call": name, "error": error}), flush=True)

    return run
