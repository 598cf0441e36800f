"""The mixed trace: 16 concurrent requests, 8 with an image, against transformers' `generate`.

    python bench/run.py mixed_trace      python bench/mixed_trace.py --rounds 5 --threads 2

A round has 3,923 prompt tokens and 960 answer tokens (32 to 128 per request). Qwen2-VL with random
weights in bfloat16 (`random_vlm`); both sides run in turn (`sides`). No prompt or image repeats, so
caches have no effect.
"""

from __future__ import annotations

import json
import random

import random_vlm
from sides import Call, arguments, compare, read_bandwidth, start

NUM_REQUESTS = 16
GOAL = 0.45


def mixed_trace(round_number: int) -> list[Call]:
    """The 16 requests of one round: even ones have an image and short text."""
    rng = random.Random(1)
    calls = []
    for i in range(NUM_REQUESTS):
        has_image = i % 2 == 0
        num_words = rng.choice([16, 32, 64]) if has_image else rng.choice([64, 128, 256])
        num_output = rng.choice([32, 64, 96, 128])
        num_template = 21 if i < 3 else 20
        seed = round_number * 1000 + i
        calls.append(Call(num_words, has_image, num_output, seed, num_template))
    return calls


def main() -> None:
    """Compare, and print one JSON line."""
    args = arguments(__doc__).parse_args()
    with random_vlm.model_directory(args.model) as model_dir:
        children = start(args, model_dir)
        bandwidths = [read_bandwidth(args.threads)]
        (times,) = compare(children, [lambda number: [mixed_trace(number)]], args.rounds)
        bandwidths.append(read_bandwidth(args.threads))
        for child in children.values():
            child.close()
    figures = times.figures()
    line = {
        "bench": "mixed_trace",
        "rounds": args.rounds,
        "threads": args.threads,
        "options": args.options,
        "prompt_tokens": sum(len(call.token_ids()) for call in mixed_trace(0)),
        "output_tokens": sum(call.num_output for call in mixed_trace(0)),
        **figures,
        "read_gb_per_second": [round(value / 1e9, 1) for value in bandwidths],
        "goal": GOAL,
        "met": figures["ratio"] <= GOAL,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
