"""CUDA graphs of decode steps: captured once per size, replayed with one copy and one launch.

    warm-up    each size: run it, capture it         Python launches about ten kernels per layer
    decode     load the arrays, replay               Python launches no kernel
    others     prompt chunks, too many or too long sequences: run without a graph

A graph runs the same kernels in the same order, on arrays of the next larger size. Sampling is not
captured, because its parameters differ between requests.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vlm_worker.core.step_values import StepInputs
from vlm_worker.model.attention import StepContext
from vlm_worker.model.gpu.decode_steps import StaticStep, is_decode, size_for, static_steps
from vlm_worker.types import KVLayout

logger = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor, StepContext], torch.Tensor]
"""Ids `[T]`, positions `[P, T]` and step to logits `[T, vocabulary]`."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Runs a callable once, which makes its plans and compiles its kernels, then captures it.

The returned Replay launches the same kernels on the same memory, without Python."""


class DecodeGraphs:
    """The graphs of one model and one KV cache. Only the runner's thread calls them."""

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
        """The captured sizes, ascending."""
        return tuple(sorted(self._replays))

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture each size, the largest first, so that the others reuse its memory."""
        for size in sorted(self._steps, reverse=True):
            self._capture(self._steps[size], capture)

    @torch.inference_mode()
    def needed_bytes(self, capture: Capture, *, free_bytes: Callable[[], int]) -> int:
        """Estimate the bytes that all graphs need, from captures of the two largest sizes."""
        free = [free_bytes()]
        for size in sorted(self._steps, reverse=True)[:2]:
            self._capture(self._steps[size], capture)
            free.append(free_bytes())
        used = [before - after for before, after in itertools.pairwise(free)]
        return total_bytes(used, len(self._steps))

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> torch.Tensor | None:
        """Replay a step; None if no graph supports it.

        Returns:
            Logits `[S, vocabulary]`, valid until the next step.

        Raises:
            ValueError: as `StaticStep.load`.
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
            if self._logits is None:  # the first capture is of the largest size
                self._logits = torch.empty_like(logits)
            self._logits[: step.size].copy_(logits)

        self._replays[step.size] = capture(run)


class GpuCapture:
    """Captures on a separate stream. All graphs share one pool, because one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Run once on the stream, so that libraries allocate their workspaces, then capture."""
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


def trial_bytes(graphs: DecodeGraphs, device: torch.device) -> int:
    """Estimate the GPU memory of graphs in bytes; 0 if they cannot be captured."""

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
    """Capture all graphs; returns None and logs a warning if a step cannot be captured."""
    began = time.perf_counter()
    try:
        graphs.capture(GpuCapture(device))
    except RuntimeError as error:  # CUDA errors of torch, out of memory included
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


def total_bytes(used: Sequence[int], num_graphs: int) -> int:
    """Extrapolate the bytes of all graphs.

    Args:
        used: bytes of the largest graph, and of the next one in the same pool, if there is one.
        num_graphs: number of graphs.
    """
    largest, *another = (max(0, num_bytes) for num_bytes in used)
    return largest + sum(another) * (num_graphs - 1)
