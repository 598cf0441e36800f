"""The engine's own time per decode step: between two calls of the model.

    python bench/run.py engine_step      python bench/engine_step.py [--rounds 7]

The engine thread runs a stub model that releases the interpreter for 5 ms per step, as a C++ model
does; meanwhile the event loop delivers tokens. Measured is the time on the engine thread from the
end of a step to the start of the next: bookkeeping, events, schedule, inputs, and waiting. A round
runs each number of sequences once; its figure is the median of the steps. `cpu_us_per_sequence` is
the thread's processor time, without waiting for the loop or other processes.

The speed of the core changes. So each step begins with a fixed amount of work (`core_speed`).
Figures are medians of the rounds with a similar probe, `rounds` has their number, and
`us_per_step_by_round` has all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from core_speed import Counted, core_seconds
from probes import MAX_PROBE_RATIO

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("worker", "kernels")]

from vlm_worker.core.step_values import SampleParams, StepInputs, StepOutput  # noqa: E402
from vlm_worker.engine.engine import Engine  # noqa: E402
from vlm_worker.engine.settings import EngineSettings  # noqa: E402
from vlm_worker.testing import ChecksumRunner  # noqa: E402
from vlm_worker.types import FailedEvent, Request, RequestKey, SamplingParams  # noqa: E402

RUNNING = (16, 64, 256)
STEP_SECONDS = 0.005
PROMPT_TOKENS, ANSWER_TOKENS = 16, 64
FIRST_WORD, FEW = 8, 900
BLOCK_SIZE, MAX_MODEL_LEN = 16, 1024
GOAL_AT_256 = 2.0


class TimedRunner(ChecksumRunner):
    """Records the time between two steps in which every sequence decodes, by the clock `now`."""

    def __init__(self, num_running: int) -> None:
        num_blocks = num_running * (MAX_MODEL_LEN // BLOCK_SIZE) + 1
        super().__init__(num_blocks, block_size=BLOCK_SIZE)
        self.faults.step_seconds = STEP_SECONDS
        self.between: list[tuple[float, float]] = []
        self.probes: list[float] = []
        self._num_running = num_running
        self._ended: tuple[float, float] | None = None

    def choose(self, contexts: Sequence[np.ndarray | None], params: SampleParams) -> StepOutput:
        """Run the probe, then sample."""
        self.probes.append(core_seconds())
        return super().choose(contexts, params)

    def execute(self, inputs: StepInputs) -> StepOutput:
        """One step."""
        began = now()
        all_decode = len(inputs.token_ids) == len(inputs.sample_rows) == self._num_running
        if all_decode and self._ended is not None:
            self.between.append((began[0] - self._ended[0], began[1] - self._ended[1]))
        output = super().execute(inputs)
        self._ended = now() if all_decode else None
        return output


def now() -> tuple[float, float]:
    """The clock, and this thread's processor time, in seconds."""
    return time.perf_counter(), time.thread_time()


def main() -> None:
    """One JSON line per number of running sequences."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rounds: dict[int, list[Round]] = {number: [] for number in RUNNING}
    for round_number in range(args.rounds):
        for num_running in RUNNING:
            rounds[num_running].append(asyncio.run(measure(num_running, round_number)))
    for num_running in RUNNING:
        print(json.dumps(figures(num_running, rounds[num_running])), flush=True)


def figures(num_running: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """One line of results."""
    counted = Counted.of([one.probe for one in rounds])
    microseconds = [one.wall * 1e6 for one in rounds]
    each = counted.median(microseconds) / num_running
    line = {
        "bench": "engine_step",
        "running": num_running,
        "us_per_step": round(counted.median(microseconds), 1),
        "us_per_step_by_round": [round(one, 1) for one in microseconds],
        "us_per_sequence": round(each, 2),
        "cpu_us_per_sequence": round(
            counted.median([one.cpu for one in rounds]) * 1e6 / num_running, 2
        ),
        **counted.fields,
    }
    if num_running == max(RUNNING):
        met = each <= GOAL_AT_256 if counted.probes_moved <= MAX_PROBE_RATIO else None
        line |= {"goal": GOAL_AT_256, "met": met}
    return line


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """Medians of one run in seconds: between steps, its processor time, and the probe."""

    wall: float
    cpu: float
    probe: float


async def measure(num_running: int, round_number: int) -> Round:
    """One run in which all sequences decode."""
    runner = TimedRunner(num_running)
    settings = EngineSettings(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * (PROMPT_TOKENS + 1),
        max_waiting=num_running,
    )
    engine = Engine(
        runner, settings=settings, positions=lambda ids, _: (np.arange(len(ids))[None], 0)
    )
    engine.start(asyncio.get_running_loop())
    requests = [request(round_number * num_running + i) for i in range(num_running)]
    await asyncio.gather(*(answer(engine, one) for one in requests))
    await engine.stop()
    walls, cpus = zip(*runner.between, strict=True)
    return Round(*(statistics.median(each) for each in (walls, cpus, runner.probes)))


async def answer(engine: Engine, request: Request) -> None:
    """Read a stream to its end."""
    async for event in engine.submit_prefill(request, for_peer=False):
        if isinstance(event, FailedEvent):
            raise event.error


def request(number: int) -> Request:
    """Tokens that no other request has: the model's vocabulary is small."""
    first = divmod(number, FEW)
    tokens = tuple(FIRST_WORD + digit for digit in (*first, *range(PROMPT_TOKENS - len(first))))
    sampling = SamplingParams(ANSWER_TOKENS, ignore_eos=True)
    return Request(RequestKey(str(number), 1), tokens, PROMPT_TOKENS, sampling)


if __name__ == "__main__":
    main()
