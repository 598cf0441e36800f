"""An image that was encoded before is not decoded again."""

from __future__ import annotations

import dataclasses

import pytest
from worker.gateway.image_files import png
from worker.server.serving import FAMILY, serving

from vlm_worker.media.image_header import read_header
from vlm_worker.media.pool import ImageSpec, MediaPool
from vlm_worker.types import PreparedImage, RequestKey
from vlm_worker.wire.messages import EncodeCall, EncodeItem, ItemReady

TIMEOUT = 60.0
DATA = png()
HEADER = read_header(DATA, item=0)
ITEM = EncodeItem(
    transfer_id="e-1",
    num_bytes=len(DATA),
    width=HEADER.width,
    height=HEADER.height,
    num_tokens=FAMILY.geometry(HEADER.height, HEADER.width).num_tokens,
    max_pixels=0,
    format="PNG",
)
CALL = EncodeCall(RequestKey("r-1", 1), (ITEM,), bytes(32))


async def test_a_known_file_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    prepare = MediaPool.prepare

    async def counted(self: MediaPool, data: memoryview, spec: ImageSpec) -> PreparedImage:
        decoded.append(spec.item)
        return await prepare(self, data, spec)

    monkeypatch.setattr(MediaPool, "prepare", counted)
    told = []
    async with serving("encoder") as worker:
        for attempt in (1, 2):
            call = dataclasses.replace(CALL, key=RequestKey("r-1", attempt))
            replies = worker.client.encode(call, [DATA], timeout=TIMEOUT)
            told.append([reply.event async for reply in replies])
            await worker.client.cancel(call.key)
            await worker.until_idle()
    (first_decoded, first_ready), (second_decoded, second_ready) = told
    assert first_decoded == second_decoded
    assert isinstance(second_ready, ItemReady)
    assert (first_ready.cache_hit, second_ready.cache_hit) == (False, True)
    assert decoded == [0]
