"""Where an answer ends: `stop_token_ids` and `min_tokens`, through real workers."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer
from worker.gateway.image_files import ask, png
from worker.gateway.stack import E_PD, EPD, MODEL, ONE_PROCESS, Stack, client, stack, stack_of

from vlm_worker.client import WorkerClient
from vlm_worker.errors import PeerLostError
from vlm_worker.testing import VOCABULARY
from vlm_worker.types import Request, Role, Stage
from vlm_worker.wire.messages import (
    DecodeCall,
    DecodeEvent,
    Finished,
    FirstToken,
    PrefillCall,
    PrefillEvent,
    Reply,
)

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


async def test_nothing_ends_an_answer_before_its_min_tokens(served: Stack) -> None:
    async with client(served) as api:
        (free,) = (await api.chat.completions.create(**body())).choices
        texts = [one.token for one in free.logprobs.content]
        stops = [i for text in texts[:3] for i in ids_of(text)]
        some = texts[1]
        assert stops
        for num_tokens in (5, NUM_TOKENS):
            ends = {"stop_token_ids": stops, "stop": [some], "min_tokens": num_tokens}
            whole = await api.chat.completions.create(**body(ignore_eos=False, **ends))
            assert num_tokens <= whole.usage.completion_tokens <= NUM_TOKENS
            shown = [one.token for one in whole.choices[0].logprobs.content]
            assert not {*shown[:num_tokens]} & {TOKENIZER.decode([one]) for one in stops}


async def test_an_answer_with_min_tokens_continues_identically_if_its_decode_pod_is_lost() -> None:
    async with stack(*EPD, (Role.DECODE, (Stage.DECODE,))) as served, client(served) as api:
        (free,) = (await api.chat.completions.create(**body())).choices
        stops = [i for one in free.logprobs.content for i in ids_of(one.token)]
        ends = {"stop_token_ids": stops, "min_tokens": 10}
        asked = body(**ends) | {"max_tokens": 20}
        whole = await api.chat.completions.create(**asked)
        assert whole.usage.completion_tokens >= 10
        for worker in served.of(Role.DECODE):
            worker.runner.faults.step_seconds = 0.05
        text, victim, chunks = "", None, 0
        async for chunk in await api.chat.completions.create(**asked, stream=True):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            chunks += 1
            if chunks == 3:
                (victim,) = [w for w in served.of(Role.DECODE) if w.num_held]
                await victim.kill()
        assert victim is not None
        assert text == whole.choices[0].message.content
        await served.until_idle()


class LosingClient(WorkerClient):
    """Workers end answers with `stops`, as with a model's EOS: the gateway does not know them.

    While `is_losing`, a first attempt loses its pod before that says that the answer ends.
    """

    stops: tuple[int, ...] = ()
    is_losing = False
    num_lost = 0

    async def prefill(
        self, call: PrefillCall, *, timeout: float
    ) -> AsyncGenerator[Reply[PrefillEvent]]:
        stopped = dataclasses.replace(call, request=self.stopped(call.request))
        async with aclosing(super().prefill(stopped, timeout=timeout)) as replies:
            async for reply in replies:
                event = reply.event
                if self.loses(call.request) and isinstance(event, FirstToken):
                    event = dataclasses.replace(event, finish_reason=None)
                yield dataclasses.replace(reply, event=event)

    async def decode(
        self, call: DecodeCall, *, timeout: float
    ) -> AsyncGenerator[Reply[DecodeEvent]]:
        stopped = dataclasses.replace(call, request=self.stopped(call.request))
        async with aclosing(super().decode(stopped, timeout=timeout)) as replies:
            async for reply in replies:
                if self.loses(call.request) and isinstance(reply.event, Finished):
                    type(self).num_lost += 1
                    raise PeerLostError("the pod was lost behind the last token")
                yield reply

    def stopped(self, request: Request) -> Request:
        sampling = dataclasses.replace(request.sampling, stop_token_ids=self.stops)
        return dataclasses.replace(request, sampling=sampling)

    def loses(self, request: Request) -> bool:
        return self.is_losing and request.key.attempt == 1


async def with_visible_first_token(api: openai.AsyncOpenAI, asked: dict[str, Any]) -> list[str]:
    """Set the first seed whose first token has a text; the texts of its answer's tokens."""
    for seed in range(20):
        asked["seed"] = seed
        first = await api.chat.completions.create(**asked | {"max_tokens": 1})
        if first.choices[0].logprobs.content:
            whole = await api.chat.completions.create(**asked)
            return [one.token for one in whole.choices[0].logprobs.content]
    raise AssertionError("no first token has a text")


@pytest.mark.parametrize("at", [0, 4])
async def test_a_pod_that_only_ends_an_answer_is_not_known_to_hold_its_prompt(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = (Role.DECODE, (Stage.PREFILL, Stage.DECODE))
    async with stack(plan, plan, connect=LosingClient) as served, client(served) as api:
        asked = body() | {"messages": [{"role": "user", "content": "What is this? " * 20}]}
        texts = await with_visible_first_token(api, asked)
        monkeypatch.setattr(LosingClient, "stops", tuple(ids_of(texts[at])))
        usual = await api.chat.completions.create(**asked)
        caches = served.gateway.context.registry.caches
        known = set(caches._held)
        assert len(known) == 1
        monkeypatch.setattr(LosingClient, "is_losing", True)
        monkeypatch.setattr(LosingClient, "num_lost", 0)
        lost = await api.chat.completions.create(**asked)
        assert LosingClient.num_lost == 1
        assert lost.choices[0].finish_reason == usual.choices[0].finish_reason == "stop"
        assert lost.choices[0].message.content == usual.choices[0].message.content
        assert usual.usage.prompt_tokens_details.cached_tokens > 0
        assert lost.usage == usual.usage
        assert set(caches._held) == known
        await served.until_idle()


async def test_a_worker_that_knows_no_min_tokens_gets_no_request_with_them() -> None:
    """A worker of an older version sends a Hello without `min_tokens`."""
    async with stack(*E_PD) as served, client(served) as api:
        served.forget("min_tokens")
        with pytest.raises(openai.InternalServerError, match="obeys 'min_tokens'") as refused:
            await api.chat.completions.create(**body(min_tokens=2))
        assert refused.value.status_code == 503
        free = await api.chat.completions.create(**body(min_tokens=0))
        assert free.choices[0].finish_reason == "length"


FORMAT = {"type": "json_object"}


@pytest.mark.parametrize("changes", [{"response_format": FORMAT}, {"max_tokens": 1}])
async def test_min_tokens_that_cannot_be_are_refused_with_the_fix(changes: dict[str, Any]) -> None:
    async with stack(*E_PD) as served, client(served) as api:
        with pytest.raises(openai.BadRequestError, match=r"Leave one|send a smaller") as refused:
            await api.chat.completions.create(**body(min_tokens=2, ignore_eos=False) | changes)
        assert refused.value.param == "min_tokens"
