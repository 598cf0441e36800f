"""Questions through real engines in this process: colocated, or each stage apart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

from worker.identity.law import Law, request_for
from worker.identity.questions import Question

from vlm_worker.attends import Attends
from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import ItemReady, NeedItems
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import OverloadedError
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import FailedEvent, FinishedEvent, FinishReason, Request, Stage, TokenEvent

EOS = 2
_numbers = itertools.count()


def make_runner(
    model_dir: Path,
    *stages: Stage,
    block_size: int = 64,
    kv_memory_bytes: int = 256 << 20,
    window_cache_bytes: int = 0,
) -> ModelRunner:
    """A float32 runner; without stages, of all of them."""
    return build_runner(
        RunnerSettings(
            model_dir,
            stages or tuple(Stage),
            dtype="float32",
            block_size=block_size,
            kv_memory_bytes=kv_memory_bytes,
            window_cache_bytes=window_cache_bytes,
        )
    )


@contextlib.asynccontextmanager
async def running(
    runner: ModelRunner, *, max_num_batched_tokens: int = 1024, **more: Any
) -> AsyncIterator[Engine]:
    """An engine that runs while the block lasts, and is empty at its end.

    Args:
        runner: the model.
        max_num_batched_tokens: tokens of one step.
        more: other fields of EngineSettings.
    """
    bounds: dict[str, Any] = {
        "max_model_len": 2048,
        "eos_token_ids": (EOS,),
        "max_num_seqs": min(32, max_num_batched_tokens),
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_waiting": 4096,
        "max_waiting_images": 4096,
        "whole_prompts": runner.family.spec.attends is Attends.PREFIX,
        "whole_images": runner.family.spec.attends.keeps_images_whole,
        "strict": True,
    }
    settings = EngineSettings(**bounds | more)
    engine = Engine(runner, settings=settings, positions=runner.family.positions)
    engine.start(asyncio.get_running_loop())
    try:
        yield engine
        assert engine.healthy
    finally:
        await engine.stop()


class Stages:
    """Where each stage of a question runs; bytes pass between unlike engines, as over the wire."""

    def __init__(
        self, encoder: Engine, prefill: Engine, decode: Engine, *, block_size: int,
        max_tokens: int, ignore_eos: bool = False, kinds: BlockKinds | None = None,
    ) -> None:  # fmt: skip
        self._encoder, self._prefill, self._decode = encoder, prefill, decode
        self._kinds = kinds or BlockKinds(block_size)
        self._max_tokens, self._ignore_eos = max_tokens, ignore_eos
        self.num_continued = 0

    @classmethod
    def colocated(cls, engine: Engine, *, max_tokens: int, ignore_eos: bool = False) -> Self:
        """All in one engine; no block leaves it, so it matters not how large they are."""
        return cls(
            engine, engine, engine, block_size=0, max_tokens=max_tokens, ignore_eos=ignore_eos
        )

    async def ask(self, question: Question, delivered: Sequence[int] = ()) -> list[int]:
        """The answer's tokens after the delivered ones, continued as often as decode ends it."""
        tokens, drained = await self._attempt(question, delivered)
        while drained:
            self.num_continued += 1
            more, drained = await self._attempt(question, (*delivered, *tokens))
            tokens += more
        return tokens

    async def _attempt(
        self, question: Question, delivered: Sequence[int]
    ) -> tuple[list[int], bool]:
        request = request_for(
            question,
            delivered,
            request_id=f"q{next(_numbers)}",
            max_tokens=self._max_tokens,
            ignore_eos=self._ignore_eos,
        )
        images = self._encoder.encode(request.key, question.prepared_images)
        if self._encoder is not self._prefill:
            await all_ready(images)
        answer = await self._answer(request)
        if self._encoder is self._prefill:
            await all_ready(images)
        for item in range(len(question.prepared_images)):
            self._encoder.release_embedding(request.key, item)
        for engine in {self._prefill, self._decode}:
            await engine.release(request.key)
        return answer

    async def _answer(self, request: Request) -> tuple[list[int], bool]:
        apart = self._decode is not self._prefill
        if apart:
            await self._reserve(request)
        embeddings = None if self._encoder is self._prefill else self._encoder
        first = await collect(self._prefill, request, for_peer=apart, embeddings=embeddings)
        num_tokens = len(request.token_ids) - request.num_prompt_tokens + len(first)
        ended = first[-1] == EOS and not self._ignore_eos
        if not apart or ended or num_tokens == self._max_tokens:
            return first, False
        start = (await self._decode.receive(request)).first_block
        shape = self._kinds.of_items(request.items)
        end = shape.num_blocks(len(request.token_ids))
        if start < end:
            blocks = await asyncio.to_thread(
                self._prefill.readable_blocks.copy, request.key, start, end - start
            )
            await self._decode.import_blocks(request.key, start, memoryview(bytes(blocks)))
        stream = await self._decode.start_decode(request.key, first[-1])
        rest, reason = await drain(stream)
        return first + rest, reason is FinishReason.DRAINED

    async def _reserve(self, request: Request) -> None:
        """Reserve KV for the known tokens and one more, as the gateway does, once it is free."""
        while True:
            try:
                return await self._decode.reserve(request.key, len(request.token_ids) + 1)
            except OverloadedError:
                await asyncio.sleep(0.005)


async def all_ready(images: AsyncIterator[object]) -> None:
    """Wait until each image is encoded."""
    async for event in images:
        assert isinstance(event, ItemReady), event


async def collect(
    engine: Engine, request: Request, *, for_peer: bool, embeddings: Engine | None = None
) -> list[int]:
    """Tokens of a submitted request; embeddings it asks for come from another engine."""
    tokens: list[int] = []
    async for event in engine.submit_prefill(request, for_peer=for_peer):
        if isinstance(event, NeedItems) and embeddings is not None:
            for item in event.items:
                rows = await embeddings.export_embedding(request.key, item)
                await engine.put_embedding(request.key, item, memoryview(bytes(rows)))
        elif isinstance(event, TokenEvent):
            tokens.append(event.token_id)
        elif isinstance(event, FailedEvent):
            raise event.error
    return tokens


async def drain(stream: AsyncIterator[object]) -> tuple[list[int], FinishReason]:
    """Tokens of a stream, which must end with FinishedEvent, and its reason."""
    tokens, last = [], None
    async for event in stream:
        last = event
        if isinstance(event, TokenEvent):
            tokens.append(event.token_id)
        elif isinstance(event, FailedEvent):
            raise event.error
    assert isinstance(last, FinishedEvent), last
    return tokens, last.reason


async def hold_law(law: Law, asker: Stages) -> None:
    """Ask everything at once, until nothing is pending, and check."""
    while law.pending:
        law.record(await asyncio.gather(*(asker.ask(q, d) for q, d in law.pending)))
    law.check()
