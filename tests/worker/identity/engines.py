"""Questions through real engines in this process: colocated, or each stage apart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from worker.identity.law import Law, request_for
from worker.identity.questions import Question

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import ItemFailed, ItemReady, NeedItems
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.model.runner import ModelRunner, RunnerSettings, build_runner
from vlm_worker.types import (
    FailedEvent,
    FinishedEvent,
    Request,
    Stage,
    TokenEvent,
)

EOS = 2
_numbers = itertools.count()


def make_runner(
    model_dir: Path, *stages: Stage, block_size: int = 64, kv_memory_bytes: int = 256 << 20
) -> ModelRunner:
    """A float32 runner; without stages, of all of them."""
    return build_runner(
        RunnerSettings(
            model_dir,
            stages or tuple(Stage),
            dtype="float32",
            block_size=block_size,
            kv_memory_bytes=kv_memory_bytes,
        )
    )


@contextlib.asynccontextmanager
async def running(
    runner: ModelRunner, *, max_num_batched_tokens: int = 1024, max_model_len: int = 2048
) -> AsyncIterator[Engine]:
    """An engine that runs while the block lasts, and is empty at its end."""
    settings = EngineSettings(
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        max_num_seqs=min(32, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting=4096,
        max_waiting_images=4096,
        strict=True,
    )
    engine = Engine(runner, settings=settings, positions=runner.family.positions)
    engine.start(asyncio.get_running_loop())
    try:
        yield engine
        assert engine.healthy
    finally:
        await engine.stop()


class Colocated:
    """One engine with all stages."""

    def __init__(self, engine: Engine, *, max_tokens: int, ignore_eos: bool = False) -> None:
        self._engine, self._max_tokens, self._ignore_eos = engine, max_tokens, ignore_eos

    async def ask(self, question: Question, delivered: Sequence[int] = ()) -> list[int]:
        """The answer's tokens after the delivered ones."""
        request = request_for(
            question,
            delivered,
            request_id=f"q{next(_numbers)}",
            max_tokens=self._max_tokens,
            ignore_eos=self._ignore_eos,
        )
        pictures = self._engine.encode(request.key, question.pictures)
        tokens = await collect(self._engine, request, hold=False)
        async for event in pictures:
            assert isinstance(event, ItemReady), event
        await self._engine.release(request.key)
        for item in range(len(question.pictures)):
            self._engine.release_embedding(request.key, item)
        return tokens


class Disaggregated:
    """Three engines, each with one stage; bytes pass between them, as over the wire."""

    def __init__(
        self, encoder: Engine, prefill: Engine, decode: Engine, *, block_size: int,
        max_tokens: int, ignore_eos: bool = False,
    ) -> None:  # fmt: skip
        self._encoder, self._prefill, self._decode = encoder, prefill, decode
        self._block_size = block_size
        self._max_tokens, self._ignore_eos = max_tokens, ignore_eos

    async def ask(self, question: Question, delivered: Sequence[int] = ()) -> list[int]:
        """Encode, hand over, prefill, hand over, decode."""
        request = request_for(
            question,
            delivered,
            request_id=f"q{next(_numbers)}",
            max_tokens=self._max_tokens,
            ignore_eos=self._ignore_eos,
        )
        async for event in self._encoder.encode(request.key, question.pictures):
            assert not isinstance(event, ItemFailed), event
        await self._decode.reserve(request.key, len(request.token_ids) + self._max_tokens)
        first = await collect(self._prefill, request, hold=True, embeddings=self._encoder)
        for item in range(len(question.pictures)):
            self._encoder.release_embedding(request.key, item)
        answer = await self._continue(request, first)
        await self._prefill.release(request.key)
        await self._decode.release(request.key)
        return answer

    async def _continue(self, request: Request, first: list[int]) -> list[int]:
        if (first[-1] == EOS and not self._ignore_eos) or len(first) == self._max_tokens:
            return first
        start = await self._decode.receive(request)
        end = -(-len(request.token_ids) // self._block_size)
        if start < end:
            blocks = await self._prefill.export_blocks(request.key, start, end - start)
            await self._decode.import_blocks(request.key, start, memoryview(bytes(blocks)))
        stream = await self._decode.start_decode(request.key, first[-1])
        return first + await drain(stream)


async def collect(
    engine: Engine, request: Request, *, hold: bool, embeddings: Engine | None = None
) -> list[int]:
    """Tokens of a submitted request; embeddings it asks for come from another engine."""
    tokens: list[int] = []
    async for event in engine.submit_prefill(request, hold=hold):
        if isinstance(event, NeedItems) and embeddings is not None:
            for item in event.items:
                rows = await embeddings.export_embedding(request.key, item)
                await engine.put_embedding(request.key, item, memoryview(bytes(rows)))
        elif isinstance(event, TokenEvent):
            tokens.append(event.token_id)
        elif isinstance(event, FailedEvent):
            raise event.error
    return tokens


async def drain(stream: AsyncIterator[object]) -> list[int]:
    """Tokens of a stream, which must end with FinishedEvent."""
    tokens, last = [], None
    async for event in stream:
        last = event
        if isinstance(event, TokenEvent):
            tokens.append(event.token_id)
        elif isinstance(event, FailedEvent):
            raise event.error
    assert isinstance(last, FinishedEvent), last
    return tokens


async def hold_law(law: Law, asker: Colocated | Disaggregated) -> None:
    """Ask everything at once, until nothing is pending, and check."""
    while law.pending:
        law.record(await asyncio.gather(*(asker.ask(q, d) for q, d in law.pending)))
    law.check()
