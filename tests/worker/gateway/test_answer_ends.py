"""Where an answer ends: `stop_token_ids`, through real workers, as the openai client reads it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import Tokenizer
from worker.gateway.image_files import ask, png
from worker.gateway.stack import MODEL, ONE_PROCESS, Stack, client, stack_of

from vlm_worker.testing import VOCABULARY

TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
NUM_TOKENS = 12


@pytest.fixture(params=["E-P-D", ONE_PROCESS])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with stack_of(request.param) as one:
        yield one
        await one.until_idle()


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": "shapes",
        "messages": [ask(png(), "What is this?")],
        "max_tokens": NUM_TOKENS,
        "temperature": 1.0,
        "seed": 7,
        "logprobs": True,
        "extra_body": {"ignore_eos": True, **changes},
    }


def ids_of(text: str) -> list[int]:
    """The tokens that are written so."""
    return [one for one in range(VOCABULARY) if TOKENIZER.decode([one]) == text]


async def test_an_answer_ends_before_its_first_stop_token(served: Stack) -> None:
    async with client(served) as api:
        (free,) = (await api.chat.completions.create(**body())).choices
        texts = [one.token for one in free.logprobs.content]
        assert free.finish_reason == "length"
        at = next(i for i, t in enumerate(texts) if i >= 3 and ids_of(t) and t not in texts[:i])
        stops = ids_of(texts[at])
        whole = await api.chat.completions.create(**body(stop_token_ids=stops))
        (cut,) = whole.choices
        assert cut.finish_reason == "stop"
        assert cut.message.content
        assert free.message.content.startswith(cut.message.content)
        assert [one.token for one in cut.logprobs.content] == texts[:at]
        assert at < whole.usage.completion_tokens < NUM_TOKENS  # control tokens have no text
        chunks = [
            chunk.choices[0]
            async for chunk in await api.chat.completions.create(
                **body(stop_token_ids=stops), stream=True
            )
        ]
        assert "".join(one.delta.content or "" for one in chunks) == cut.message.content
        assert chunks[-1].finish_reason == "stop"
