"""What fewer visual tokens save: TTFT, throughput and KV; and what each resolution costs.

    make bench ARGS=visual_speed         python bench/visual_speed.py [--rounds 5] [--record]

    visual_speed           one line per lever. An image of 448 x 448 and 60 words, one request at a
                           time: TTFT of a new image, and of one whose embedding is cached. `trace`
                           is the time of the mixed trace (`mixed_trace`), 8 of 16 with an image;
                           in `seen_trace`, the embeddings of these images are cached
    visual_speed.pyramid   one line per resolution: tokens, memory, encoded images a second, and the
                           hit rate of one encoder cache

Qwen2-VL with random weights in bfloat16 (`random_vlm`), all stages in one engine (`own_engine`), so
no answer means anything: `visual_tokens` has the accuracy. Levers alternate within each round, and
`ratio` is the median over the rounds of a lever's time divided by that of `off`.

`pixels 1/4` halves each side of the image, so the tower has less work, too. `arrcocpyramid 1/4`
encodes about a quarter of the patches. All others encode the whole image, then keep a quarter of
its tokens. `tower` is one encoder call for one image, in milliseconds and as a ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import random_vlm
import table
import visual_report
from curves import PIXELS_OF_TOKEN
from mixed_trace import NUM_REQUESTS, mixed_trace
from own_engine import ImageInput, OwnEngine, Prompt
from sides import PATCH_DIM, seconds_of_others

from vlm_worker.core.encoder_cache import EncoderCache
from vlm_worker.reduction import Method, Reduction

BENCH: Final = "visual_speed"
RECORD: Final = table.RESULTS / "visual_speed.jsonl"
NUM_WORDS: Final = 60
SIDES: Final = (224, 448, 896)
TRACE_LEVERS: Final = ("off", "zip 1/4", "pixels 1/4")
TOWER: Final = "tower"
CACHE_BYTES: Final = 256 << 20
TRACE_IMAGES, TRACE_LOOKUPS, ZIPF = 2_000, 20_000, 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Lever:
    """A way to fewer visual tokens: another side of the image in pixels, or a reduction."""

    side: int = 448
    reduction: Reduction | None = None


METHODS: Final = tuple(method for method in Method if method is not Method.ARRCOC)
"""ARRCOC chooses by pixels, and the random patches here have none. Its approximate form needs some
relevance, whatever it is, to relieve the tower."""
LEVERS: Final[Mapping[str, Lever]] = {
    "off": Lever(),
    "pixels 1/4": Lever(side=224),
    **{f"{method} 1/4": Lever(reduction=Reduction(method, 250)) for method in METHODS},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line per lever and per resolution."""
    args = arguments(argv)
    began, own, others = time.perf_counter(), time.process_time(), seconds_of_others()
    with random_vlm.model_directory(args.model) as model_dir:
        engine = OwnEngine(model_dir, threads=args.threads)
        lines = [*levers(engine, args.rounds, threads=args.threads), *pyramid(engine, args.rounds)]
        engine.close()
    seconds = time.perf_counter() - began
    others = seconds_of_others() - others - (time.process_time() - own)
    by_others = round(max(0.0, others) / (seconds * (os.cpu_count() or 1)), 2)
    took = {"bench": f"{BENCH}.took", "seconds": round(seconds), "by_others": by_others}
    for line in lines:
        print(json.dumps(line), flush=True)
    if args.record:
        table.write(RECORD, [*lines, took])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = random_vlm.arguments(__doc__, rounds=5)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    return parser.parse_args(argv)


# ---- levers --------------------------------------------------------------------------------------


def levers(engine: OwnEngine, num_rounds: int, *, threads: int) -> list[dict[str, Any]]:
    """Run every lever once as a warm-up, then in each round; one line per lever."""
    number = Numbers()
    seen = {name: image_of(lever, number.next()) for name, lever in LEVERS.items()}
    kept: dict[str, dict[str, list[float]]] = {
        name: {case: [] for case in (*visual_report.CASES, TOWER)} for name in LEVERS
    }
    for turn in range(num_rounds + 1):
        for name, lever in LEVERS.items():
            times = {
                "new": first_token(engine, prompt_of(image_of(lever, number.next()))),
                "seen": first_token(engine, prompt_of(seen[name])),
                TOWER: seconds_of_encoding(engine, image_of(lever, number.next())),
            }
            if name in TRACE_LEVERS:
                images = [image_of(lever, number.next()) for _ in range(NUM_REQUESTS)]
                times["trace"] = seconds_of_trace(engine, images)
                times["seen_trace"] = seconds_of_trace(engine, images)
            for case, seconds in times.items():
                kept[name][case] += [seconds] * bool(turn)
    return [
        {**line_of(engine, name, kept[name], kept["off"]), "threads": threads} for name in LEVERS
    ]


def line_of(
    engine: OwnEngine, name: str, times: Mapping[str, list[float]], off: Mapping[str, list[float]]
) -> dict[str, Any]:
    """The figures of a lever."""
    prompt = prompt_of(image_of(LEVERS[name], 0))
    measured = {case: seconds for case, seconds in times.items() if seconds}
    layout = engine.runner.kv_layout
    num_tokens = len(prompt.token_ids)
    return {
        "bench": BENCH,
        "lever": name,
        "rounds": len(times["new"]),
        "prompt_tokens": num_tokens,
        "kv_bytes": num_tokens * layout.token_bytes,
        "ms": {case: round(statistics.median(one) * 1e3, 1) for case, one in measured.items()},
        "ratio": {
            case: round(statistics.median(a / b for a, b in zip(one, off[case], strict=True)), 3)
            for case, one in measured.items()
        },
    }


class Numbers:
    """Seeds that do not repeat: every image is new."""

    def __init__(self) -> None:
        self._last = 1_000_000

    def next(self) -> int:
        """The next one."""
        self._last += 1
        return self._last


def image_of(lever: Lever, seed: int) -> ImageInput:
    """A random image of the lever's side, with its reduction."""
    rows = lever.side // 14
    rng = np.random.default_rng(seed)
    patches = rng.standard_normal((rows * rows, PATCH_DIM), dtype=np.float32)
    relevance = rng.integers(1, 65536, (rows // 2) ** 2).astype(np.uint16).tobytes()
    known = seed, (1, rows, rows), (rows // 2) ** 2
    return ImageInput(*known, patches, lever.reduction, relevance)


def prompt_of(image: ImageInput, *, num_words: int = NUM_WORDS, num_output: int = 1) -> Prompt:
    """The image between words that no other prompt has, so no KV of it is cached."""
    before, after = some_words(num_words // 2), some_words(num_words - num_words // 2)
    placeholders = [random_vlm.IMAGE_TOKEN] * image.item(0).num_tokens
    token_ids = [
        *before, random_vlm.VISION_START, *placeholders, random_vlm.VISION_END, *after
    ]  # fmt: skip
    return Prompt(token_ids, num_output, image, offset=len(before) + 1)


def some_words(count: int) -> list[int]:
    """Random words: no two prompts begin alike behind their images."""
    return random.choices(range(random_vlm.FIRST_WORD, random_vlm.LAST_WORD), k=count)


def first_token(engine: OwnEngine, prompt: Prompt) -> float:
    """Seconds to the first token of a single request, with its encoding if it is not cached."""
    began = time.perf_counter()
    return engine.answer([prompt])[0][0] - began


def seconds_of_encoding(engine: OwnEngine, image: ImageInput) -> float:
    """Seconds of an encoder call for one image."""
    prepared = image.prepared()
    began = time.perf_counter()
    [embedding] = engine.runner.encode([prepared])
    if isinstance(embedding, Exception):
        raise embedding
    return time.perf_counter() - began


def seconds_of_trace(engine: OwnEngine, images: Sequence[ImageInput]) -> float:
    """Seconds to answer the requests of the mixed trace, all sent at once, with these images.

    No prompt repeats.
    """
    prompts = [
        prompt_of(image, num_words=call.num_words + call.num_template, num_output=call.num_output)
        if call.has_image
        else Prompt(some_words(call.num_words + call.num_template), call.num_output)
        for call, image in zip(mixed_trace(0), images, strict=True)
    ]
    began = time.perf_counter()
    return max(times[-1] for times in engine.answer(prompts)) - began


# ---- resolutions ---------------------------------------------------------------------------------


def pyramid(engine: OwnEngine, num_rounds: int) -> list[dict[str, Any]]:
    """One line per resolution of the sources' pyramid."""
    number = Numbers()
    seconds: dict[int, list[float]] = {side: [] for side in SIDES}
    for turn in range(num_rounds + 1):
        for side in SIDES:
            took = seconds_of_encoding(engine, image_of(Lever(side=side), number.next()))
            seconds[side] += [took] * bool(turn)
    return [pyramid_line(engine, side, seconds[side]) for side in SIDES]


def pyramid_line(engine: OwnEngine, side: int, seconds: Sequence[float]) -> dict[str, Any]:
    """The figures of one resolution."""
    num_tokens = (side // PIXELS_OF_TOKEN) ** 2
    num_bytes = num_tokens * random_vlm.FULL.hidden * 2  # rows in bfloat16
    return {
        "bench": f"{BENCH}.pyramid",
        "side": side,
        "visual_tokens": num_tokens,
        "embedding_mb_per_1000": round(num_bytes * 1000 / 1e6),
        "kv_mb_per_1000": round(num_tokens * engine.runner.kv_layout.token_bytes * 1000 / 1e6),
        "images_per_second": round(1 / statistics.median(seconds), 2),
        "hit_rate": round(hit_rate(num_tokens, num_bytes), 3),
    }


class Sizes:
    """A codec of embeddings that are their size in bytes."""

    def export_embedding(self, embedding: int) -> memoryview:
        """Not used: there is no cold tier."""
        raise NotImplementedError

    def import_embedding(self, rows: memoryview, num_tokens: int) -> int:
        """Not used, as above."""
        raise NotImplementedError

    def embedding_bytes(self, embedding: int) -> int:
        """Itself."""
        return embedding


def hit_rate(num_tokens: int, num_bytes: int) -> float:
    """Share of hits in an `EncoderCache` of `CACHE_BYTES`; images have Zipf's frequencies."""
    rng = np.random.default_rng(7)
    weights = 1 / np.arange(1, TRACE_IMAGES + 1) ** ZIPF
    asked = rng.choice(TRACE_IMAGES, TRACE_LOOKUPS, p=weights / weights.sum())
    cache = EncoderCache(Sizes(), max_bytes=CACHE_BYTES, ttl_seconds=float("inf"))
    hits = 0
    for now, image in enumerate(asked.tolist()):
        key = int(image).to_bytes(32, "little")
        entry = cache.lookup(key, now, num_tokens=num_tokens, now=now)
        hits += entry is not None
        if entry is None:
            entry = cache.begin(key, now, num_tokens=num_tokens)
            cache.complete(entry, num_bytes, now=now)
        cache.unpin(entry, now, now=now)
    return hits / len(asked)


if __name__ == "__main__":
    main()
