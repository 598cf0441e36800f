"""Continuous batching and chunked prefill against static batching and whole prompts.

    python bench/run.py batching         python bench/batching.py [--rounds 3]

    batching.trace   40 requests, a third with an image, at random; answers of 8 to 128 tokens.
                     `continuous`: a request joins the next step. `static`: requests that arrive
                     during a batch form the next one, of at most 16
    batching.chunks  a prompt of 2,000 words arrives while another request decodes. One row per
                     chunk size: the longest gap of the answer, and the TTFT of the prompt

Small random Qwen2-VL (`random_vlm`), bfloat16. Rounds alternate; the first is a warm-up. Latency is
from arrival to the last token, over all requests of all rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import random_vlm
from curves import prompt_of
from own_engine import OwnEngine, Prompt

NUM_REQUESTS, MOST_TOGETHER = 40, 16
REQUESTS_PER_SECOND = 16.0
SIDE = 224
PERCENTS = (10, 25, 50, 75, 90, 95)
CHUNKS = (2048, 512, 128)
LONG_WORDS, SHORT_TOKENS, LONG_AFTER = 2000, 96, 0.2


def main() -> None:
    """Print one JSON line for each way and each size of chunks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as directory:
        model_dir = random_vlm.make_model(Path(directory), random_vlm.SMALL)
        engines = {
            size: OwnEngine(model_dir, threads=args.threads, max_batched_tokens=size)
            for size in CHUNKS
        }
        lines = [*traces(engines[CHUNKS[0]], args.rounds), *chunks(engines, args.rounds)]
        for engine in engines.values():
            engine.close()
    for line in lines:
        print(json.dumps(line), flush=True)


# ---- static against continuous -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Prompts with their arrival times in seconds."""

    prompts: Sequence[Prompt]
    arrivals: Sequence[float]


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """The responses to one trace: its start, and the time of each token."""

    began: float
    times: Sequence[Sequence[float]]


def traces(engine: OwnEngine, num_rounds: int) -> list[dict[str, Any]]:
    """Alternates between both ways."""
    ways = {"continuous": continuous, "static": static}
    kept: dict[str, list[tuple[Trace, Answers]]] = {name: [] for name in ways}
    for number in range(num_rounds + 1):
        for name, answer in ways.items():
            trace = new_trace()
            answers = answer(engine, trace)
            if number:
                kept[name].append((trace, answers))
    return [
        {"bench": "batching.trace", "what": name, "requests": NUM_REQUESTS, **figures(runs)}
        for name, runs in kept.items()
    ]


def new_trace() -> Trace:
    """The same lengths and arrivals each time, other words and images."""
    rng = random.Random(3)
    arrivals = itertools.accumulate(
        rng.expovariate(REQUESTS_PER_SECOND) for _ in range(NUM_REQUESTS)
    )
    prompts = [
        prompt_of(0 if number % 3 else SIDE, rng.choice([8, 16, 32, 128]))
        for number in range(NUM_REQUESTS)
    ]
    return Trace(prompts, list(arrivals))


def continuous(engine: OwnEngine, trace: Trace) -> Answers:
    """Submits each request when it arrives."""
    began = time.perf_counter()
    return Answers(began, engine.answer(trace.prompts, after=trace.arrivals))


def static(engine: OwnEngine, trace: Trace) -> Answers:
    """Runs one batch at a time; no answer is complete before the last token of the batch."""
    began = time.perf_counter()
    times: list[Sequence[float]] = []
    while len(times) < NUM_REQUESTS:
        now = time.perf_counter() - began
        came = max(sum(arrival <= now for arrival in trace.arrivals), len(times) + 1)
        batch = slice(len(times), min(came, len(times) + MOST_TOGETHER))
        wait = max(0.0, trace.arrivals[batch.start] - now)
        prompts = trace.prompts[batch]
        told = engine.answer(prompts, after=[wait] * len(prompts))
        ended = max(one[-1] for one in told)
        times += [[*one[:-1], ended] for one in told]
    return Answers(began, times)


def figures(runs: Sequence[tuple[Trace, Answers]]) -> dict[str, Any]:
    """Percentiles over all requests of all rounds."""
    first, whole, speeds = [], [], []
    for trace, answers in runs:
        came = [answers.began + arrival for arrival in trace.arrivals]
        first += [times[0] - at for at, times in zip(came, answers.times, strict=True)]
        whole += [times[-1] - at for at, times in zip(came, answers.times, strict=True)]
        ended = max(times[-1] for times in answers.times)
        speeds.append(sum(map(len, answers.times)) / (ended - answers.began))
    return {
        "tokens_per_second": round(statistics.median(speeds), 1),
        "ttft_ms": quantiles(first),
        "latency_ms": quantiles(whole),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    found = np.percentile(seconds, PERCENTS) * 1e3
    return {f"p{p}": round(float(each), 1) for p, each in zip(PERCENTS, found, strict=True)}


# ---- chunked prefill -----------------------------------------------------------------------------


def chunks(engines: Mapping[int, OwnEngine], num_rounds: int) -> list[dict[str, Any]]:
    """Alternates between all chunk sizes."""
    gaps: dict[int, list[float]] = {size: [] for size in engines}
    waits: dict[int, list[float]] = {size: [] for size in engines}
    for number in range(num_rounds + 1):
        for size, engine in engines.items():
            short, long = prompt_of(0, SHORT_TOKENS), prompt_of(0, 1, num_words=LONG_WORDS)
            began = time.perf_counter()
            told, (first,) = engine.answer([short, long], after=[0.0, LONG_AFTER])
            if number:
                gaps[size].append(max(b - a for a, b in itertools.pairwise(told)))
                waits[size].append(first - began - LONG_AFTER)
    return [
        {
            "bench": "batching.chunks",
            "tokens_of_a_step": size,
            "prompt": LONG_WORDS,
            "longest_gap_ms": round(statistics.median(gaps[size]) * 1e3, 1),
            "ttft_of_prompt_ms": round(statistics.median(waits[size]) * 1e3, 1),
        }
        for size in engines
    ]


if __name__ == "__main__":
    main()
