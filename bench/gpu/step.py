"""A whole decode step of a 7B model's shapes with random weights, in one CUDA graph: G6.

    x ─▶ add, norm ─▶ q, k, v ─▶ rotate, store ─▶ attend ─▶ o
      ─▶ add, norm ─▶ silu(gate) * up ─▶ down

Share of read bandwidth: bytes of weights and KV, each read once: at least 0.70. `gap` is what a
step takes beyond its graph when Python makes the plan and replays: at most 150 us at 256 sequences.
The rest of a server's step is not in it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from shapes import TINY, Heads, Steps
from timing import Bench, Case, captured, report
from torch.nn import functional

from vlm_kernels import add_rms_norm, paged_attention, rope_store_kv, silu_mul
from vlm_kernels.attention_plan import AttentionPlan

BATCHES = ((1, 1024), (64, 1024), (256, 256))
"""Sequences, and tokens of each: 256 of 1024 are 137 GB of KV."""
VOCABULARY = 32000


@dataclasses.dataclass
class Layer:
    """Weights and the cache of one layer."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor]
    cache: torch.Tensor


class Decoder:
    """LLaVA-7B's language model: 32 layers of 4096, MLP of 11008."""

    def __init__(self, bench: Bench, steps: Steps, *, num_layers: int, inner: int) -> None:
        heads = steps.heads
        self.heads, size = heads, heads.num_heads * heads.head_dim
        joint = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        small = size**-0.5
        self.layers = [
            Layer(
                bench.randn(joint, size) * small,
                bench.randn(size, size) * small,
                bench.randn(2 * inner, size) * small,
                bench.randn(size, inner) * inner**-0.5,
                (bench.randn(size), bench.randn(size)),
                steps.cache(bench, bench.dtype),
            )
            for _ in range(num_layers)
        ]
        self.head = bench.randn(64 if bench.is_smoke else VOCABULARY, size) * small

    @property
    def weight_bytes(self) -> int:
        """That a step reads."""
        of_layers = [w for x in self.layers for w in (x.qkv, x.o, x.gate_up, x.down)]
        return sum(w.numel() * w.element_size() for w in (*of_layers, self.head))

    def step(
        self, x: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Tokens of the greatest logits."""
        heads, residual = self.heads, torch.zeros_like(x)
        sizes = [n * heads.head_dim for n in (heads.num_heads, *(heads.num_kv_heads,) * 2)]
        for layer in self.layers:
            y, residual = add_rms_norm(x, residual, layer.norms[0], eps=1e-6)
            parts = functional.linear(y, layer.qkv).split(sizes, dim=-1)
            q, k, v = (part.unflatten(-1, (-1, heads.head_dim)) for part in parts)
            rope_store_kv(q, k, v, table, table, layer.cache, 0, slots)
            o = paged_attention(q, layer.cache, 0, plan, scale=heads.head_dim**-0.5)
            x = functional.linear(o.flatten(1), layer.o)
            y, residual = add_rms_norm(x, residual, layer.norms[1], eps=1e-6)
            gate, up = functional.linear(y, layer.gate_up).chunk(2, dim=-1)
            x = functional.linear(silu_mul(gate, up), layer.down)
        return functional.linear(x + residual, self.head).argmax(-1)


def cases(bench: Bench) -> Iterator[Case]:
    """One line per batch."""
    heads = TINY[0] if bench.is_smoke else Heads("llava-7b", 32, 32, 128)
    for batch, total in ((2, 20),) if bench.is_smoke else BATCHES:
        yield functools.partial(measure, bench, Steps(heads, [1] * batch, [total] * batch))


def measure(bench: Bench, steps: Steps) -> dict[str, Any]:
    """The step alone, and with its plan made in Python before each replay."""
    num_layers, inner = (1, 48) if bench.is_smoke else (32, 11008)
    decoder = Decoder(bench, steps, num_layers=num_layers, inner=inner)
    batch = len(steps.totals)
    x = bench.randn(batch, steps.heads.num_heads * steps.heads.head_dim)
    table = bench.randn(batch, steps.heads.head_dim)
    last = torch.tensor(steps.totals) - 1
    block = torch.from_numpy(steps.table()).long()[torch.arange(batch), last // steps.block_size]
    slots = (block * steps.block_size + last % steps.block_size).to(bench.device)
    cache = decoder.layers[0].cache
    plan = steps.plan(cache, bench.dtype)

    def step() -> None:
        decoder.step(x, table, slots, plan)

    took = bench.medians({"ours": step})
    of = decoder.weight_bytes + len(decoder.layers) * steps.kv_bytes(bench.dtype)
    name = f"step/{steps.heads.name}/b{batch}/ctx{steps.totals[0]}"
    line = report(name, took, of=of, limit=bench.limits.read)
    line["goals"] = {"G6": line["share"]["ours"] >= 0.70}
    if bench.device.type == "cuda":
        replay = captured(step)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            steps.plan(cache, bench.dtype)
            replay()
            torch.cuda.synchronize()
        gap = (time.perf_counter() - began) / 20 - took["ours"]
        line["gap_microseconds"] = round(gap * 1e6, 1)
        line["goals"]["G6"] &= batch < 256 or gap <= 150e-6
    return line
