"""An encoder that gets the rows of embeddings instead of files."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from worker.server.serving import FAMILY, TIMEOUT, Serving, serving

from vlm_worker.core.client_embeddings import embedding_key
from vlm_worker.types import RequestKey
from vlm_worker.wire.messages import Decoded, DecodedItem, EncodeCall, EncodeItem, ItemReady

GRID = FAMILY.geometry(84, 112).grid_thw
NUM_TOKENS = FAMILY.geometry(84, 112).num_tokens
ROWS = np.arange(NUM_TOKENS, dtype=np.int64).tobytes()
SALT = b"s" * 32
ITEM = EncodeItem("e-1", len(ROWS), 0, 0, NUM_TOKENS, 0, "float32", grid_thw=GRID)


async def told(worker: Serving, item: EncodeItem, attempt: int = 1, salt: bytes = SALT) -> Any:
    """What the worker replies; it keeps nothing."""
    call = EncodeCall(RequestKey("r-1", attempt), (item,), salt)
    replies = worker.client.encode(call, [ROWS[: item.num_bytes]], timeout=TIMEOUT)
    events = [reply.event async for reply in replies]
    await worker.client.cancel(call.key)
    await worker.until_idle()
    return events


async def test_rows_get_their_key_and_no_encoder_call() -> None:
    async with serving("encoder") as worker:
        layout = worker.components.context.embed_layout
        assert (await worker.client.hello(timeout=TIMEOUT)).embed_layout == layout
        first = await told(worker, ITEM)
        again = await told(worker, ITEM, attempt=2)
        other = await told(worker, ITEM, attempt=3, salt=b"t" * 32)
        assert worker.runner.batch_sizes == []
    key = embedding_key(memoryview(ROWS), layout, grid=GRID, salt=SALT)
    decoded = Decoded((DecodedItem(NUM_TOKENS, GRID, key),))
    assert first == [decoded, ItemReady(0, cache_hit=False, num_bytes=len(ROWS))]
    assert again == [decoded, ItemReady(0, cache_hit=True, num_bytes=len(ROWS))]
    assert other[0].items[0].image_key != key
    assert not other[1].cache_hit


@pytest.mark.parametrize(
    "change",
    [{"format": "bfloat16"}, {"num_bytes": len(ROWS) - 8}, {"num_tokens": NUM_TOKENS + 1}],
)
async def test_rows_of_another_layout_are_refused(change: dict[str, Any]) -> None:
    async with serving("encoder") as worker:
        (decoded,) = await told(worker, dataclasses.replace(ITEM, **change))
    assert isinstance(decoded, Decoded)
    (item,) = decoded.items
    assert item.error is not None
    assert item.error.code == "image_mismatch"
    assert "float32" in item.error.message
