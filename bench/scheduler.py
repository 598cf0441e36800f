"""The time of a scheduler step without the model, by running and waiting sequences.

    python bench/scheduler.py        one JSON object on stdout, in half a minute

A step is what the engine does besides the model: schedule, build the arrays, update, in CPU time of
its thread. While `running` sequences decode, `waiting` ones are queued in one of these states:

    full       every row is used
    lacking    rows are free, but no blocks
    stalled    rows and blocks are free, but every sequence waits for an image
    churn      per step one sequence ends, one is admitted and prefills, one arrives, and one that
               waits is cancelled

The goal of 100 us is for the first three. `churn` includes two arrivals, two cancels and the first
step of a prompt, but not the creation of requests. All run in turn. Each round also times a fixed
amount of work per case (`core_speed`). Figures are medians of the rounds with a similar probe, and
`rounds` has their number.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time

import numpy as np
from core_speed import Counted, core_seconds
from probes import MAX_PROBE_RATIO

from vlm_worker.core.kv_cache import BlockPool
from vlm_worker.core.persistent_batch import PersistentBatch
from vlm_worker.core.scheduler import Scheduler
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.core.step_inputs import BatchBuilder
from vlm_worker.settings import AdmissionPolicy, AdmissionSettings
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams

RUNNING = (16, 64, 256)
WAITING = (10, 100, 1_000, 10_000)
STATES = ("full", "lacking", "stalled", "churn")
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
PROMPT = 100
ROUNDS = 10
STEPS = 25
TARGET_US = 100
TARGET_RATIO = 1.2


class Decoding:
    """`running` sequences in the middle of their answers, and `waiting` in the queue."""

    def __init__(self, running: int, waiting: int, state: str) -> None:
        self.state = state
        self.numbers = itertools.count()
        num_rows = running + (state in ("lacking", "stalled"))
        self.batch = PersistentBatch(
            num_rows, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, eos_token_ids=(2,)
        )
        num_blocks = (running + 8) * (MAX_MODEL_LEN // BLOCK_SIZE) + 1
        budget = (running + 1) * (PROMPT + 50)
        self.scheduler = Scheduler(
            BlockPool(num_blocks, block_size=BLOCK_SIZE),
            self.batch,
            max_num_batched_tokens=budget,
            watermark_blocks=num_blocks if state == "lacking" else 0,
            settings=AdmissionSettings(policy=AdmissionPolicy.DUAL_QUEUE),
        )
        self.builder = BatchBuilder(self.batch, max_num_batched_tokens=budget, whole_images=False)
        self.now = 0.0
        for _ in range(running):
            self.receive(self.make())
        self.queue = [self.make(stalls=state == "stalled") for _ in range(waiting)]
        for sequence in self.queue:
            self.scheduler.add(sequence)
        self.step()
        assert len(self.batch) == running

    def receive(self, sequence: Sequence) -> None:
        """Admit a sequence whose KV a peer has computed, so that no watermark delays it."""
        pool = self.scheduler.pool
        blocks = pool.take(pool.kinds.of(sequence).num_blocks(sequence.num_tokens))
        assert blocks is not None
        sequence.blocks, sequence.num_computed_tokens = blocks, sequence.num_tokens
        sequence.token_ids = np.append(sequence.token_ids, np.int32(7))
        sequence.status = Status.RECEIVING
        self.scheduler.resume(sequence)

    def make(self, *, stalls: bool = False) -> Sequence:
        """A new sequence. If it stalls, its first token belongs to an image that never arrives."""
        number = next(self.numbers)
        length = PROMPT + number % 50
        token_ids = (np.arange(length, dtype=np.int32) * 31 + number * 7) % 30_000 + 3
        items = (ImageItem(number.to_bytes(32, "little"), 0, 9, (1, 6, 6)),) if stalls else ()
        request = Request(
            RequestKey(str(number), 0),
            (),
            length,
            SamplingParams(max_tokens=MAX_MODEL_LEN),
            items,
            priority=number % 3,
        )
        return Sequence(
            request=request,
            arrival=number,
            token_ids=token_ids,
            positions=np.arange(length)[None],
            position_delta=0,
            arrived_at=self.now if number else 0.0,
            embeddings=[None] * len(items),
        )

    def step(self) -> None:
        """One step without the model."""
        self.now += 0.01
        plan = self.scheduler.schedule(now=self.now).plan
        assert plan is not None
        inputs = self.builder.build(plan)
        self.scheduler.update(plan, np.full(len(inputs.sample_rows), 7, np.int64))

    def change(self, comers: list[Sequence]) -> None:
        """Cancel the oldest running sequence and one in the middle of the queue; add two."""
        self.scheduler.remove(self.batch.running[0])
        for sequence in (comers.pop(), comers.pop()):
            sequence.arrived_at = self.now
            self.queue.append(sequence)
            self.scheduler.add(sequence)
        while (sequence := self.queue.pop(len(self.queue) // 2)).status is not Status.WAITING:
            pass
        self.scheduler.remove(sequence)

    def measure(self) -> float:
        """Microseconds of a step, mean of one round."""
        churns = self.state == "churn"
        comers = [self.make() for _ in range(2 * STEPS * churns)][::-1]
        started = time.thread_time()
        for _ in range(STEPS):
            if churns:
                self.change(comers)
            self.step()
        return (time.thread_time() - started) / STEPS * 1e6


def main() -> None:
    """Measure and print."""
    cases = list(itertools.product(STATES, RUNNING, WAITING))
    decoding = {case: Decoding(case[1], case[2], case[0]) for case in cases}
    rounds: dict[tuple[str, int, int], list[float]] = {case: [] for case in cases}
    probes = []
    for _ in range(ROUNDS):
        seconds = []
        for case in cases:
            seconds.append(core_seconds())
            rounds[case].append(decoding[case].measure())
        probes.append(statistics.median(seconds))
    counted = Counted.of(probes)
    step_us = {case: counted.median(rounds[case]) for case in cases}
    ratios = {
        state: round(max(step_us[state, n, 10_000] / step_us[state, n, 100] for n in RUNNING), 2)
        for state in STATES
    }
    worst = max(step_us[state, 256, n] for state in STATES[:3] for n in WAITING)
    met = worst <= TARGET_US and max(ratios.values()) <= TARGET_RATIO
    report = {
        "bench": "scheduler",
        "step_us": {
            state: {
                str(running): {str(n): round(step_us[state, running, n], 1) for n in WAITING}
                for running in RUNNING
            }
            for state in STATES
        },
        "ratio_10000_to_100_waiting": ratios,
        "target_us_at_256": TARGET_US,
        "target_ratio": TARGET_RATIO,
        **counted.fields,
        "met": met if counted.probes_moved <= MAX_PROBE_RATIO else None,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
