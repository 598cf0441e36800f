"""TTFT with cache hits, over HTTP, one request at a time.

    python bench/run.py cache            python bench/cache.py [--model DIR] [--rounds 15]

All prompts of a round have the same number of tokens. An image has 256 of them and is preceded by
seven tenths of the text. No text is repeated except as a prefix:

    text            text alone                                              goal
    new             a new image
    repeated        a cached image, after new text                          <= 1.05 x text
    text again      text with other last words                              <= 0.20 x text
    image again     new with other last words                               <= 0.20 x new

`vlm-worker serve` answers; its token cache is warm. Every round measures all of them. A figure is
the median of the ratios within a round. `cpu` is the same for the processor time of the server,
which other processes hardly affect. The models are `shapes`, for which HTTP takes most of the time,
and random weights of the same form with 8 layers of 512. `floor` is the share of an empty request
(two tokens of text) in the prompt that a row is compared with: no ratio can be lower.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import io
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from workers import free_port

ROOT = Path(__file__).parents[1]
SHAPES = ROOT / "examples" / "shapes" / "model"
WORDS = [f" {word}" for word in ("red", "blue", "circle", "shapes", "image", "picture", "color")]
SIDE, NUM_IMAGE_TOKENS = 448, 256 + 2  # with the tokens that open and close it
NUM_CHANGED = 4
START_SECONDS = 120.0
GOALS = {"repeated": 1.05, "text again": 0.20, "image again": 0.20}
COMPARED_WITH = {"repeated": "text", "text again": "text", "image again": "new"}


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="one that `serve` takes; default: both")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved repetitions")
    parser.add_argument("--tokens", type=int, default=1000, help="of every prompt")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = (
            [args.model.resolve()] if args.model else [SHAPES, make_larger(Path(folder) / "larger")]
        )
        for model in models:
            with serving(model, device=args.device) as server:
                figures = measure(server, num_rounds=args.rounds, num_tokens=args.tokens)
            name = model.parent.name if model.name == "model" else model.name
            print(json.dumps({"bench": "cache", "model": name, **figures}), flush=True)


def make_larger(directory: Path) -> Path:
    """A model of random weights: 8 text layers of 512, 6 vision layers of 384."""
    import torch
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

    shutil.copytree(SHAPES, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    fields = json.loads((SHAPES / "config.json").read_text())
    text, vision = fields["text_config"], fields["vision_config"]
    text |= {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
    text |= {"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8}
    vision |= {"hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "depth": 6}
    vision |= {"out_hidden_size": 512, "fullatt_block_indexes": [2, 5]}
    fields["dtype"] = "float32"
    torch.manual_seed(0)
    config = modeling.Qwen2_5_VLConfig.from_dict(fields)
    modeling.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    return directory


@dataclasses.dataclass(frozen=True)
class Server:
    """`vlm-worker serve`, and a client of it."""

    client: httpx.Client
    pid: int

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far, as Linux counts it."""
        times = (file.read_text() for file in Path(f"/proc/{self.pid}/task").glob("*/schedstat"))
        return sum(int(line.split()[0]) for line in times) / 1e9


@contextlib.contextmanager
def serving(model: Path, *, device: str) -> Iterator[Server]:
    """A server that is ready."""
    port = free_port()
    command = [sys.executable, "-m", "vlm_worker", "serve", str(model), f"--port={port}"]
    command += ["--served-name=m", f"--device={device}"]
    running = subprocess.Popen(command, cwd=ROOT / "worker", stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + START_SECONDS
            while not _is_ready(client):
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.2)  # noqa: TID251  another process, and not a test
            yield Server(client, running.pid)
    finally:
        running.terminate()
        running.wait()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


class Prompts:
    """Contents of messages, all of `num_tokens` with the words around them."""

    def __init__(self, *, num_tokens: int, overhead: int = 0) -> None:
        self._num_words = num_tokens - overhead
        self._rng = random.Random(0)

    def text(self) -> list[dict[str, Any]]:
        """Text alone."""
        return [self._words(self._num_words - NUM_CHANGED), self._words(NUM_CHANGED)]

    def about(self, url: str) -> list[dict[str, Any]]:
        """Text, an image, text."""
        num_words = self._num_words - NUM_IMAGE_TOKENS - NUM_CHANGED
        before = num_words * 7 // 10
        image = {"type": "image_url", "image_url": {"url": url}}
        after = self._words(num_words - before)
        return [self._words(before), image, after, self._words(NUM_CHANGED)]

    def again(self, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same with other last words."""
        return [*content[:-1], self._words(NUM_CHANGED)]

    def image(self) -> str:
        """A new image as a data URL: a JPEG of coarse noise."""
        pixels = np.frombuffer(self._rng.randbytes(56 * 56 * 3), np.uint8).reshape(56, 56, 3)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((SIDE, SIDE)).save(file, "JPEG", quality=90)
        return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()

    def _words(self, count: int) -> dict[str, Any]:
        return {"type": "text", "text": "".join(self._rng.choices(WORDS, k=count))}


def body(content: list[dict[str, Any]]) -> bytes:
    """A request for one token."""
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()


def send(server: Server, data: bytes) -> httpx.Response:
    """Its response; raises if it is an error."""
    headers = {"Content-Type": "application/json"}
    response = server.client.post("/v1/chat/completions", content=data, headers=headers)
    assert response.status_code == 200, response.text
    return response


def ask(server: Server, content: list[dict[str, Any]]) -> tuple[float, float, int]:
    """Seconds to an answer of one token, the server's CPU seconds, and the tokens of the prompt."""
    data = body(content)
    cpu, started = server.cpu_seconds(), time.perf_counter()
    response = send(server, data)
    seconds = time.perf_counter() - started
    cpu = server.cpu_seconds() - cpu
    return seconds, cpu, response.json()["usage"]["prompt_tokens"]


def measure(server: Server, *, num_rounds: int, num_tokens: int) -> dict[str, Any]:
    """Medians in milliseconds, and ratios within rounds."""
    *_, overhead = ask(server, [{"type": "text", "text": WORDS[0]}])
    prompts = Prompts(num_tokens=num_tokens, overhead=overhead - 1)
    known = prompts.image()
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for number in range(num_rounds + 2):
        text, new = prompts.text(), prompts.about(prompts.image())
        contents = {
            "empty": [{"type": "text", "text": WORDS[number % 7] + WORDS[number % 5]}],
            "text": text,
            "repeated": prompts.about(known),
            "new": new,
            "text again": prompts.again(text),
            "image again": prompts.again(new),
        }
        for kind, content in contents.items():
            taken, used, counted = ask(server, content)
            assert kind == "empty" or counted == num_tokens, (kind, counted)
            if number >= 2:  # the first rounds warm up, and cache `known`
                seconds.setdefault(kind, []).append(taken)
                cpu.setdefault(kind, []).append(used)
    figures: dict[str, Any] = {
        "tokens": num_tokens,
        "rounds": num_rounds,
        "ms": {kind: round(1000 * statistics.median(s), 1) for kind, s in seconds.items()},
    }
    for kind, goal in GOALS.items():
        base = seconds[COMPARED_WITH[kind]]
        ratio = _median_ratio(seconds[kind], base)
        figures[kind] = {
            "ratio": ratio,
            "goal": goal,
            "met": ratio <= goal,
            "floor": _median_ratio(seconds["empty"], base),
            "cpu": _median_ratio(cpu[kind], cpu[COMPARED_WITH[kind]]),
        }
    return figures


def _median_ratio(ours: list[float], base: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, base, strict=True)), 3)


if __name__ == "__main__":
    main()
