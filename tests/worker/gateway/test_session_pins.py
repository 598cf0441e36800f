"""A chat with `prompt_cache_key` pins its images on the encoder; others pin none."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import Stack, stack_of

from vlm_worker.engine.settings import SessionPinStats
from vlm_worker.types import Stage


def pins(served: Stack) -> SessionPinStats | None:
    (encoder,) = [w for w in served.workers if Stage.ENCODER in w.server.settings.stages]
    return encoder.components.engine.stats().session_pins


async def chat(served: Stack, colour: int, **said: Any) -> str | None:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as api:
        answer = await api.chat.completions.create(
            model="shapes",
            messages=[ask(png((colour, 30, 30)), "What is this?")],
            max_tokens=8,
            temperature=0,
            **said,
        )
    await served.until_idle()
    return answer.choices[0].message.content


@pytest.mark.parametrize("topology", ["E-P-D", "colocated"])
async def test_images_of_a_chat_with_a_key_are_pinned_and_its_value_has_no_effect(
    topology: str,
) -> None:
    async with stack_of(topology, session_pin_seconds=60) as served:
        plain = await chat(served, 1)
        empty = await chat(served, 1, prompt_cache_key="")
        assert pins(served) == SessionPinStats(
            {"memory": 0, "disk": 0},
            {"memory": 0, "disk": 0},
            {"expired": 0, "bound": 0, "evicted": 0, "replaced": 0},
        )
        keyed = await chat(served, 1, prompt_cache_key="one")
        again = await chat(served, 1, prompt_cache_key="another")
        found = pins(served)
        assert found is not None
        assert found.entries["memory"] == 1
        await chat(served, 2, prompt_cache_key="one")
        found = pins(served)
        assert found is not None
        assert found.entries["memory"] == 2
        assert plain == empty == keyed == again


async def test_a_service_without_session_pins_takes_the_key_and_pins_nothing() -> None:
    async with stack_of("E-P-D") as served:
        assert await chat(served, 1, prompt_cache_key="one") == await chat(served, 1)
        assert pins(served) is None
