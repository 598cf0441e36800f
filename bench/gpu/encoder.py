"""The time between tokens while images are encoded on the same GPU: a stream of their own or not.

    alone     steps of decode, no images
    in turn   a call of the tower between every two steps, on their stream: no more than one waits
    beside    calls of the tower one after the other, on a stream and a thread of their own
    compiled  the same, the tower's layers compiled by torch

A step is a 7B decoder's in a CUDA graph, 64 sequences, and ends when its tokens are on the host.
The tower has Qwen2.5-VL's shapes with random weights. `calls_per_second` says what of the encoder
each way leaves: tokens that come faster because fewer images are encoded are no gain.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from shapes import TINY, Heads, Steps
from step import Decoder
from timing import Bench, Case, captured
from torch.nn import functional

from vlm_kernels import varlen_attention
from vlm_worker.model.gpu.streams import CudaStreams, OverlappedStreams, SingleStream

BATCH, TOTAL = 64, 1024
PATCHES = (1024, 4096)
"""Of one call: an image of 448 x 448 pixels, and the engine's largest while sequences decode."""
STEPS_A_ROUND = 100

Tower = Callable[[], torch.Tensor]


def cases(bench: Bench) -> Iterator[Case]:
    """One line per size of a call."""
    heads = TINY[0] if bench.is_smoke else Heads("llava-7b", 32, 32, 128)
    batch, total = (2, 20) if bench.is_smoke else (BATCH, TOTAL)
    steps = Steps(heads, [1] * batch, [total] * batch)
    layers, inner = (1, 48) if bench.is_smoke else (32, 11008)
    step = _step(bench, steps, Decoder(bench, steps, num_layers=layers, inner=inner))
    for num_patches in (16,) if bench.is_smoke else PATCHES:
        yield functools.partial(measure, bench, step, num_patches)


def measure(bench: Bench, step: Callable[[], torch.Tensor], num_patches: int) -> dict[str, Any]:
    """All ways, interleaved."""
    tower = functools.partial(_tower, bench, num_patches)
    written, compiled = tower(is_compiled=False), tower(is_compiled=not bench.is_smoke)
    two = (
        OverlappedStreams(CudaStreams(bench.device))
        if bench.device.type == "cuda"
        else SingleStream()
    )
    ways: dict[str, tuple[SingleStream, Tower | None]] = {
        "alone": (two, None),
        "in turn": (SingleStream(), written),
        "beside": (two, written),
        "compiled": (two, compiled),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    calls = dict.fromkeys(ways, 0)
    for way in ways.values():
        _round(step, *way, count=2)  # what is made only once
    for _ in range(bench.rounds):
        for name, way in ways.items():
            took, num_calls = _round(step, *way, count=2 if bench.is_smoke else STEPS_A_ROUND)
            seconds[name] += took
            calls[name] += num_calls
    line: dict[str, Any] = {"case": f"encoder/{num_patches} patches"}
    for key, percent in (("microseconds", 50), ("p99_microseconds", 99)):
        line[key] = {
            name: round(float(np.percentile(took, percent)) * 1e6, 1)
            for name, took in seconds.items()
        }
    line["calls_per_second"] = {
        name: round(calls[name] / sum(took), 2) for name, took in seconds.items()
    }
    return line


def _round(
    step: Callable[[], torch.Tensor], streams: SingleStream, tower: Tower | None, *, count: int
) -> tuple[list[float], int]:
    """Seconds between the tokens of so many steps, and the calls of the tower that have ended."""

    @torch.inference_mode()
    def encode() -> tuple[torch.Tensor, Any]:
        assert tower is not None
        with streams.images():
            rows = tower().clone()
            bool(torch.isfinite(rows).all())  # as the worker waits for it
            return rows, streams.made()

    took: list[float] = []
    running: Future[tuple[torch.Tensor, Any]] | None = None
    num_calls, before = 0, time.perf_counter()
    for _ in range(count):
        made = None
        if tower is not None and running is None:
            running = streams.encode_async(encode)
            made = encode() if running is None else None
        elif running is not None and running.done():
            made, running = running.result(), None
        with streams.steps():
            if made is not None:
                num_calls += 1
                streams.take(*made)
                made[0].sum()
            step().cpu()
        now = time.perf_counter()
        took.append(now - before)
        before = now
    if running is not None:
        running.result()
    return took, num_calls


def _step(bench: Bench, steps: Steps, decoder: Decoder) -> Callable[[], torch.Tensor]:
    """A step whose tokens are in memory that the next one writes."""
    batch, heads = len(steps.totals), steps.heads
    x = bench.randn(batch, heads.num_heads * heads.head_dim)
    table = bench.randn(batch, heads.head_dim)
    last = torch.tensor(steps.totals) - 1
    block = torch.from_numpy(steps.table()).long()[torch.arange(batch), last // steps.block_size]
    slots = (block * steps.block_size + last % steps.block_size).to(bench.device)
    plan = steps.plan(decoder.layers[0].cache, bench.dtype)
    tokens = torch.zeros(batch, dtype=torch.int64, device=bench.device)

    def run() -> None:
        tokens.copy_(decoder.step(x, table, slots, plan))

    replay = captured(run) if bench.device.type == "cuda" else run

    def step() -> torch.Tensor:
        replay()
        return tokens

    return step


def _tower(bench: Bench, num_patches: int, *, is_compiled: bool) -> Tower:
    """A call of it: layers of norm, attention in one frame, norm and a plain MLP."""
    size, heads, inner, count = (32, 2, 48, 1) if bench.is_smoke else (1280, 16, 3420, 32)
    x = bench.randn(num_patches, size)
    cu = torch.tensor([0, num_patches], dtype=torch.int32, device=bench.device)
    shapes = ((3 * size, size), (size, size), (inner, size), (size, inner))
    weights = [[bench.randn(*shape) * shape[1] ** -0.5 for shape in shapes] for _ in range(count)]

    def layer(x: torch.Tensor, qkv: torch.Tensor, o: torch.Tensor, *mlp: torch.Tensor) -> Any:
        parts = functional.linear(functional.layer_norm(x, (size,)), qkv)
        q, k, v = parts.view(-1, 3, heads, size // heads).unbind(1)
        attended = varlen_attention(q, k, v, cu, scale=(size // heads) ** -0.5).flatten(1)
        x = x + functional.linear(attended, o)
        hidden = functional.linear(functional.layer_norm(x, (size,)), mlp[0])
        return x + functional.linear(functional.gelu(hidden, approximate="tanh"), mlp[1])

    compute = torch.compile(layer, fullgraph=True, dynamic=True) if is_compiled else layer

    def call() -> torch.Tensor:
        y = x
        for one in weights:
            y = compute(y, *one)
        return y

    return call
