"""The flag of the visual quota reaches the pool; `/stats` and `/metrics` count what it evicts."""

from __future__ import annotations

import json

import pytest
from worker.engine.talk import IMAGE, about_image, events
from worker.server.serving import page, serving

from vlm_worker.types import Request, RequestKey, SamplingParams


def text(name: str, first_token: int, length: int) -> Request:
    token_ids = tuple(first_token + place % 50 for place in range(length))
    return Request(RequestKey(name, 0), token_ids, length, SamplingParams(1))


@pytest.mark.parametrize(
    ("flags", "num_text", "num_visual"), [(("--kv-visual-percent=0",), 3, 2), ((), 4, 1)]
)
async def test_the_flag_decides_which_cached_blocks_are_evicted(
    flags: tuple[str, ...], num_text: int, num_visual: int
) -> None:
    async with serving("decode", "--stages=encoder,prefill,decode", *flags) as worker:
        engine = worker.components.engine
        await events(engine.submit_prefill(text("older", 100, 16), for_peer=False))
        _ = [event async for event in engine.encode(about_image("newer").key, [IMAGE])]
        await events(engine.submit_prefill(about_image("newer"), for_peer=False))
        await engine.cancel(about_image("newer").key)
        # 127 of 128 blocks, of which 6 are cached
        await events(engine.submit_prefill(text("long", 200, 508), for_peer=False))
        _, stats = await page(worker.server, "/stats")
        kv = json.loads(stats)["kv"]
        assert (kv["text_evictions"], kv["visual_evictions"]) == (num_text, num_visual)
        assert kv["visual_cached_tokens"] == 8 - 4 * num_visual
        _, metrics = await page(worker.server, "/metrics")
        for kind, count in (("text", num_text), ("visual", num_visual)):
            line = f'triptych_prefix_cache_evictions_total{{kind="{kind}"}} {count}.0'
            assert line in metrics.splitlines()
