"""Steps of decode as CUDA graphs: captured once per size, replayed with one copy and one launch.

    warm-up    each size: run it, capture it         Python calls some ten kernels a layer
    decode     load the arrays, replay               Python calls none of them
    others     a chunk of a prompt, too many sequences, too long ones: the model itself

The answer is that of the same kernels in the same order, on arrays of the next larger size. What a
token is chosen by is not captured: requests differ in it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vlm_kernels import gpu
from vlm_worker.core.inputs import StepInputs
from vlm_worker.model.attention import StepContext
from vlm_worker.model.gpu.decode_steps import StaticStep, is_decode, size_for, static_steps
from vlm_worker.types import KVLayout

logger = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor, StepContext], torch.Tensor]
"""Ids `[T]`, positions `[P, T]` and step to logits `[T, vocabulary]`."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Runs a callable, which makes its plans and compiles its kernels, then captures it.

What is given launches the same kernels on the same memory again, and runs no Python."""


class DecodeGraphs:
    """The graphs of one model and one KV cache. Called by the runner's thread."""

    def __init__(
        self,
        forward: Forward,
        kv_cache: torch.Tensor,
        layout: KVLayout,
        *,
        num_heads: int,
        sizes: Sequence[int],
        num_position_rows: int,
        max_model_len: int,
    ) -> None:
        self._forward, self._kv_cache, self._layout = forward, kv_cache, layout
        self._num_heads = num_heads
        self._steps = static_steps(
            sizes,
            num_position_rows=num_position_rows,
            table_width=-(-max_model_len // layout.block_size),
            device=kv_cache.device,
        )
        self._replays: dict[int, Replay] = {}
        self._logits: torch.Tensor | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """That are captured."""
        return tuple(sorted(self._replays))

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture every size, the largest first: the others find room in its memory."""
        for size in sorted(self._steps, reverse=True):
            self._capture(self._steps[size], capture)

    @torch.inference_mode()
    def needed_bytes(self, capture: Capture, *, free_bytes: Callable[[], int]) -> int:
        """What `capture` is going to take, by trying the two largest sizes."""
        free = [free_bytes()]
        for size in sorted(self._steps, reverse=True)[:2]:
            self._capture(self._steps[size], capture)
            free.append(free_bytes())
        taken = [before - after for before, after in itertools.pairwise(free)]
        return total_bytes(taken, len(self._steps))

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> torch.Tensor | None:
        """Logits `[S, vocabulary]`, until the next step; None where no graph serves this one.

        Raises:
            ValueError: as of `plan_attention`.
        """
        size = size_for(len(inputs.context_lens), self.sizes)
        if size is None or not is_decode(inputs) or not self._steps[size].fits(inputs):
            return None
        self._steps[size].load(inputs, self._kv_cache, head_dim=self._layout.head_dim)
        self._replays[size]()
        assert self._logits is not None
        return self._logits[: len(inputs.context_lens)]

    def _capture(self, step: StaticStep, capture: Capture) -> None:
        fields = step.fields
        context = StepContext(
            self._kv_cache,
            fields.slots,
            lambda window: step.plan(
                window,
                self._kv_cache,
                head_dim=self._layout.head_dim,
                num_heads=self._num_heads,
            ),
        )
        step.clear()

        def run() -> None:
            logits = self._forward(fields.ids, fields.positions, context)
            if self._logits is None:  # of the largest size, which is the first
                self._logits = torch.empty_like(logits)
            self._logits[: step.size].copy_(logits)

        self._replays[step.size] = capture(run)


class GpuCapture:
    """Captures on a stream of its own; all graphs share one pool of memory, one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Run once on that stream, so that libraries have their workspaces there; then capture."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            run()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        replay: Replay = graph.replay
        return replay


def can_capture(device: torch.device) -> bool:
    """Whether steps on this device are kernels that a graph can hold."""
    return device.type == "cuda" and gpu.serves(device)


def trial_bytes(graphs: DecodeGraphs, device: torch.device) -> int:
    """What such graphs are going to take of a GPU's memory; 0 where they cannot be captured."""

    def free_bytes() -> int:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])

    try:
        return graphs.needed_bytes(GpuCapture(device), free_bytes=free_bytes)
    except RuntimeError as error:
        logger.info("graphs cannot be tried", extra={"error": repr(error)})
        return 0


def captured(graphs: DecodeGraphs, device: torch.device) -> DecodeGraphs | None:
    """Capture on a GPU; None, and a line in the log, where a step does what a graph cannot."""
    began = time.perf_counter()
    try:
        graphs.capture(GpuCapture(device))
    except RuntimeError as error:  # torch's of CUDA are, want of memory included
        logger.warning(
            "decode is not captured in CUDA graphs: Python launches each kernel, slower",
            extra={"error": repr(error)},
        )
        return None
    logger.info(
        "decode captured",
        extra={"sizes": graphs.sizes, "seconds": round(time.perf_counter() - began, 3)},
    )
    return graphs


def total_bytes(taken: Sequence[int], num_graphs: int) -> int:
    """What all graphs take, by what the largest took, and then one more that shares its pool."""
    largest, *another = (max(0, num_bytes) for num_bytes in taken)
    return largest + sum(another) * (num_graphs - 1)
