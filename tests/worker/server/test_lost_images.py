"""Images whose encoder, lease or size is lost on the way: one error, and nothing is kept."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from worker.answers import make_image
from worker.idle import assert_idle
from worker.server.pairs import IMAGES, KEY, TENTH, about, collect, encoding, kill, until
from worker.server.serving import serving

from vlm_worker.core.leases import LeaseKind
from vlm_worker.errors import CancelledError, PeerLostError, Refusal, WorkerError
from vlm_worker.wire.messages import PrefillCall


async def test_a_lost_encoder_is_one_error_of_the_prompt_that_waits_for_it() -> None:
    async with serving("encoder", TENTH) as e, serving("prefill", TENTH) as p:
        e.runner.gate.clear()
        source, task = encoding(e, IMAGES[0])
        await until(lambda: e.components.context.attempts.leases.count(LeaseKind.HELD) == 1)
        call = PrefillCall(about(IMAGES[:1]), "t-1", (source,))
        prefilling = asyncio.create_task(collect(p, call))
        await until(lambda: e.server._service.live["FetchEmbedding"] == 1)
        await kill(e)
        with pytest.raises(PeerLostError):
            await prefilling
        await assert_idle(p.server)
        e.runner.gate.set()
        await task
        await assert_idle(e.server)


@pytest.mark.parametrize("how", ["released", "cancelled"])
async def test_a_lease_that_ends_before_its_image_is_pinned_leaves_no_pin(how: str) -> None:
    """A consumer gives up while the image is still on its way to the engine."""
    async with serving("encoder", TENTH) as e:
        attempts, delay = e.components.context.attempts, e.components.context.delay

        async def give_up(stage: str) -> None:
            await delay(stage)
            if stage == "encoder_queue" and how == "released":
                attempts.release(e.components.context.incarnation.boot_id, "e-1")
            elif stage == "encoder_queue":
                attempts.by_key[KEY].stop_readers(CancelledError("the caller left"))

        e.components.context.delay = give_up  # type: ignore[method-assign]
        await encoding(e, IMAGES[0])[1]
        assert e.components.engine.stats().count("images") == 1, "it was encoded all the same"
        await assert_idle(e.server)


async def test_an_embedding_of_a_wrong_size_is_refused_and_never_used() -> None:
    """The encoder has another image under this name than the gateway told prefill."""
    async with serving("encoder", TENTH) as e, serving("prefill", TENTH) as p:
        lying = dataclasses.replace(make_image(9, num_tokens=5), image_key=IMAGES[0].image_key)
        source, task = encoding(e, lying)
        await task
        with pytest.raises(WorkerError):
            await collect(p, PrefillCall(about(IMAGES[:1]), "t-1", (source,)))
        assert p.components.context.num_refused.total() == 2, "it was fetched once more"
        assert set(p.components.context.num_refused) == {Refusal.COMMIT}
        await assert_idle(p.server)
