"""A copy that the device fails, fails the request whose bytes it is, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from worker.answers import answer_alone
from worker.engine.talk import IMAGE, about_image, events, text, tokens

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import ItemFailed, ItemReady, NeedItems
from vlm_worker.errors import EngineError
from vlm_worker.testing import ChecksumRunner, embed
from vlm_worker.types import RequestKey


class FullDevice(ChecksumRunner):
    """Its first copies find no memory."""

    def __init__(self, *, has_kv: bool = True) -> None:
        super().__init__(has_kv=has_kv)
        self.num_failing = 1

    def export_embedding(self, embedding: np.ndarray) -> memoryview:
        self._copy()
        return super().export_embedding(embedding)

    def import_embedding(self, rows: memoryview, num_tokens: int) -> np.ndarray:
        self._copy()
        return super().import_embedding(rows, num_tokens)

    def export_blocks(self, block_ids: Sequence[int], out: memoryview | None = None) -> memoryview:
        self._copy()
        return super().export_blocks(block_ids, out)

    def import_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        self._copy()
        super().import_blocks(block_ids, data)

    def _copy(self) -> None:
        if self.num_failing:
            self.num_failing -= 1
            raise MemoryError("the device is full")


async def test_an_embedding_that_finds_no_room_may_be_put_again(start: Any) -> None:
    engine: Engine = start(FullDevice())
    request, rows = about_image(), memoryview(embed(IMAGE).tobytes())
    stream = engine.submit_prefill(request, for_peer=False)
    assert await anext(stream) == NeedItems((0,))
    with pytest.raises(EngineError, match="the device is full"):
        await engine.put_embedding(request.key, 0, rows)
    await engine.put_embedding(request.key, 0, rows)
    assert tokens(await events(stream)) == answer_alone(request, [IMAGE])


async def test_an_embedding_that_cannot_be_copied_out_fails_its_item(start: Any) -> None:
    engine: Engine = start(FullDevice(has_kv=False))
    for expected in (ItemFailed, ItemReady):  # the same key is free again
        (event,) = [e async for e in engine.encode(RequestKey("a", 0), [IMAGE])]
        assert isinstance(event, expected)
    await engine.cancel(RequestKey("a", 0))
    assert engine.stats().inflight == 0


async def test_blocks_that_cannot_be_copied_are_asked_for_and_sent_again(start: Any) -> None:
    prefill, decode = FullDevice(), FullDevice()
    here: Engine = start(prefill)
    there: Engine = start(decode)
    request = text(length=8)
    (first, *_) = tokens(await events(here.submit_prefill(request, for_peer=True)))
    await there.reserve(request.key, 9)
    assert (await there.receive(request)).first_block == 0
    with pytest.raises(EngineError, match="the device is full"):
        await asyncio.to_thread(here.readable_blocks.copy, request.key, 0, 2)
    blocks = await asyncio.to_thread(here.readable_blocks.copy, request.key, 0, 2)
    with pytest.raises(EngineError, match="the device is full"):
        await there.import_blocks(request.key, 0, blocks)
    await there.import_blocks(request.key, 0, blocks)
    answer = [first, *tokens(await events(await there.start_decode(request.key, first)))]
    assert answer == answer_alone(request)
    await here.release(request.key)
    assert (prefill.num_failing, decode.num_failing) == (0, 0)
