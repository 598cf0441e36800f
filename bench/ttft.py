"""TTFT of an image request by stage, changing one thing at a time, against its operations.

    python bench/run.py ttft             python bench/ttft.py [--rounds 5] [--model DIR]

`vlm-worker serve` over HTTP with Qwen2-VL of random weights (`random_vlm`), one request at a time,
one token per answer. The prompt is 16 words, an image, 16 words; each other row changes one thing:

    new image              448 x 448, 256 tokens: the base
    text alone             as many tokens, all of them words
    fewer tokens           the same image at 224 x 224: 64 tokens
    cached image           other words around it: the embedding is cached
    same beginning         only the last 4 words are new: KV is cached too

`against_limit` is TTFT divided by the time of the multiplications of image and prompt at the
bfloat16 peak that is probed in the same rounds. `stages` are medians of those that the gateway
reports, in milliseconds.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cache import Server, body, send, serving
from PIL import Image
from prefill import encode_operations, text_operations
from probes import Rounds, arguments

sys.path.append(str(Path(__file__).parent / "peers"))

from calls import WORDS
from peer_model import make

SIDE, FEW_SIDE = 448, 224
WORDS_AROUND, NUM_CHANGED = 16, 4
NUM_AHEAD = 128
GOAL, GOAL_SEEN = 1.25, 1.05
NEW, SEEN, TEXT = "new image", "cached image", "text alone"


def main() -> None:
    """Measure, and print one JSON line per case."""
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as made:
        model = make((args.model or Path(made) / "model").resolve())
        with serving(model, device="cpu") as server:
            asking = Asking(server)
            rounds = Rounds(asking.cases(), threads=args.threads)
            rounds.run(args.rounds)
    for name, kept in asking.kept.items():
        print(json.dumps({"bench": "ttft", "what": name, **figures(name, kept, rounds)}))


class Asking:
    """Creates and sends requests of every case, and records the reported stages."""

    def __init__(self, server: Server) -> None:
        self.kept: dict[str, list[dict[str, Any]]] = {}
        self._server = server
        self._words = WORDS.read_text().split()
        self._random = random.Random(0)
        self._known = self._image(SIDE)
        self._begun = self._prompt(self._known)
        self._num_tokens = 0

    def cases(self) -> dict[Any, Callable[[], Any]]:
        """Cases by name; the first call of each fills the server's caches."""
        self._num_tokens = self._ask(self._begun)["usage"]["prompt_tokens"]
        prompts: dict[str, Callable[[], list[dict[str, Any]]]] = {
            TEXT: self._text,
            NEW: lambda: self._prompt(self._image(SIDE)),
            "fewer tokens": lambda: self._prompt(self._image(FEW_SIDE)),
            SEEN: lambda: self._prompt(self._known),
            "same beginning": lambda: [*self._begun[:-1], self._some(NUM_CHANGED)],
        }
        return {
            name: functools.partial(self._run, name, bodies(make)) for name, make in prompts.items()
        }

    def _run(self, name: str, of_case: Iterator[bytes]) -> None:
        self.kept.setdefault(name, []).append(send(self._server, next(of_case)).json())

    def _ask(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(send(self._server, body(content)).json())

    def _prompt(self, url: str) -> list[dict[str, Any]]:
        image = {"type": "image_url", "image_url": {"url": url}}
        after = self._some(WORDS_AROUND - NUM_CHANGED)
        return [self._some(WORDS_AROUND), image, after, self._some(NUM_CHANGED)]

    def _text(self) -> list[dict[str, Any]]:
        """Text with as many tokens as a prompt with an image."""
        around = self._num_tokens - 2 * WORDS_AROUND
        return [self._some(2 * WORDS_AROUND), self._some(around - self._template)]

    @functools.cached_property
    def _template(self) -> int:
        """Tokens of a message around its words."""
        return int(self._ask([self._some(1)])["usage"]["prompt_tokens"]) - 1

    def _some(self, count: int) -> dict[str, Any]:
        words = self._random.choices(self._words, k=count)
        return {"type": "text", "text": "".join(f" {word}" for word in words)}

    def _image(self, side: int) -> str:
        """Noise in squares of 8 pixels, as a JPEG."""
        small = np.frombuffer(self._random.randbytes(3 * (side // 8) ** 2), np.uint8)
        image = Image.fromarray(small.reshape(side // 8, side // 8, 3)).resize((side, side))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def bodies(make: Callable[[], list[dict[str, Any]]]) -> Iterator[bytes]:
    """Endless requests. The images of a run are made in advance, outside the measurement."""
    while True:
        yield from [body(make()) for _ in range(NUM_AHEAD)]


def figures(name: str, kept: list[dict[str, Any]], rounds: Rounds) -> dict[str, Any]:
    """One line of the report."""
    num_tokens = kept[-1]["usage"]["prompt_tokens"]
    operations = text_operations(num_tokens=num_tokens) + (name == NEW) * encode_operations()
    found = rounds.figures(name, num_bytes=0, operations=operations, goal=1 / GOAL)
    timings = [answer["timing"]["stages"] for answer in kept[1:]]
    names = [stage for stage in timings[0] if any(one[stage] > 0 for one in timings)]
    stages = {stage: round(statistics.median(one[stage] for one in timings), 2) for stage in names}
    line = {
        "prompt_tokens": num_tokens,
        "ms": found["ms"],
        "stages": stages,
        "against_text": rounds.against(name, TEXT),
        "peak_gflop_per_second": found["peak_gflop_per_second"],
        "probes_moved": found["probes_moved"],
    }
    if name == NEW:
        line |= {"against_limit": round(1 / found["of_limit"], 3)}
        line |= {"gflop": round(operations / 1e9), "goal": GOAL, "met": found["met"]}
    if name == SEEN:
        line |= {"goal": GOAL_SEEN, "met": line["against_text"] <= GOAL_SEEN}
    return line


if __name__ == "__main__":
    main()
