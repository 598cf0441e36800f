"""Time between tokens by concurrency, and KV by image resolution.

    python bench/run.py curves           python bench/curves.py [--tokens 24] [--threads 2]

    curves.itl   gaps between tokens of 1 to 16 concurrent requests with 0 to 256 visual tokens.
                 `p50` is a decode step; `max` contains a step that also computes a prompt
    curves.kv    KV bytes of a request with one square image after its first token, measured and by
                 formula: tokens, rounded up to blocks, times bytes per token

Small random Qwen2-VL (`random_vlm`), bfloat16. One JSON line per point, about a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import random_vlm
from own_engine import ImageInput, OwnEngine, Prompt

CONCURRENCY = (1, 2, 4, 8, 16)
VISUAL_TOKENS = (0, 64, 256)
SIDES = (112, 224, 448, 672, 896)
NUM_WORDS = 32
PIXELS_OF_TOKEN = 28
PATCH_DIM = 3 * 2 * 14 * 14

_seeds = itertools.count(1)


def prompt_of(side: int, num_output: int, *, num_words: int = NUM_WORDS) -> Prompt:
    """A new prompt with a new square image of `side` pixels; 0: no image."""
    rng = np.random.default_rng(next(_seeds))
    words = rng.integers(random_vlm.FIRST_WORD, random_vlm.LAST_WORD, num_words).tolist()
    if not side:
        return Prompt(words, num_output)
    rows, num_tokens = side // 14, (side // PIXELS_OF_TOKEN) ** 2
    patches = rng.standard_normal((rows * rows, PATCH_DIM), dtype=np.float32)
    key = int(rng.integers(1 << 62))
    image = ImageInput(key, (1, rows, rows), num_tokens, patches)
    placeholders = [random_vlm.IMAGE_TOKEN] * num_tokens
    token_ids = [random_vlm.VISION_START, *placeholders, random_vlm.VISION_END, *words]
    return Prompt(token_ids, num_output, image, offset=1)


def itl_points(engine: OwnEngine, num_output: int) -> Iterator[dict[str, Any]]:
    """Gaps between tokens, in milliseconds."""
    for visual_tokens in VISUAL_TOKENS:
        side = round(visual_tokens**0.5) * PIXELS_OF_TOKEN
        for concurrency in CONCURRENCY:
            prompts = [prompt_of(side, num_output) for _ in range(concurrency)]
            answers = engine.answer(prompts)
            gaps = [b - a for times in answers for a, b in itertools.pairwise(times)]
            yield {
                "bench": "curves.itl",
                "concurrency": concurrency,
                "visual_tokens": visual_tokens,
                "p50_ms": round(statistics.median(gaps) * 1e3, 2),
                "p99_ms": round(float(np.quantile(gaps, 0.99)) * 1e3, 2),
                "max_ms": round(max(gaps) * 1e3, 2),
            }


def kv_points(engine: OwnEngine) -> Iterator[dict[str, Any]]:
    """KV of one request, held after its first token."""
    layout = engine.runner.kv_layout
    assert layout is not None
    for side in SIDES:
        prompt = prompt_of(side, 2)
        num_blocks = -(-len(prompt.token_ids) // layout.block_size)
        yield {
            "bench": "curves.kv",
            "side_pixels": side,
            "prompt_tokens": len(prompt.token_ids),
            "kv_bytes": engine.held_kv_bytes(prompt),
            "formula_bytes": num_blocks * layout.block_bytes,
        }


def main() -> None:
    """Print every point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as directory:
        model_dir = random_vlm.make_model(Path(directory), random_vlm.SMALL, max_side=max(SIDES))
        engine = OwnEngine(model_dir, threads=args.threads)
        engine.answer([prompt_of(224, 2)])  # warm-up
        for point in (*itl_points(engine, args.tokens), *kv_points(engine)):
            print(json.dumps(point), flush=True)
        engine.close()


if __name__ == "__main__":
    main()
