"""The model runner against transformers, on `shapes`, one thread, one JSON line per figure.

    python bench/model.py                  start-up and memory per role, decode, prefill, encode

Decode, prefill and encode alternate with transformers'. A figure is a ratio of medians; above 1 we
are faster. Start-up uses a fresh process each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("worker", "kernels", "tests", "examples/shapes")]

ROLES = ("encoder", "prefill", "decode", "encoder,prefill,decode")

START = """
import resource, sys, time
began = time.perf_counter()
from pathlib import Path
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.types import Stage
imported = time.perf_counter()
stages = [Stage(name) for name in sys.argv[2].split(",")]
runner = build_runner(RunnerSettings(Path(sys.argv[1]), stages, num_threads=1))
ready = time.perf_counter()
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(imported - began, ready - imported, rss, runner.weights_bytes)
"""


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved repetitions")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    for role in ROLES:
        emit("startup", start_up(role))
    bench = Bench(args.dtype, args.rounds)
    for batch in (1, 4, 16):
        emit("decode", bench.decode(batch))
    for batch in (1, 8):
        emit("prefill", bench.prefill(batch))
    for count in (1, 8):
        emit("encode", bench.encode(count))


def emit(name: str, figures: dict[str, Any]) -> None:
    """One JSON line."""
    print(json.dumps({"bench": f"model.{name}", **figures}), flush=True)


def start_up(stages: str) -> dict[str, Any]:
    """Seconds from a fresh interpreter to a runner, and its memory."""
    from worker.identity.questions import SHAPES

    command = [sys.executable, "-c", START, str(SHAPES), stages]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    imported, loaded, rss, weights = out.split()
    return {
        "stages": stages,
        "import_seconds": round(float(imported), 2),
        "load_seconds": round(float(loaded), 2),
        "peak_rss_mib": round(float(rss)),
        "weights_bytes": int(weights),
    }


class Bench:
    """Both models in one process, on the same questions."""

    def __init__(self, dtype: str, rounds: int) -> None:
        import torch
        from worker.identity.questions import SHAPES, questions
        from worker.identity.reference import load_reference
        from worker.identity.stepper import Stepper

        from vlm_worker.model.build import RunnerSettings, build_runner
        from vlm_worker.types import Stage

        settings = RunnerSettings(
            SHAPES, tuple(Stage), dtype=dtype, kv_memory_bytes=256 << 20, num_threads=1
        )
        self._runner, self._rounds, self._stepper = build_runner(settings), rounds, Stepper
        self._torch, self._dtype = torch, dtype
        self._reference = load_reference(SHAPES).to(getattr(torch, dtype))
        self._questions = [
            question for question in questions() if len(question.prepared_images) == 1
        ]

    def decode(self, batch: int) -> dict[str, Any]:
        """Tokens per second of a batch of equal questions in decode."""
        num_tokens, question = 32, self._questions[0]
        stepper = self._stepper(self._runner)
        ours = [stepper.start(question, (), max_tokens=num_tokens + 1) for _ in range(batch)]
        stepper.generate(ours, max_tokens=1, chunk=4096, eos=None)
        steps = []
        for _ in range(num_tokens):
            steps.append(stepper.inputs([(sequence, 1) for sequence in ours], [[0]] * batch))
            for sequence in ours:
                sequence.num_computed += 1
                sequence.token_ids.append(sequence.token_ids[-1])
        state: dict[str, Any] = {}
        self._prefill_reference(state, batch)

        def run_ours() -> None:
            for inputs in steps:
                self._runner.execute(inputs)

        def run_theirs() -> None:
            self._decode_reference(state, num_tokens)
            state["cache"].crop(-num_tokens)

        figures = self._compare(run_ours, run_theirs, units=batch * num_tokens)
        return {"batch": batch, "unit": "tokens/s", **figures}

    def prefill(self, batch: int) -> dict[str, Any]:
        """Prompt tokens per second, without image encoding."""
        question = self._questions[0]
        embeddings = self._runner.encode(question.prepared_images)

        def run_ours() -> None:
            fresh = self._stepper(self._runner)
            prompts = [
                fresh.start(question, (), max_tokens=1, embeddings=embeddings) for _ in range(batch)
            ]
            fresh.generate(prompts, max_tokens=1, chunk=4096, eos=None)

        state: dict[str, Any] = {"rows": embeddings[0].rows}

        def run_theirs() -> None:
            self._prefill_reference(state, batch)

        units = batch * len(question.token_ids)
        return {
            "batch": batch,
            "unit": "tokens/s",
            **self._compare(run_ours, run_theirs, units=units),
        }

    def encode(self, count: int) -> dict[str, Any]:
        """Images per second: `count` of different sizes in one call."""
        torch = self._torch
        images = [question.prepared_images[0] for question in self._questions[:count]]
        patches = [
            torch.frombuffer(bytearray(p.patches), dtype=torch.float32).view(p.num_tokens * 4, -1)
            for p in images
        ]
        grid = torch.tensor([image.grid_thw for image in images])

        def run_theirs() -> None:
            with torch.inference_mode():
                self._reference.get_image_features(
                    pixel_values=torch.cat(patches), image_grid_thw=grid
                )

        figures = self._compare(lambda: self._runner.encode(images), run_theirs, units=count)
        tokens = sum(image.num_tokens for image in images)
        return {"images": count, "visual_tokens": tokens, "unit": "images/s", **figures}

    def _prefill_reference(self, state: dict[str, Any], batch: int) -> None:
        """Transformers' prefill with a cache, in a batch without padding."""
        torch, question, model = self._torch, self._questions[0], self._reference
        ids = torch.tensor([question.token_ids] * batch)
        positions, delta = self._runner.family.positions(question.token_ids, question.items)
        rows = state.get("rows")
        if rows is None:
            rows = state["rows"] = self._runner.encode(question.prepared_images)[0].rows
        with torch.inference_mode():
            embeds = model.get_input_embeddings()(ids)
            item = question.items[0]
            embeds[:, item.offset : item.end] = rows
            out = model.model.language_model(
                inputs_embeds=embeds,
                position_ids=torch.tensor(positions)[:, None].expand(-1, batch, -1),
                use_cache=True,
            )
            token = model.lm_head(out.last_hidden_state[:, -1:]).argmax(-1)
        state.update(cache=out.past_key_values, token=token, next=ids.shape[1] + delta)

    def _decode_reference(self, state: dict[str, Any], num_tokens: int) -> None:
        """Transformers' decode with its cache, without the overhead of `generate`."""
        torch, model = self._torch, self._reference
        with torch.inference_mode():
            for _ in range(num_tokens):
                batch = len(state["token"])
                out = model.model.language_model(
                    inputs_embeds=model.get_input_embeddings()(state["token"]),
                    position_ids=torch.full((3, batch, 1), state["next"]),
                    past_key_values=state["cache"],
                    use_cache=True,
                )
                state["token"] = model.lm_head(out.last_hidden_state[:, -1:]).argmax(-1)
                state["next"] += 1

    def _compare(
        self, ours: Callable[[], object], theirs: Callable[[], object], *, units: int
    ) -> dict[str, float]:
        ours()
        theirs()
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(self._rounds):
            for run, seconds in zip((ours, theirs), times, strict=True):
                began = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - began)
        own, other = (statistics.median(seconds) for seconds in times)
        return {
            "dtype": self._dtype,
            "ours": round(units / own, 1),
            "transformers": round(units / other, 1),
            "ratio": round(other / own, 2),
        }


if __name__ == "__main__":
    main()
