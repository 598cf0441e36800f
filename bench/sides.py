"""Both sides of a comparison with transformers' `generate`, one process each.

    parent --calls, a line--> [ours | transformers] --wall and CPU seconds, a line--> parent

One side runs while the other is idle. Both get token ids and patches, so tokenizers and image
processors are not measured.

    ours            engine and model runner, composed as in `vlm-worker serve`
    transformers    one static batch, padded left, greedy, as many tokens as the longest answer
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import random_vlm

GRID = (1, 32, 32)
PATCH_DIM = 3 * 2 * 14 * 14
NAMES = ("ours", "transformers")


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One request of a trace; `seed` makes its tokens and its image."""

    num_words: int
    has_image: bool
    num_output: int
    seed: int
    num_template: int = 20

    def token_ids(self) -> list[int]:
        """Template, image, words."""
        rng = random.Random(self.seed)
        words = range(random_vlm.FIRST_WORD, random_vlm.LAST_WORD)
        plain = [rng.choice(words) for _ in range(self.num_words + self.num_template)]
        if not self.has_image:
            return plain
        image = [random_vlm.IMAGE_TOKEN] * random_vlm.NUM_IMAGE_TOKENS
        return [*plain[:4], random_vlm.VISION_START, *image, random_vlm.VISION_END, *plain[6:]]

    def patches(self) -> np.ndarray:
        """Float32 `[1024, 1176]`."""
        rng = np.random.default_rng(self.seed)
        return rng.standard_normal((GRID[1] * GRID[2], PATCH_DIM), dtype=np.float32)


class Ours:
    """Engine and model runner, composed as in `vlm-worker serve`."""

    def __init__(self, model_dir: Path, threads: int, options: dict[str, Any]) -> None:
        from own_engine import OwnEngine

        self._engine = OwnEngine(model_dir, threads=threads, **options)

    def run(self, calls: Sequence[Call]) -> int:
        """Answer all of them at once; returns the number of answer tokens."""
        return sum(map(len, self._engine.answer([self._prompt(call) for call in calls])))

    def _prompt(self, call: Call) -> Any:
        from own_engine import ImageInput, Prompt

        token_ids = call.token_ids()
        if not call.has_image:
            return Prompt(token_ids, call.num_output)
        image = ImageInput(call.seed, GRID, random_vlm.NUM_IMAGE_TOKENS, call.patches())
        offset = token_ids.index(random_vlm.IMAGE_TOKEN)
        return Prompt(token_ids, call.num_output, image, offset)

    def check(self) -> None:
        """Raise if a cache was hit, or a request was not ended."""
        stats = self._engine.stats
        assert stats.count("prefix_cache_hits") == 0, stats
        assert stats.encoder_cache.hits == 0, stats


class Transformers:
    """`generate()` of transformers with the settings of the reference: a static batch."""

    def __init__(self, model_dir: Path, threads: int, _options: dict[str, Any]) -> None:
        import torch
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = Qwen2VLForConditionalGeneration.from_pretrained(
            model_dir, dtype=torch.bfloat16
        ).eval()

    def run(self, calls: Sequence[Call]) -> int:
        """Answer all of them in one batch; returns the number of answer tokens asked for."""
        torch = self._torch
        prompts = [call.token_ids() for call in calls]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        images = [torch.from_numpy(call.patches()) for call in calls if call.has_image]
        if images:
            inputs["pixel_values"] = torch.cat(images).to(torch.bfloat16)
            inputs["image_grid_thw"] = torch.tensor([GRID] * len(images))
            inputs["mm_token_type_ids"] = (ids == random_vlm.IMAGE_TOKEN).int()
        num_tokens = max(call.num_output for call in calls)
        with torch.inference_mode():
            out = self._model.generate(
                **inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
            )
        assert out.shape == (len(calls), longest + num_tokens)
        return sum(call.num_output for call in calls)

    def check(self) -> None:
        """Check nothing: no state is kept between rounds."""


SIDES: dict[str, Callable[[Path, int, dict[str, Any]], Any]] = {
    "ours": Ours,
    "transformers": Transformers,
}


def serve_side(name: str, model_dir: Path, threads: int, options: dict[str, Any]) -> None:
    """The child process: reads a line with calls, writes a line with their time."""
    began = time.perf_counter()
    side = SIDES[name](model_dir, threads, options)
    print(json.dumps({"start_seconds": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        calls = [Call(**fields) for fields in json.loads(line)]
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        num_tokens = side.run(calls)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        side.check()
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps({"wall": wall, "cpu": cpu, "tokens": num_tokens}), flush=True)


class Child:
    """One side in its own process."""

    def __init__(
        self, name: str, model_dir: Path, threads: int, options: dict[str, Any], env: dict[str, str]
    ) -> None:
        command = [
            "env", "HF_HUB_OFFLINE=1", *(f"{name}={value}" for name, value in env.items()),
            sys.executable, __file__, name, str(model_dir), str(threads), json.dumps(options),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.start_seconds = float(self._read()["start_seconds"])

    def run(self, calls: Sequence[Call]) -> dict[str, float]:
        """Wall seconds, CPU seconds and answer tokens of these calls."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([dataclasses.asdict(call) for call in calls]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it and wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self._process.wait()}; see above")
        return dict(json.loads(line))


def seconds_of_others() -> float:
    """Processor time of other processes and other guests of the host since the start.

    A benchmark's own is that of children that have ended.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _iowait, *more = map(
        int, stat.read_text().split("\n")[0].split()[1:9]
    )
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")
    return busy - own.ru_utime - own.ru_stime


def read_bandwidth(threads: int) -> float:
    """Bytes per second of summing 512 MiB, best of three."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(128 << 20, dtype=torch.float32)
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        data.sum()
        best = max(best, data.numel() * 4 / (time.perf_counter() - began))
    return best


def arguments(description: str) -> argparse.ArgumentParser:
    """The flags that every comparison has."""
    parser = random_vlm.arguments(description, rounds=3)
    parser.add_argument("--options", type=json.loads, default={}, help="of our side, as JSON")
    parser.add_argument("--wait-policy", default="PASSIVE", help="OMP_WAIT_POLICY of our side")
    return parser


def start(args: argparse.Namespace, model_dir: Path) -> dict[str, Child]:
    """Both sides, loaded; transformers with the environment as it is."""
    own_env = {"OMP_WAIT_POLICY": args.wait_policy} if args.wait_policy else {}
    return {
        "ours": Child("ours", model_dir, args.threads, args.options, own_env),
        "transformers": Child("transformers", model_dir, args.threads, {}, {}),
    }


@dataclasses.dataclass(slots=True)
class Times:
    """Seconds of one case per side, of the counted rounds."""

    wall: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {name: [] for name in NAMES}
    )
    cpu: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {name: [] for name in NAMES}
    )

    def figures(self) -> dict[str, Any]:
        """Medians, of a ratio too; below 1 we take less time."""
        ours, theirs = (statistics.median(self.wall[name]) for name in NAMES)
        ratios, cpu_ratios = (
            [a / b for a, b in zip(kept["ours"], kept["transformers"], strict=True)]
            for kept in (self.wall, self.cpu)
        )
        return {
            "ours_seconds": round(ours, 3),
            "transformers_seconds": round(theirs, 3),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_per_round": [round(ratio, 3) for ratio in ratios],
            "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        }


def compare(
    children: dict[str, Child], cases: Sequence[Callable[[int], list[list[Call]]]], rounds: int
) -> list[Times]:
    """Rounds of all cases; the first is a warm-up, and the sides take turns to begin.

    A case makes the batches of calls of a round; what counts is the last batch's time, less that of
    the batches before it.
    """
    times = [Times() for _ in cases]
    for number in range(rounds + 1):
        order = NAMES if number % 2 == 0 else NAMES[::-1]
        for case, kept in zip(cases, times, strict=True):
            for name in order:
                *before, last = (children[name].run(calls) for calls in case(number))
                told = {key: round(value, 2) for key, value in last.items()}
                print(f"round {number} of {rounds}: {name} {told}", file=sys.stderr, flush=True)
                if number:
                    kept.wall[name].append(last["wall"] - sum(run["wall"] for run in before))
                    kept.cpu[name].append(last["cpu"] - sum(run["cpu"] for run in before))
    return times


if __name__ == "__main__":
    serve_side(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
