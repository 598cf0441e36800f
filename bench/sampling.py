"""The time to sample a batch of rows, against transformers' processors.

    python bench/sampling.py        a JSON line for each size, in about two minutes

`torch` is the definition without the kernel. `peer` is `generate()`: its processors, softmax and
one multinomial for all rows, which cannot give each row its own seed. All run in turn on one
thread, on bfloat16 logits, which both others convert to float32. Figures are medians and ratios of
medians. There is no peer if a round would take seconds.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vlm_kernels import sample_tokens
from vlm_kernels.sampling import sample_reference
from vlm_worker.core.step_values import EditedRow, LogitEdits, SampleParams, sampling_columns
from vlm_worker.types import SamplingParams

BATCHES, VOCABULARIES, ANSWER, ROUNDS = (1, 16, 256), (32_000, 152_000), 200, 5
MOST_OF_PEER = 256 * 32_000
"""Maximum logits of a batch for the peer; sorting more takes seconds."""

CASES = {
    "greedy": SamplingParams(1),
    "temperature": SamplingParams(1, temperature=0.7),
    "top-k 50": SamplingParams(1, temperature=0.7, top_k=50),
    "top-p 0.9": SamplingParams(1, temperature=0.7, top_p=0.9),
    "top-k 20, top-p 0.8": SamplingParams(1, temperature=0.7, top_k=20, top_p=0.8),
    "min-p 0.05": SamplingParams(1, temperature=0.7, min_p=0.05),
    "repetition penalty": SamplingParams(1, repetition_penalty=1.1),
}


def params_of(sampling: SamplingParams, token_ids: np.ndarray) -> SampleParams:
    """The same parameters for every row, each with its own answer tokens `[R, ANSWER]`."""
    num_rows, edits = len(token_ids), LogitEdits.of(sampling)
    columns = sampling_columns(num_rows)
    for name, column in columns.items():
        column[:] = getattr(sampling, name)
    columns["seed"][:] = np.arange(num_rows)
    return SampleParams(
        greedy=sampling.temperature == 0,
        columns=columns,
        index=np.arange(num_rows, dtype=np.int64),
        edited=tuple(EditedRow(r, edits, token_ids[r], 0) for r in range(num_rows) if edits),
    )


def peer_of(sampling: SamplingParams, token_ids: np.ndarray) -> Callable[[torch.Tensor], object]:
    """The same with transformers."""
    processors, known = LogitsProcessorList(), torch.from_numpy(token_ids.astype(np.int64))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0:
        return lambda logits: processors(known, logits.clone()).argmax(dim=-1)
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))

    def draw(logits: torch.Tensor) -> object:
        probabilities = torch.softmax(processors(known, logits.clone()), dim=-1)
        return torch.multinomial(probabilities, num_samples=1)

    return draw


def measure(sampling: SamplingParams, logits: torch.Tensor) -> dict[str, float | None]:
    """Milliseconds of a batch, and our time divided by that of both others."""
    num_rows, vocabulary = logits.shape
    token_ids = np.random.default_rng(0).integers(0, vocabulary, (num_rows, ANSWER), np.int32)
    params, peer = params_of(sampling, token_ids), peer_of(sampling, token_ids)
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: sample_tokens(logits, params),
        "torch": lambda: sample_reference(logits, params),
    }
    if logits.numel() <= MOST_OF_PEER:
        works["peer"] = lambda: peer(logits.float())
    times: dict[str, list[float]] = {name: [] for name in works}
    for _, (name, work) in itertools.product(range(ROUNDS + 1), works.items()):
        started = time.perf_counter()
        work()
        times[name].append(time.perf_counter() - started)
    ms = {name: statistics.median(one[1:]) * 1000 for name, one in times.items()}
    return {
        "ms": round(ms["ours"], 3),
        "torch_ms": round(ms["torch"], 3),
        "torch_ratio": round(ms["ours"] / ms["torch"], 3),
        "peer_ms": round(ms["peer"], 3) if "peer" in ms else None,
        "ratio": round(ms["ours"] / ms["peer"], 3) if "peer" in ms else None,
    }


def main() -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for vocabulary, num_rows in itertools.product(VOCABULARIES, BATCHES):
        logits = (torch.randn(num_rows, vocabulary) * 4).bfloat16()
        cases = {name: measure(sampling, logits) for name, sampling in CASES.items()}
        line = {"bench": "sampling", "rows": num_rows, "vocabulary": vocabulary, "cases": cases}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
