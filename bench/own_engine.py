"""Our side of a benchmark: the engine thread with the model runner, all stages in one process."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("worker", "kernels")]

from vlm_worker.engine.engine import Engine  # noqa: E402
from vlm_worker.engine.settings import EngineSettings, EngineStats  # noqa: E402
from vlm_worker.model.build import RunnerSettings, build_runner  # noqa: E402
from vlm_worker.reduction import Reduction  # noqa: E402
from vlm_worker.serve.process import freeze_gc  # noqa: E402
from vlm_worker.types import (  # noqa: E402
    FailedEvent,
    ImageItem,
    PreparedImage,
    Request,
    RequestKey,
    SamplingParams,
    Stage,
    TokenEvent,
)


@dataclasses.dataclass(frozen=True, slots=True)
class ImageInput:
    """Input of the vision tower: float32 `[t * h * w, patch_dim]`; `key` identifies it.

    `num_tokens` is of the whole image; a prompt has as many as `reduction` keeps. `relevance` is
    that of `PreparedImage`.
    """

    key: int
    grid_thw: tuple[int, int, int]
    num_tokens: int
    patches: np.ndarray
    reduction: Reduction | None = None
    relevance: bytes = b""

    def prepared(self) -> PreparedImage:
        """The image as the engine's input."""
        data = self.patches.reshape(-1).data.cast("B")
        key = self.key.to_bytes(32, "little")
        known = key, self.grid_thw, self.num_tokens
        return PreparedImage(*known, data, self.reduction, self.relevance)

    def item(self, offset: int) -> ImageItem:
        """The image at its offset in a prompt."""
        image = self.prepared()
        return ImageItem(image.kept_key, offset, image.kept_tokens, self.grid_thw, self.reduction)


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One request: its tokens, its image at `offset`, and the number of answer tokens."""

    token_ids: Sequence[int]
    num_output: int
    image: ImageInput | None = None
    offset: int = 0


class OwnEngine:
    """Answers prompts and records the time of each token."""

    def __init__(
        self, model_dir: Path, *, dtype: str = "bfloat16", threads: int = 0, **options: Any
    ) -> None:
        """Load; `options` may set `packed_weights`, `weights` and `max_batched_tokens`."""
        packed = bool(options.get("packed_weights", True))
        settings = RunnerSettings(
            model_dir, tuple(Stage), dtype=dtype, kv_memory_bytes=1 << 30, num_threads=threads,
            packed_weights=packed, weights=str(options.get("weights", "auto")),
        )  # fmt: skip
        self.runner = build_runner(settings)
        batched = int(options.get("max_batched_tokens", 2048))
        self._engine = Engine(
            self.runner,
            settings=EngineSettings(
                max_model_len=8192, max_num_seqs=min(256, batched), max_num_batched_tokens=batched
            ),
            positions=self.runner.family.positions,
        )
        self._loop = asyncio.new_event_loop()
        self._engine.start(self._loop)
        freeze_gc()  # as a worker does
        self._number = 0

    def answer(
        self, prompts: Sequence[Prompt], *, after: Sequence[float] | None = None
    ) -> list[list[float]]:
        """Submit all prompts at once, or each after its seconds; the times of their tokens."""
        delays = [0.0] * len(prompts) if after is None else after
        return self._loop.run_until_complete(self._gather(prompts, delays))

    def held_kv_bytes(self, prompt: Prompt) -> int:
        """KV bytes of a single prompt after its first token."""
        request = self._loop.run_until_complete(self._prefill(prompt))
        while (kv := self.stats.kv) is None or not kv.running_tokens:
            time.sleep(0.001)  # noqa: TID251  stats are polled; a snapshot is at most so old
        self._loop.run_until_complete(self._engine.cancel(request.key))
        layout = self.runner.kv_layout
        assert layout is not None
        return kv.running_tokens * layout.token_bytes

    @property
    def stats(self) -> EngineStats:
        """The latest stats of the engine."""
        return self._engine.stats()

    def close(self) -> None:
        """End the thread."""
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()

    async def _gather(
        self, prompts: Sequence[Prompt], delays: Sequence[float]
    ) -> list[list[float]]:
        answers = map(self._answer, prompts, delays)
        return await asyncio.gather(*answers)

    async def _answer(self, prompt: Prompt, delay: float) -> list[float]:
        await asyncio.sleep(delay)
        request = self._submit(prompt)
        times = await self._token_times(request, for_peer=False)
        await self._engine.cancel(request.key)
        return times

    async def _prefill(self, prompt: Prompt) -> Request:
        request = self._submit(prompt)
        await self._token_times(request, for_peer=True)
        return request

    def _submit(self, prompt: Prompt) -> Request:
        """Submit a prompt and its image."""
        self._number += 1
        image = prompt.image
        request = Request(
            RequestKey(f"r{self._number}", 0),
            tuple(prompt.token_ids),
            len(prompt.token_ids),
            SamplingParams(max_tokens=prompt.num_output, ignore_eos=True),
            () if image is None else (image.item(prompt.offset),),
        )
        if image is not None:
            self._engine.encode(request.key, [image.prepared()])
        return request

    async def _token_times(self, request: Request, *, for_peer: bool) -> list[float]:
        times = []
        async for event in self._engine.submit_prefill(request, for_peer=for_peer):
            if isinstance(event, FailedEvent):
                raise event.error
            if isinstance(event, TokenEvent):
                times.append(time.perf_counter())
        return times
