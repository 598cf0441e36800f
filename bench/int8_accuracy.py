"""Accuracy with int8: answers to held-out questions of `shapes`, exact match.

    python bench/run.py int8_accuracy      python bench/int8_accuracy.py --questions 40

The model runner answers the same questions about held-out images greedily in float32, in bfloat16,
with `--weights=int8` and with `--kv-dtype=int8`. One JSON line each: the share of right answers,
and the share of answers with the tokens of float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("worker", "kernels", "tests", "examples/shapes")]

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
    "bfloat16, KV in int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
}
BATCH = 32
MOST_TOKENS = 32


def main() -> None:
    """Ask, and print one JSON line per kind of weights."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--questions", type=int, default=160)
    args = parser.parse_args()
    from worker.identity.questions import questions

    asked = [question for question in questions() if question.prepared_images][: args.questions]
    exact: list[list[int]] = []
    for name, options in KINDS.items():
        tokens = answers_of(runner_of(options), asked)
        exact = exact or tokens
        figures = {
            "bench": "int8_accuracy",
            "weights": name,
            "questions": len(asked),
            "right": share_right(asked, tokens),
            "same_tokens_as_float32": share(tokens, exact),
        }
        print(json.dumps(figures), flush=True)


def runner_of(options: dict[str, Any]) -> Any:
    """A runner of the model `shapes`."""
    from worker.identity.questions import SHAPES

    from vlm_worker.model.build import RunnerSettings, build_runner
    from vlm_worker.types import Stage

    return build_runner(RunnerSettings(SHAPES, tuple(Stage), kv_memory_bytes=1 << 28, **options))


def answers_of(runner: Any, asked: list[Any]) -> list[list[int]]:
    """Greedy tokens of every question, in batches."""
    from worker.identity.questions import SHAPES
    from worker.identity.stepper import Stepper

    eos = json.loads((SHAPES / "config.json").read_text()).get("eos_token_id", 2)
    tokens = []
    for first in range(0, len(asked), BATCH):
        stepper = Stepper(runner)
        together = [
            stepper.start(question, (), max_tokens=MOST_TOKENS)
            for question in asked[first : first + BATCH]
        ]
        stepper.generate(together, max_tokens=MOST_TOKENS, chunk=1024, eos=eos)
        tokens += [sequence.answer for sequence in together]
    return tokens


def share_right(asked: list[Any], tokens: list[list[int]]) -> float:
    """The share of right answers."""
    from shapes_vlm import heldout
    from tokenizers import Tokenizer
    from worker.identity.questions import SHAPES

    tokenizer = Tokenizer.from_file(str(SHAPES / "tokenizer.json"))
    texts = [heldout.normalise(tokenizer.decode(one)) for one in tokens]
    return share(texts, [heldout.normalise(question.right_answer) for question in asked])


def share(some: list[Any], others: list[Any]) -> float:
    """The share of equal pairs."""
    return round(sum(a == b for a, b in zip(some, others, strict=True)) / len(some), 4)


if __name__ == "__main__":
    main()
