"""Steps of 64 constrained rows against free ones, and the time of their masks.

    python bench/constrained.py [--rounds N]        a JSON line per schema, in about three minutes

The model is `random_vlm`; its 32,000 tokens are trained here on the repository's text. Each row
follows a document of its schema from a place of its own, a token per step, so no mask is filled
twice. Free steps, constrained ones and masks alone alternate. `mask_share` is the CPU time of all
64 masks divided by that of a free step, `step_ratio` the time of a constrained step divided by that
of a free one: masks are filled while the model computes. Figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import decode
import numpy as np
import random_vlm

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("worker", "kernels")]

BATCH, CONTEXT, EOS = 64, 120, 2
TEXT = "Some text with spaces, ünïcode and numbers 123."


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """An object with exactly these properties."""
    required = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def nested(depth: int, width: int) -> dict[str, Any]:
    """Objects in objects; strings at the bottom."""
    if depth == 0:
        return {"type": "string", "maxLength": 64}
    return closed({f"field_{depth}_{i}": nested(depth - 1, width) for i in range(width)})


def filled(schema: dict[str, Any]) -> Any:
    """A value of `nested`."""
    if "properties" not in schema:
        return TEXT
    return {name: filled(part) for name, part in schema["properties"].items()}


MONEY = closed(
    {"amount": {"type": "number"}, "currency": {"type": "string", "pattern": "^[A-Z]{3}$"}}
)
VAT = {"anyOf": [{"type": "null"}, MONEY]}
LINES = {
    "type": "array",
    "items": closed({"text": {"type": "string"}, "total": MONEY, "vat": VAT}),
}
INVOICE = closed({"date": {"type": "string", "format": "date"}, "lines": LINES})
SCREWS = {"text": "Screws, 4x40 mm", "total": {"amount": 12.5, "currency": "EUR"}, "vat": None}
BIG = nested(3, 5)
CASES: dict[str, tuple[Any, Any]] = {
    "json_object": (
        {"type": "object"},
        {"a": [1, 2.5, True], **{f"k {i}": TEXT for i in range(9)}},
    ),
    "invoice": (INVOICE, {"date": "2026-11-23", "lines": 8 * [SCREWS]}),
    "125 strings": (BIG, filled(BIG)),
}


def main() -> None:
    """Measure, and print one JSON line per schema."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    tokenizer = trained()
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as made:
        runner = decode.build(random_vlm.make_model(Path(made)), args.threads, "auto")
    for name, (schema, document) in CASES.items():
        line = measure(runner, tokenizer, schema, document, rounds=args.rounds)
        line = {"bench": "constrained", "schema": name, "rows": BATCH} | line
        print(json.dumps(line | {"threads": args.threads}), flush=True)


def trained() -> Any:
    """A byte-level tokenizer of 32,000 tokens, from the text of this repository."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = "*.py", "*.md", "*.h", "*.cpp", "*.yaml"
    found = (path for end in ends for path in ROOT.rglob(end) if ".venv" not in path.parts)
    files = list(map(str, found))
    special = [AddedToken(text, special=True) for text in ("<s>", "<pad>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=random_vlm.FULL.vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(files, trainer)
    return tokenizer


def measure(
    runner: Any, tokenizer: Any, schema: Any, document: Any, *, rounds: int
) -> dict[str, Any]:
    """The figures of one schema."""
    from vlm_worker.core.grammars import Vocabulary
    from vlm_worker.core.step_values import ConstrainedRow
    from vlm_worker.engine.constraints import Constraints
    from vlm_worker.types import Request, RequestKey, SamplingParams

    words = Vocabulary(tokenizer, vocab_size=runner.vocab_size, eos_token_ids=(EOS,))
    constraints = Constraints(words)
    grammar = json.dumps({"grammars": [{"json_schema": schema}]}).encode()
    answer = np.array(tokenizer.encode(json.dumps(document, ensure_ascii=False)).ids, np.int32)
    starts = np.linspace(0, max(len(answer) - rounds - 2, 0), BATCH).astype(int)
    request = Request(RequestKey("r", 0), (1,), 1, SamplingParams(max_tokens=1, grammar=grammar))
    matchers, alone = ([constraints.matcher(request) for _ in range(BATCH)] for _ in range(2))
    free = decode.step_inputs(runner, batch=BATCH, num_new=1, context=CONTEXT)
    times: dict[str, list[float]] = {"free": [], "free_cpu": [], "constrained": [], "masks_cpu": []}
    for number in range(-1, rounds):
        at = np.minimum(starts + number + 1, len(answer))

        def rows(matchers: list[Any], at: np.ndarray = at) -> list[ConstrainedRow]:
            each = enumerate(zip(matchers, at, strict=True))
            return [ConstrainedRow(row, matcher, answer[:end]) for row, (matcher, end) in each]

        with timed(times["free"], time.perf_counter), timed(times["free_cpu"], time.process_time):
            runner.execute(free)
        with timed(times["constrained"], time.perf_counter):
            masks = constraints.start_masks(rows(matchers), BATCH)
            sampling = dataclasses.replace(free.sampling, masks=masks)
            output = runner.execute(dataclasses.replace(free, sampling=sampling))
        with timed(times["masks_cpu"], time.process_time):
            constraints.start_masks(rows(alone), BATCH).words()
        assert (output.token_ids >= 0).all(), "a row has no token"
    # the first round lets the matchers follow to their places
    times = {name: values[1:] for name, values in times.items()}
    compile_seconds = constraints.compile_seconds / constraints.num_compiled
    return figures(times, num_tokens=len(answer), compile_seconds=compile_seconds)


def figures(
    times: dict[str, list[float]], *, num_tokens: int, compile_seconds: float
) -> dict[str, Any]:
    """Medians in milliseconds, and ratios of medians and of the pairs of each round."""
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    ratios = [a / b for a, b in zip(times["constrained"], times["free"], strict=True)]
    return {
        "document_tokens": num_tokens,
        **{f"{name}_ms": round(value, 2) for name, value in medians.items()},
        "mask_share": round(medians["masks_cpu"] / medians["free_cpu"], 4),
        "step_ratio": round(statistics.median(ratios), 3),
        "compile_ms": round(compile_seconds * 1e3, 2),
    }


@contextlib.contextmanager
def timed(values: list[float], clock: Callable[[], float]) -> Iterator[None]:
    """Append the seconds of the block."""
    before = clock()
    yield
    values.append(clock() - before)


if __name__ == "__main__":
    main()
