"""Decode steps as a share of the limit of the machine, per batch size.

    python bench/run.py decode      python bench/decode.py --rounds 9 --model DIR

The limit of a bfloat16 step is the longer of two: reading weights and KV once at the read
bandwidth, and multiplying at the peak, both probed in every round (`probes`). It runs the model
runner alone with Qwen2-VL of random weights (`random_vlm`): no engine, greedy sampling included.
One JSON line per batch size; `int8_ratio` is the time of a step with `--weights=int8` divided by
that in bfloat16. A second line, `decode.calls`, is a step of as many layers that are an eighth as
wide: it has almost nothing to read or multiply.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import random_vlm
from probes import Rounds, arguments

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("worker", "kernels")]

GOALS = {1: 0.75, 4: 0.60, 16: 0.65}
BATCHES = (1, 4, 7, 16)
CONTEXT = 300
NARROW = random_vlm.Size(hidden=128, heads=1, kv_heads=1, mlp=352, vision_layers=1, vision_width=64)


def main() -> None:
    """Measure, and print one JSON line per batch size."""
    args = arguments(__doc__)
    with random_vlm.model_directory(args.model) as model_dir:
        runners = {name: build(model_dir, args.threads, name) for name in ("auto", "int8")}
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as made:
        narrow = random_vlm.make_model(Path(made), NARROW)
        runners["calls"] = build(narrow, args.threads, "auto")
    layout, weights_bytes = runners["auto"].kv_layout, runners["auto"].weights_bytes
    cases = {
        (name, batch): functools.partial(runner.execute, decode_step(runner, batch))
        for name, runner in runners.items()
        for batch in BATCHES
    }
    rounds = Rounds(cases, threads=args.threads)
    rounds.run(args.rounds)
    for batch in BATCHES:
        figures = rounds.figures(
            ("auto", batch),
            num_bytes=weights_bytes + batch * CONTEXT * layout.token_bytes,
            operations=weights_bytes * batch,  # 2 per weight of 2 bytes
            goal=GOALS.get(batch),
        )
        line = {"bench": "decode", "batch": batch, "threads": args.threads, "context": CONTEXT}
        line["tokens_per_second"] = round(batch / figures["ms"] * 1e3, 1)
        line["int8_ratio"] = rounds.against(("int8", batch), ("auto", batch))
        print(json.dumps(line | figures), flush=True)
    for batch in BATCHES:
        milliseconds = statistics.median(rounds.seconds["calls", batch]) * 1e3
        line = {"bench": "decode.calls", "batch": batch, "threads": args.threads}
        print(json.dumps(line | {"ms": round(milliseconds, 2)}), flush=True)


def build(model_dir: Path, threads: int, weights: str, *stages: str) -> Any:
    """A model runner of the stages; default: decode."""
    from vlm_worker.model.build import RunnerSettings, build_runner
    from vlm_worker.serve.process import freeze_gc
    from vlm_worker.types import Stage

    wanted = [Stage(name) for name in stages or ("decode",)]
    runner = build_runner(
        RunnerSettings(
            model_dir, wanted, dtype="bfloat16", kv_memory_bytes=1 << 28, num_threads=threads,
            weights=weights,
        )
    )  # fmt: skip
    freeze_gc()  # as a worker does
    return runner


def decode_step(runner: Any, batch: int) -> Any:
    """Inputs of one new token for `batch` sequences of `CONTEXT` tokens."""
    return step_inputs(runner, batch=batch, num_new=1, context=CONTEXT)


def step_inputs(runner: Any, *, batch: int, num_new: int, context: int) -> Any:
    """Inputs of `num_new` tokens for `batch` sequences of `context` tokens; the last is sampled."""
    from vlm_worker.core.step_values import SampleParams, StepInputs

    block_size = runner.kv_layout.block_size
    num_blocks = (context + num_new - 1) // block_size + 1
    table = 1 + np.arange(batch * num_blocks, dtype=np.int32).reshape(batch, num_blocks)
    index = np.arange(context, context + num_new)
    slots = table[:, index // block_size].astype(np.int64) * block_size + index % block_size
    positions = np.tile(index, batch)
    return StepInputs(
        token_ids=np.arange(batch * num_new, dtype=np.int64) + random_vlm.FIRST_WORD,
        positions=np.tile(positions, (runner.family.num_position_rows, 1)),
        slot_mapping=slots.reshape(-1),
        query_start=np.arange(batch + 1, dtype=np.int32) * num_new,
        context_lens=np.full(batch, context, np.int32),
        block_table=table,
        spans=((),) * batch,
        image_rows=(),
        sample_rows=np.arange(1, batch + 1) * num_new - 1,
        sampling=SampleParams.all_greedy(batch),
    )


if __name__ == "__main__":
    main()
