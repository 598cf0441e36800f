"""Prefill and the vision tower against the bfloat16 peak of the machine.

    python bench/run.py prefill      python bench/prefill.py --rounds 9 --model DIR

    prefill.text      one prompt of 575 tokens, up to its first token
    prefill.encode    one image of 448 x 448: 1,024 patches, 256 tokens

The limit is their multiplications (attention over attended keys included) at the peak of a 2048^3
product, probed in every round. It runs the model runner alone with Qwen2-VL of random weights
(`random_vlm`). One JSON line each; `int8_ratio` is the time with `--weights=int8` divided by that
in bfloat16.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import random_vlm
from decode import build, step_inputs
from probes import Rounds, arguments
from sides import GRID, PATCH_DIM

PROMPT = 575
GOALS = {"text": 0.75, "encode": 0.80}


def main() -> None:
    """Measure, and print one JSON line per case."""
    args = arguments(__doc__)
    cases: dict[tuple[str, str], Any] = {}
    with random_vlm.model_directory(args.model) as model_dir:
        for weights in ("auto", "int8"):
            runner = build(model_dir, args.threads, weights, "encoder", "prefill")
            step = step_inputs(runner, batch=1, num_new=PROMPT, context=0)
            cases["text", weights] = functools.partial(runner.execute, step)
            cases["encode", weights] = functools.partial(runner.encode, [image()])
    rounds = Rounds(cases, threads=args.threads)
    rounds.run(args.rounds)
    for name, operations in (("text", text_operations()), ("encode", encode_operations())):
        line = {
            "bench": f"prefill.{name}",
            "threads": args.threads,
            "gflop": round(operations / 1e9),
            "int8_ratio": rounds.against((name, "int8"), (name, "auto")),
        }
        figures = rounds.figures(
            (name, "auto"), num_bytes=0, operations=operations, goal=GOALS[name]
        )
        print(json.dumps(line | figures), flush=True)


def image() -> Any:
    """A prepared image of noise."""
    from vlm_worker.types import PreparedImage

    rng = np.random.default_rng(0)
    patches = rng.standard_normal((GRID[1] * GRID[2], PATCH_DIM), dtype=np.float32)
    data = patches.reshape(-1).data
    return PreparedImage(bytes(32), GRID, random_vlm.NUM_IMAGE_TOKENS, data)


def text_operations(size: random_vlm.Size = random_vlm.FULL, num_tokens: int = PROMPT) -> float:
    """Multiplications and additions of a prompt with causal attention.

    In the last layer all but the last token are keys and values alone.
    """
    width = size.heads * 128
    keys = size.hidden * 2 * size.kv_heads * 128
    others = 2 * width * size.hidden + 3 * size.hidden * size.mlp
    seen = num_tokens * (num_tokens + 1) / 2
    layers = (size.layers - 1) * (2 * (keys + others) * num_tokens + 4 * width * seen)
    last = 2 * (keys * num_tokens + others) + 4 * width * num_tokens
    return layers + last + 2 * size.vocabulary * size.hidden


def encode_operations(size: random_vlm.Size = random_vlm.FULL) -> float:
    """Those of an image; every patch attends to all."""
    num_patches, width = GRID[1] * GRID[2], size.vision_width
    layer = 2 * 12 * width**2 * num_patches + 4 * width * num_patches**2
    merged = 4 * width
    merger = 2 * (merged**2 + merged * size.hidden) * num_patches / 4
    return size.vision_layers * layer + 2 * PATCH_DIM * width * num_patches + merger


if __name__ == "__main__":
    main()
