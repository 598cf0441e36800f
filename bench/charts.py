"""Draws the plots of docs/performance.md from recorded lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plot import Bars, Line, Plot, write_svg

CACHED = {
    "empty": "two words",
    "text": "text alone",
    "new": "new image",
    "repeated": "cached image",
    "text again": "cached text prefix",
    "image again": "cached image prompt",
}
LITTLE = 0.005
"""Share of the longest bar. Stages that never take more are drawn as one."""


def write_all(lines: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw every plot that has lines."""
    files = {
        "latency.svg": [between_tokens(lines), decode_steps(lines)],
        "first-token.svg": [first_token(lines), cache_hits(lines)],
        "batching.svg": [ways_of_batching(lines), chunks_of_prompts(lines)],
        "memory.svg": [read_in_decode(lines), kv_of_images(lines)],
    }
    for name, plots in files.items():
        found = [plot for plot in plots if plot is not None]
        if found:
            write_svg(folder / name, found)


def between_tokens(lines: Sequence[dict[str, Any]]) -> Plot | None:
    """Median gap by concurrency, one curve per number of visual tokens."""
    points: dict[int, list[tuple[float, float]]] = {}
    for line in _of(lines, "curves.itl"):
        points.setdefault(line["visual_tokens"], []).append((line["concurrency"], line["p50_ms"]))
    curves = [Line(f"{number} visual tokens", kept) for number, kept in points.items()]
    title = "small model: time between tokens, median, ms"
    return Plot(title, "concurrent requests", curves) if curves else None


def decode_steps(lines: Sequence[dict[str, Any]]) -> Plot | None:
    """A decode step in bfloat16 and int8, and its limit."""
    found = _of(lines, "decode")
    kinds = {
        "bfloat16": lambda line: line["ms"],
        "int8 weights": lambda line: line["ms"] * line["int8_ratio"],
        "limit in bfloat16": lambda line: line["ms"] * line["of_limit"],
    }
    curves = [
        Line(name, [(line["batch"], round(value(line), 2)) for line in found])
        for name, value in kinds.items()
    ]
    return Plot("400M model: a decode step, ms", "sequences", curves) if found else None


def first_token(lines: Sequence[dict[str, Any]]) -> Bars | None:
    """Stages of TTFT, one bar per case."""
    rows: dict[str, Mapping[str, float]] = {
        line["what"]: line["stages"] for line in _of(lines, "ttft")
    }
    if not rows:
        return None
    longest = max(sum(stages.values()) for stages in rows.values())
    most_stages_first = sorted(rows.values(), key=len, reverse=True)
    names = list(dict.fromkeys(name for stages in most_stages_first for name in stages))
    large = [
        name
        for name in names
        if any(stages.get(name, 0.0) > LITTLE * longest for stages in rows.values())
    ]
    bars = {
        what: {
            **{name: stages.get(name, 0.0) for name in large},
            "other stages": sum(ms for name, ms in stages.items() if name not in large),
        }
        for what, stages in rows.items()
    }
    return Bars("400M model: time to the first token, ms", bars)


def kv_of_images(lines: Sequence[dict[str, Any]]) -> Plot | None:
    """KV of a request by the side length of its square image."""
    points = [(line["side_pixels"], line["kv_bytes"] / 2**20) for line in _of(lines, "curves.kv")]
    title = "small model: KV of a request, MiB"
    return Plot(title, "side of the image, pixels", [Line("", points)]) if points else None


def cache_hits(lines: Sequence[dict[str, Any]]) -> Bars | None:
    """TTFT with and without cache hits, larger model."""
    found = [line["ms"] for line in _of(lines, "cache")]
    if not found:
        return None
    rows = {CACHED[kind]: {"": ms} for kind, ms in found[-1].items()}
    return Bars("8 layers of 512, prompts of 1,000 tokens: TTFT, ms", rows)


def ways_of_batching(lines: Sequence[dict[str, Any]]) -> Plot | None:
    """Latency percentiles of static and continuous batching."""
    curves = [
        Line(
            f"{line['what']}, {name}",
            [(float(percent[1:]), ms) for percent, ms in line[kind].items()],
        )
        for line in _of(lines, "batching.trace")
        for name, kind in (("last token", "latency_ms"), ("first token", "ttft_ms"))
    ]
    title = "small model: time to a token by percentile, ms"
    return Plot(title, "percentile of requests", curves) if curves else None


def chunks_of_prompts(lines: Sequence[dict[str, Any]]) -> Plot | None:
    """TTFT of a long prompt, and the longest gap of a running answer, by chunk size."""
    found = sorted(_of(lines, "batching.chunks"), key=lambda line: line["tokens_of_a_step"])
    kinds = {
        "longest gap in an answer": "longest_gap_ms",
        "TTFT of a prompt of 2,000 words": "ttft_of_prompt_ms",
    }
    curves = [
        Line(name, [(line["tokens_of_a_step"], line[key]) for line in found])
        for name, key in kinds.items()
    ]
    title = "small model: chunked prefill, ms"
    return Plot(title, "tokens per step", curves) if found else None


def read_in_decode(lines: Sequence[dict[str, Any]]) -> Plot | None:
    """Bytes of weights and KV that a step reads per second, and the probed bandwidth."""
    found = [line for line in _of(lines, "decode") if "gb_per_second" in line]
    kinds = {"read in a step": "gb_per_second", "probed in the same round": "read_gb_per_second"}
    curves = [
        Line(name, [(line["batch"], line[key]) for line in found]) for name, key in kinds.items()
    ]
    title = "400M model: weights and KV read in decode, GB/s"
    return Plot(title, "sequences", curves) if found else None


def _of(lines: Sequence[dict[str, Any]], bench: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["bench"] == bench]
