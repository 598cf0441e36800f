"""Waiting times of a mixed trace under `fcfs` and `dual_queue`, in simulated time.

    python bench/admission.py        one JSON object on stdout, in a few seconds

It uses the real scheduler; a step takes 8 ms + 40 us per token. Half of the requests have an image
(800 to 2,500 tokens), half are text (20 to 200). Requests arrive at random, below and above the
capacity. The output is TTFT in seconds, mean and 95th percentile, per lane.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from collections.abc import Iterator

import numpy as np

from vlm_worker.core.kv_cache import BlockPool
from vlm_worker.core.persistent_batch import PersistentBatch
from vlm_worker.core.scheduler import Scheduler
from vlm_worker.core.sequence import Lane, Sequence
from vlm_worker.settings import AdmissionPolicy, AdmissionSettings
from vlm_worker.types import Request, RequestKey, SamplingParams

RATES = (16, 22, 26)
AGEING_SECONDS = (3.0, 30.0)
NUM_REQUESTS = 600
STEP_SECONDS = 0.008
TOKEN_SECONDS = 4e-5
BLOCK_SIZE = 16


def arrivals(rate: float) -> Iterator[Sequence]:
    """Requests by arrival; the same ones for every policy."""
    chance, now = random.Random(1), 0.0
    for number in range(NUM_REQUESTS):
        now += chance.expovariate(rate)
        lane = chance.choice(list(Lane))
        length = chance.randint(800, 2500) if lane is Lane.VISION else chance.randint(20, 200)
        sampling = SamplingParams(max_tokens=chance.randint(20, 120), ignore_eos=True)
        yield Sequence(
            request=Request(RequestKey(str(number), 0), (), length, sampling),
            arrival=number,
            token_ids=np.arange(length, dtype=np.int32) % 5 + number * 7 + 8,
            positions=np.zeros((1, length), np.int64),
            position_delta=0,
            arrived_at=now,
            lane=lane,
        )


def first_tokens(settings: AdmissionSettings, rate: float) -> dict[Lane, list[float]]:
    """Seconds from each arrival to its first token."""
    batch = PersistentBatch(32, max_model_len=4096, block_size=BLOCK_SIZE)
    scheduler = Scheduler(
        BlockPool(6_000, block_size=BLOCK_SIZE),
        batch,
        max_num_batched_tokens=2048,
        long_prefill_tokens=1024,
        settings=settings,
    )
    seconds: dict[Lane, list[float]] = {lane: [] for lane in Lane}
    coming = arrivals(rate)
    following = next(coming, None)
    now = 0.0
    while following is not None or scheduler.waiting or len(batch):
        while following is not None and following.arrived_at <= now:
            scheduler.add(following)
            following = next(coming, None)
        plan = scheduler.schedule(now=now).plan
        if plan is None:
            assert following is not None
            now = following.arrived_at
            continue
        now += STEP_SECONDS + TOKEN_SECONDS * plan.num_tokens
        outcome = scheduler.update(plan, np.full(len(plan.sampled_rows), 7, np.int64))
        for sequence, index in zip(outcome.sequences, outcome.indices, strict=True):
            if index == 0:
                seconds[sequence.lane].append(now - sequence.arrived_at)
    return seconds


def main() -> None:
    """Simulate and print."""
    results = []
    for rate in RATES:
        for policy in AdmissionPolicy:
            for ageing in AGEING_SECONDS:
                settings = dataclasses.replace(AdmissionSettings(policy), ageing_seconds=ageing)
                seconds = first_tokens(settings, rate)
                told = {
                    lane.value: {
                        "mean": round(statistics.mean(values), 2),
                        "p95": round(statistics.quantiles(values, n=20)[-1], 2),
                    }
                    for lane, values in seconds.items()
                }
                everybody = [value for values in seconds.values() for value in values]
                told["all"] = {"mean": round(statistics.mean(everybody), 2)}
                results.append(
                    {"rate": rate, "policy": policy.value, "ageing_seconds": ageing, **told}
                )
    print(json.dumps({"bench": "admission", "ttft_seconds": results}))


if __name__ == "__main__":
    main()
