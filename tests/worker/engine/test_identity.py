"""However a request travels through engines, it says what the model alone says.

Whole, adopted, or handed over block by block; together with others, in small pools that preempt;
with images that are encoded here or fetched from there; continued elsewhere where it must be.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.answers import (
    answer_alone,
    folded_positions,
    image_item,
    make_image,
    prompt_alone,
)

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import EventStream, ItemFailed, ItemReady, NeedItems
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import GoneError, OverloadedError
from vlm_worker.reduction import Method, Reduction
from vlm_worker.testing import IMAGE_TOKEN, ChecksumRunner, token_logprobs
from vlm_worker.types import (
    BlocksReady,
    FailedEvent,
    FinishedEvent,
    FinishReason,
    ImageItem,
    PreparedImage,
    PromptLogprobs,
    Request,
    RequestKey,
    SamplingParams,
    TokenEvent,
)

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
EOS = 11
REDUCTIONS = (
    None,
    None,
    Reduction(Method.DIVERSE, 250),
    Reduction(Method.ZIP, 600),
    Reduction(Method.POOL, 500),
    Reduction(Method.ARRCOC_PYRAMID, 500),
)
MODES = ("whole", "adopted", "adopted early", "handed over")


@dataclasses.dataclass(frozen=True)
class Work:
    """A request, its images, and the way it goes."""

    request: Request
    images: tuple[PreparedImage, ...]
    mode: str


@st.composite
def works(draw: st.DrawFn) -> list[Work]:
    out = []
    for number in range(draw(st.integers(1, 6))):
        token_ids: list[int] = draw(st.sampled_from([[1], [1, 2, 3, 4, 5], [4] * 9]))[:]
        items, images = [], []
        for _ in range(draw(st.integers(0, 2))):
            image = make_image(draw(st.integers(0, 2)), num_tokens=draw(st.integers(1, 7)))
            image = dataclasses.replace(image, reduction=draw(st.sampled_from(REDUCTIONS)))
            items.append(image_item(image, len(token_ids)))
            images.append(image)
            token_ids += [IMAGE_TOKEN] * image.kept_tokens + draw(st.sampled_from([[], [3, 3]]))
        sampling = SamplingParams(
            max_tokens=(max_tokens := draw(st.integers(1, 24))),
            min_tokens=draw(st.sampled_from([0, max_tokens // 2, max_tokens])),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=number,
            ignore_eos=draw(st.booleans()),
            # this model's text tells whether penalties and biases saw the right tokens
            frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
            logit_bias=draw(st.sampled_from([(), ((3, 1.5), (5, -2.0))])),
            num_logprobs=draw(st.sampled_from([None, 0, 2])),
            num_prompt_logprobs=None if items else draw(st.sampled_from([None, 0, 2])),
        )
        key = RequestKey(f"r{number}", 0)
        request = Request(key, tuple(token_ids), len(token_ids), sampling, tuple(items))
        out.append(Work(request, tuple(images), draw(st.sampled_from(MODES))))
    return out


@dataclasses.dataclass
class Line:
    """An encoder, a prefill and a decode engine, and the gateway's part in plain sight."""

    encoder: Engine
    prefill: Engine
    decode: Engine
    scored: dict[RequestKey, list[float]] = dataclasses.field(default_factory=dict)

    async def serve(self, work: Work) -> list[int]:
        """The whole answer; where an engine hands it over, it goes on with what was said."""
        answer: list[int] = []
        for attempt in range(50):
            request = dataclasses.replace(
                work.request,
                key=RequestKey(work.request.key.request_id, attempt),
                token_ids=(*work.request.token_ids, *answer),
            )
            if await self._attempt(work, request, answer) is not FinishReason.DRAINED:
                return answer
        raise AssertionError("fifty attempts, and no end")

    async def _attempt(self, work: Work, request: Request, answer: list[int]) -> FinishReason:
        if work.mode == "whole":
            stream = self.prefill.submit_prefill(request, for_peer=False)
            return await self._listen(stream, work, request, answer)
        if work.mode == "handed over":
            return await self._hand_over(work, request, answer)
        stream = self.prefill.submit_prefill(request, for_peer=True)
        early = self.prefill.adopt_local(request) if work.mode == "adopted early" else None
        reason = await self._listen(stream, work, request, answer)
        if early is None and reason is not None:
            return reason
        rest = early or self.prefill.adopt_local(request)
        return await self._listen(rest, work, request, answer)

    async def _hand_over(self, work: Work, request: Request, answer: list[int]) -> FinishReason:
        await self._reserve(request)
        stream = self.prefill.submit_prefill(request, for_peer=True)
        first = (await self.decode.receive(request)).first_block
        fetched = [first]
        try:
            reason = await self._listen(stream, work, request, answer, fetched=fetched)
        except OverloadedError:  # peers have not read what prefill holds: try again, as a gateway
            await self.decode.release(request.key)
            while self.prefill.stats().num_held:  # noqa: ASYNC110  state of the engine thread
                await asyncio.sleep(0.001)
            return FinishReason.DRAINED
        if reason is not None:
            await self.decode.release(request.key)
            return reason
        assert fetched[0] == -(-len(request.token_ids) // BLOCK_SIZE)
        await self.prefill.release(request.key)
        rest = await self.decode.start_decode(request.key, answer[-1])
        return await self._listen(rest, work, request, answer)

    async def _reserve(self, request: Request) -> None:
        while True:
            try:
                return await self.decode.reserve(request.key, len(request.token_ids) + 1)
            except OverloadedError:
                await asyncio.sleep(0.001)

    async def _listen(
        self,
        stream: EventStream[Any],
        work: Work,
        request: Request,
        answer: list[int],
        *,
        fetched: list[int] | None = None,
    ) -> Any:
        """Follow a stream to its end: its reason, or None where it ends with the first token."""
        async for event in stream:
            match event:
                case NeedItems(items):
                    for item in items:
                        await self._fetch(work, request, item)
                case BlocksReady(num_blocks) if fetched and num_blocks > fetched[0]:
                    await self._fetch_blocks(request, fetched, num_blocks)
                case PromptLogprobs(first_index, logprobs):
                    known = self.scored.setdefault(request.key, [])
                    assert first_index == len(known) + 1
                    known += logprobs
                case TokenEvent(index, token_id, logprobs=logprobs):
                    if request.sampling.num_prompt_logprobs is not None:
                        alone = prompt_alone(request, positions=folded_positions)
                        assert self.scored.get(request.key, []) == alone
                    wanted = request.sampling.num_logprobs
                    told = None if wanted is None else token_logprobs(token_id, wanted)
                    assert (index, logprobs) == (len(answer), told)
                    answer.append(token_id)
                case FinishedEvent(reason, num_tokens):
                    assert num_tokens == len(answer)
                    return reason
                case FailedEvent(error):
                    raise error
        return None

    async def _fetch_blocks(self, request: Request, fetched: list[int], num_blocks: int) -> None:
        first = fetched[0]
        try:
            data = await asyncio.to_thread(
                self.prefill.readable_blocks.copy, request.key, first, num_blocks - first
            )
        except GoneError:  # the first token ended the answer: nothing is held
            return
        await self.decode.import_blocks(request.key, first, data)
        fetched[0] = num_blocks

    async def _is_encoded(self, key: RequestKey, image: PreparedImage) -> bool:
        """False if the encoder holds too much for others, and may be asked again."""
        [event] = [event async for event in self.encoder.encode(key, [image])]
        if isinstance(event, ItemFailed) and isinstance(event.error, OverloadedError):
            return False
        assert isinstance(event, ItemReady)
        return True

    async def _fetch(self, work: Work, request: Request, item: int) -> None:
        key = RequestKey(f"{request.key.request_id}/{item}", request.key.attempt)
        while not await self._is_encoded(key, work.images[item]):  # noqa: ASYNC110  as a gateway asks again
            await asyncio.sleep(0.001)
        rows = await self.encoder.export_embedding(key, 0)
        await self.prefill.put_embedding(request.key, item, rows)
        self.encoder.release_embedding(key, 0)


async def emptied(engine: Engine) -> None:
    while engine.stats().inflight:  # noqa: ASYNC110  # a snapshot has no event
        await asyncio.sleep(0.001)
    kv = engine.stats().kv
    assert kv is None or (kv.running_tokens, kv.reserved_tokens) == (0, 0)


async def run(todo: list[Work], *, num_blocks: int, budget: int, max_num_seqs: int) -> Line:
    """Serve all at once and compare each answer with the model alone."""
    shape = EngineSettings(
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(EOS,),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        embedding_cache_bytes=100,
        embedding_cold_cache_bytes=60,
        max_image_tokens=7,
        strict=True,
    )
    runners = [
        ChecksumRunner(has_kv=False),
        *(ChecksumRunner(num_blocks, block_size=BLOCK_SIZE) for _ in range(2)),
    ]
    engines = [Engine(r, settings=shape, positions=folded_positions) for r in runners]
    for engine in engines:
        engine.start(asyncio.get_running_loop())
    line = Line(*engines)
    answers = await asyncio.gather(*(line.serve(work) for work in todo))
    for work, answer in zip(todo, answers, strict=True):
        assert answer == answer_alone(
            work.request,
            work.images,
            positions=folded_positions,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(EOS,),
        )
    for engine in engines:
        await emptied(engine)
        await engine.stop()
    return line


def bounded(work: Coroutine[Any, Any, Line]) -> Line:
    """Run it in a loop of its own, and not for ever."""

    async def wait() -> Line:
        return await asyncio.wait_for(work, 20)

    return asyncio.run(wait())


@settings(max_examples=60)
@given(works(), st.integers(18, 40), st.integers(1, 5), st.integers(5, 40))
def test_every_way_through_the_engines_says_the_same(
    todo: list[Work], num_blocks: int, max_num_seqs: int, budget: int
) -> None:
    bounded(run(todo, num_blocks=num_blocks, budget=budget, max_num_seqs=max_num_seqs))


def question(number: int, mode: str, *, max_tokens: int = 20) -> Work:
    image = make_image(number, num_tokens=6)
    token_ids = (1, 2, 3, *[IMAGE_TOKEN] * 6, 4, 5)
    request = Request(
        RequestKey(f"r{number}", 0),
        token_ids,
        len(token_ids),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        (ImageItem(image.image_key, 3, 6, image.grid_thw),),
    )
    return Work(request, (image,), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_small_pool_preempts_without_a_change_of_answers(mode: str) -> None:
    todo = [question(number, mode, max_tokens=40) for number in range(4)]
    line = bounded(run(todo, num_blocks=20, budget=16, max_num_seqs=4))
    where = line.decode if mode == "handed over" else line.prefill
    assert where.stats().count("preemptions") > 0


def test_a_second_question_about_an_image_finds_its_prefix_and_its_embedding() -> None:
    async def twice() -> Line:
        first, second = question(1, "whole"), question(1, "whole")
        renamed = dataclasses.replace(second.request, key=RequestKey("again", 0))
        runner = ChecksumRunner(block_size=BLOCK_SIZE)
        shape = EngineSettings(max_model_len=MAX_MODEL_LEN, strict=True)
        engine = Engine(runner, settings=shape, positions=folded_positions)
        engine.start(asyncio.get_running_loop())
        line = Line(engine, engine, engine)
        one = await line.serve(first)
        two = await line.serve(dataclasses.replace(second, request=renamed))
        assert one == two == answer_alone(first.request, first.images, positions=folded_positions)
        assert runner.batch_sizes == [1]
        assert engine.stats().count("prefix_cache_hits") == 8
        await emptied(engine)
        await engine.stop()
        return line

    bounded(twice())
