"""Decode and prefill separately, against transformers' `generate`, with the model of `mixed_trace`.

    python bench/run.py generate         python bench/generate.py --rounds 5 --threads 2

    generate.decode     64 tokens of 1, 4 and 16 concurrent answers: the time for 65 less that for 1
    generate.prefill    one prompt of 575 tokens, up to its first token

One JSON line per case, in tokens per second. Both sides run in turn (`sides`); no prompt repeats.
"""

from __future__ import annotations

import json
import statistics

import random_vlm
from sides import NAMES, Call, arguments, compare, start

BATCHES = (1, 4, 16)
NUM_DECODED = 64
NUM_WORDS = 64
PREFILL_TOKENS = 575


def decode_batches(round_number: int, batch: int) -> list[list[Call]]:
    """The prompts of one round with 1 token each, and others of the same length with 65."""
    first = round_number * 10_000 + batch * 100
    return [
        [Call(NUM_WORDS, False, num_output, first + offset + i) for i in range(batch)]
        for offset, num_output in ((0, 1), (50, 1 + NUM_DECODED))
    ]


def prefill_batch(round_number: int) -> list[list[Call]]:
    """One long prompt."""
    return [[Call(PREFILL_TOKENS - 20, False, 1, round_number * 10_000 + 9_999)]]


def main() -> None:
    """Compare every case, and print its line."""
    args = arguments(__doc__).parse_args()
    cases = [lambda number, batch=batch: decode_batches(number, batch) for batch in BATCHES]
    with random_vlm.model_directory(args.model) as model_dir:
        children = start(args, model_dir)
        times = compare(children, [*cases, prefill_batch], args.rounds)
        for child in children.values():
            child.close()
    names = [("decode", batch, batch * NUM_DECODED) for batch in BATCHES]
    names.append(("prefill", 1, PREFILL_TOKENS))
    for (name, batch, num_tokens), case in zip(names, times, strict=True):
        speeds = {
            f"{side}_tokens_per_second": round(num_tokens / statistics.median(case.wall[side]), 1)
            for side in NAMES
        }
        line = {"bench": f"generate.{name}", "batch": batch, "threads": args.threads, **speeds}
        print(json.dumps({**line, **case.figures()}), flush=True)


if __name__ == "__main__":
    main()
