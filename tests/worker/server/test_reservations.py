"""KV blocks of a decode worker are shared: a host that takes all it can leaves some to others."""

from __future__ import annotations

import pytest
from worker.server.serving import serving

from vlm_worker.errors import OverloadedError
from vlm_worker.roles.decode import OTHERS_SHARE
from vlm_worker.types import RequestKey, Stage
from vlm_worker.wire.messages import ReserveCall

SIZE = 32
OTHER_HOST = "ipv4:10.0.0.9"


async def test_a_host_that_reserves_all_it_can_leaves_an_eighth_to_others() -> None:
    async with serving("decode") as worker:
        role, kv = worker.components.role(Stage.DECODE), worker.components.engine.stats().kv
        assert kv is not None
        num_granted = 0

        async def take_all() -> None:
            nonlocal num_granted
            for number in range(kv.capacity_tokens):
                await worker.client.reserve(ReserveCall(RequestKey(f"r-{number}", 1), SIZE))
                num_granted += 1

        with pytest.raises(OverloadedError, match="reserved by this peer") as refused:
            await take_all()
        assert refused.value.retry_after_seconds > 0
        assert 0 < num_granted * SIZE <= kv.capacity_tokens * (1 - 1 / OTHERS_SHARE)
        await role.reserve(ReserveCall(RequestKey("other", 1), SIZE), peer=OTHER_HOST)
        await worker.client.cancel(RequestKey("r-0", 1))
        await worker.client.reserve(ReserveCall(RequestKey("next", 1), SIZE))
        for name in ("other", "next", *(f"r-{number}" for number in range(1, num_granted))):
            await worker.client.cancel(RequestKey(name, 1))
        await worker.until_idle()


async def test_a_prompt_that_takes_nearly_all_room_is_served_if_its_host_holds_nothing() -> None:
    async with serving("decode") as worker:
        kv = worker.components.engine.stats().kv
        assert kv is not None
        key = RequestKey("large", 1)
        await worker.client.reserve(ReserveCall(key, kv.capacity_tokens - SIZE))
        await worker.client.cancel(key)
        await worker.until_idle()
