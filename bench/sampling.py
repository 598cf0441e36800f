"""What choosing tokens costs beside the model: a batch of rows, against transformers' processors.

    python bench/sampling.py        one JSON object on stdout, in about a minute

`peer` is how `generate()` draws: its own processors, softmax, one multinomial for all rows (which
cannot give each row a seed of its own). Both run in interleaved rounds on one thread; medians.
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

from vlm_worker.core.inputs import EditedRow, LogitEdits, SampleParams
from vlm_worker.model.sampler import sample
from vlm_worker.types import SamplingParams

ROWS, VOCABULARY, ANSWER, ROUNDS = 256, 32_000, 200, 5
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
    """The same sampling for every row, each after tokens of its own."""
    ones, edits = np.ones(ROWS), LogitEdits.of(sampling)
    return SampleParams(
        greedy=sampling.temperature == 0,
        temperature=(ones * sampling.temperature).astype(np.float32),
        top_p=(ones * sampling.top_p).astype(np.float32),
        top_k=(ones * sampling.top_k).astype(np.int32),
        min_p=(ones * sampling.min_p).astype(np.float32),
        seed=np.arange(ROWS, dtype=np.uint64),
        index=np.arange(ROWS, dtype=np.int64),
        edited=tuple(EditedRow(r, edits, token_ids[r], 0) for r in range(ROWS) if edits),
    )


def peer_of(sampling: SamplingParams, token_ids: np.ndarray) -> Callable[[torch.Tensor], object]:
    """The same by transformers."""
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


def measure(sampling: SamplingParams, logits: torch.Tensor) -> dict[str, float]:
    """Milliseconds of a batch, ours and the peer's, and their ratio."""
    token_ids = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, ANSWER), np.int32)
    params, peer = params_of(sampling, token_ids), peer_of(sampling, token_ids)
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _, name in itertools.product(range(ROUNDS + 1), times):
        started = time.perf_counter()
        if name == "ours":
            sample(logits, params)
        else:
            peer(logits)
        times[name].append(time.perf_counter() - started)
    ours, theirs = (statistics.median(times[name][1:]) * 1000 for name in times)
    return {"ms": round(ours, 1), "peer_ms": round(theirs, 1), "ratio": round(ours / theirs, 3)}


def main() -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCABULARY) * 4
    cases = {name: measure(sampling, logits) for name, sampling in CASES.items()}
    print(json.dumps({"rows": ROWS, "vocabulary": VOCABULARY, "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
