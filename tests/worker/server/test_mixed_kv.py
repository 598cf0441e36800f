"""Blocks of two kinds over the wire: E→P→D gives the answer of one worker, or is refused."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from worker.answers import answer_alone, make_image
from worker.server.pairs import TENTH, about, accept, encoding, pair
from worker.server.serving import KEY, TIMEOUT, request_of, serving

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.errors import IncompatibleError
from vlm_worker.types import Narrow, RequestKey, Source
from vlm_worker.wire.messages import DecodeCall, ReserveCall

IMAGE = make_image(1, num_tokens=40)


@pytest.mark.parametrize("narrow", list(Narrow))
async def test_an_image_encoded_prefilled_and_decoded_apart_gives_the_answer_of_one(
    narrow: Narrow,
) -> None:
    async with (
        serving("encoder", TENTH) as encoder,
        pair("--max-requests=4", "--max-batched-tokens=21", narrow=narrow) as two,
    ):
        for number in range(2):  # then with a prefix hit at both
            request = about([IMAGE], RequestKey(f"r-{number}", 1))
            source, task = encoding(encoder, IMAGE, request.key, transfer_id=f"e-{number}")
            assert await two.answer(request, source) == answer_alone(request, [IMAGE])
            await task
        runner = two.decode.runner
        layout = runner.kv_layout
        assert layout is not None
        shape = BlockKinds.of_layout(layout).of_items(request.items)
        assert {True, False} == {*shape.is_narrow, shape.tail_is_narrow}
        await two.idle()


@pytest.mark.parametrize(
    ("at_prefill", "at_decode"),
    [(Narrow.VISION, None), (None, Narrow.TEXT), (Narrow.VISION, Narrow.TEXT)],
)
async def test_workers_that_disagree_about_kinds_exchange_nothing(
    at_prefill: Narrow | None, at_decode: Narrow | None
) -> None:
    request = request_of()
    async with (
        serving("prefill", TENTH, narrow=at_prefill) as prefill,
        serving("decode", TENTH, narrow=at_decode) as decode,
    ):
        accepted = await accept(prefill, request)
        reservation = await decode.client.reserve(ReserveCall(KEY, len(request.token_ids) + 1))
        kv = Source(
            prefill.client.address,
            accepted.boot_id,
            accepted.transfer_id,
            accepted.layout_fingerprint,
        )
        call = DecodeCall(request, reservation.reservation_id, kv, reservation.boot_id)
        with pytest.raises(IncompatibleError, match="layout"):
            async with aclosing(decode.client.decode(call, timeout=TIMEOUT)) as replies:
                _ = [reply async for reply in replies]
        assert decode.runner.num_steps == 0
