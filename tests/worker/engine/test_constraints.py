"""The law of constrained answers: the tokens are a function of grammar, prompt and draws alone.

A random model answers random schemas. Every answer that ends is a value of its schema; every other
one is the beginning of one. The tokens are the same alone and together, from one engine and from
two, and if another engine continues after any token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from worker.schemas import SCHEMAS

from vlm_worker.core import grammars
from vlm_worker.core.grammars import Matcher, Vocabulary
from vlm_worker.core.step_values import ConstrainedRow
from vlm_worker.engine.constraints import Constraints
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import InvalidRequestError
from vlm_worker.testing import VOCABULARY, ChecksumRunner, plain_positions
from vlm_worker.types import (
    FailedEvent,
    FinishedEvent,
    FinishReason,
    Request,
    RequestKey,
    SamplingParams,
    TokenEvent,
)

MODEL = Path(__file__).parents[3] / "examples" / "shapes" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
EOS = 2
WORDS = Vocabulary(TOKENIZER, vocab_size=VOCABULARY, eos_token_ids=(EOS,))
MAX_TOKENS = 120
TEXT = "Some text with spaces, ünïcode and numbers 123."
PROMPT = (5, 9, 11, 200, 31)
_numbers = itertools.count()

Answer = tuple[list[int], FinishReason]


def engine(num_blocks: int = 2049, *, max_num_seqs: int = 32) -> Engine:
    runner = ChecksumRunner(num_blocks)
    bounds = EngineSettings(
        max_model_len=256, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_waiting=4096,
        strict=True,
    )  # fmt: skip
    made = Engine(
        runner, settings=bounds, positions=plain_positions, constraints=Constraints(WORDS)
    )
    made.start(asyncio.get_running_loop())
    return made


def asked(schema: Any, delivered: Sequence[int] = (), **sampling: Any) -> Request:
    grammar = schema if isinstance(schema, bytes) else grammar_of(schema)
    params = SamplingParams(**{"max_tokens": MAX_TOKENS, "grammar": grammar, **sampling})
    key = RequestKey(f"r{next(_numbers)}", 0)
    return Request(key, (*PROMPT, *delivered), len(PROMPT), params)


def grammar_of(schema: Any) -> bytes:
    options = {"whitespace_pattern": r"[ \t\n\r]{1,64}"}
    grammar = {"grammars": [{"json_schema": {**schema, "x-guidance": options}}]}
    return json.dumps(grammar).encode()


async def answered(one: Engine, request: Request) -> Answer:
    """The tokens of an answer, and why it ended."""
    return await collected(one.submit_prefill(request, for_peer=False), [])


async def collected(stream: EventStream[PrefillEvent], tokens: list[int]) -> Answer:
    """`tokens` and those of a stream, and why the answer ended."""
    reason = None
    async for event in stream:
        match event:
            case TokenEvent(_, token_id):
                tokens.append(token_id)
            case FinishedEvent(reason, _):
                pass
            case FailedEvent(error):
                raise error
    assert reason is not None
    return tokens, reason


async def handed_over(prefill: Engine, decode: Engine, request: Request) -> Answer:
    """As with two pods: the first token from one engine, the rest from the other one."""
    key, tokens = request.key, list[int]()
    await decode.reserve(key, len(request.token_ids) + 1)
    async for event in prefill.submit_prefill(request, for_peer=True):
        match event:
            case TokenEvent(_, token_id):
                tokens.append(token_id)
            case FinishedEvent(reason, _):
                await decode.release(key)
                return tokens, reason
            case FailedEvent(error):
                raise error
    first = (await decode.receive(request)).first_block
    count = -(-len(request.token_ids) // 4)
    if first < count:
        blocks = prefill.readable_blocks.copy(key, first, count - first)
        await decode.import_blocks(key, first, memoryview(bytes(blocks)))
    await prefill.release(key)
    return await collected(await decode.start_decode(key, tokens[0]), tokens)


def text_of(tokens: Sequence[int]) -> str:
    text: str = TOKENIZER.decode(list(tokens), skip_special_tokens=True)
    return text


def check(schema: Any, answer: Answer) -> None:
    """An answer that has ended is valid; the grammar accepts the beginning of another one."""
    tokens, reason = answer
    if reason is FinishReason.STOP:
        assert tokens[-1] == EOS
        value = json.loads(text_of(tokens))
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
        return
    assert (reason, len(tokens)) == (FinishReason.LENGTH, MAX_TOKENS)
    native = WORDS.compile(grammar_of(schema)).native
    assert native.validate_tokens(tokens) == len(tokens)


async def hold(schema: Any, sampling: dict[str, Any], *, every: int) -> FinishReason:
    """The law for one schema; the answer is continued after each `every`-th token."""
    first, second = engine(), engine()
    try:
        alone = await answered(first, asked(schema, **sampling))
        check(schema, alone)
        tokens, reason = alone
        assert await handed_over(first, second, asked(schema, **sampling)) == alone
        cuts = range(1, len(tokens), every)
        rest = await asyncio.gather(
            *(answered(second, asked(schema, tokens[:cut], **sampling)) for cut in cuts)
        )
        for cut, (more, why) in zip(cuts, rest, strict=True):
            assert (tokens[:cut] + more, why) == alone, f"continued after {cut} tokens"
        return reason
    finally:
        await first.stop()
        await second.stop()


SAMPLING = st.sampled_from(
    [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 2**63, "num_logprobs": 2}]
)


def law(max_examples: int, *, every: int) -> Any:
    """A test of the law with so many random schemas."""
    ended: list[FinishReason] = []

    @seed(1)
    @settings(
        max_examples=max_examples, deadline=None, phases=[Phase.generate], database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(SCHEMAS, SAMPLING)
    def test(schema: Any, sampling: dict[str, Any]) -> None:
        ended.append(asyncio.run(hold(schema, sampling, every=every)))

    test()
    assert len(ended) >= max_examples
    assert ended.count(FinishReason.STOP) > len(ended) // 2, "most answers come to an end"


def test_the_law_holds_for_random_schemas() -> None:
    law(50, every=7)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_law_holds_for_many_random_schemas_after_every_token() -> None:
    law(500, every=1)


async def test_an_answer_is_the_same_after_every_token_of_one_schema() -> None:
    properties = {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 1, "maxItems": 3},
    }
    schema = {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip
    assert await hold(schema, {}, every=1) is FinishReason.STOP


async def test_an_answer_is_the_same_over_the_windows_of_its_matchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "WINDOW", 20)
    monkeypatch.setattr(grammars, "SPARE_TOKENS", 8)
    spares: list[Matcher] = []
    make_spare = Matcher.make_spare

    def counted(one: Matcher) -> None:
        spares.append(one)
        make_spare(one)

    monkeypatch.setattr(Matcher, "make_spare", counted)
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 40}
    await hold(schema, {"temperature": 1.0, "seed": 1}, every=3)
    assert spares


async def test_a_preempted_answer_goes_on_where_it_was() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 40}
    roomy, tight = engine(), engine(65)
    try:
        seeds = range(8)
        want = [await answered(roomy, asked(schema, temperature=1.0, seed=one)) for one in seeds]
        got = await asyncio.gather(
            *(answered(tight, asked(schema, temperature=1.0, seed=one)) for one in seeds)
        )
        assert tight.stats().count("preemptions") > 0
        assert got == want
    finally:
        await roomy.stop()
        await tight.stop()


async def test_constrained_and_free_answers_share_steps_and_are_those_of_each_alone() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 9}
    requests = [asked(schema, temperature=1.0, seed=one) for one in range(4)]
    requests += [asked(b"", temperature=1.0, seed=one, max_tokens=20) for one in range(4)]
    again = [dataclasses.replace(r, key=RequestKey(f"again{i}", 0)) for i, r in enumerate(requests)]
    one = engine()
    try:
        together = await asyncio.gather(*(answered(one, request) for request in requests))
        assert together == [await answered(one, request) for request in again]
        assert one.constraints is not None
        assert one.constraints.num_compiled == 8, "each answer has a matcher of its own"
        assert one.constraints.num_masks > 0
    finally:
        await one.stop()


async def test_an_answer_that_leaves_its_grammar_is_refused_and_others_go_on() -> None:
    schema = {"type": "boolean"}
    one = engine()
    try:
        wrong = answered(one, asked(schema, TOKENIZER.encode("red").ids))
        right = answered(one, asked(schema))
        refused, answer = await asyncio.gather(wrong, right, return_exceptions=True)
        assert isinstance(refused, InvalidRequestError)
        assert refused.code == "invalid_json_schema"
        assert not isinstance(answer, BaseException)
        check(schema, answer)
    finally:
        await one.stop()


async def test_a_long_answer_leaves_later_ones_of_its_grammar_alone() -> None:
    """The string has more lexer states than a matcher may have; copies would share them."""
    schema = {"type": "string", "maxLength": 4000}
    words, constraints = TOKENIZER.encode('"' + TEXT * 80).ids, Constraints(WORDS)
    long = await constraints.prepare(asked(schema))
    for length in range(len(words)):
        masks = constraints.start_masks([ConstrainedRow(0, long, np.array(words[:length]))], 1)
        assert masks.words().any(), (length, long.error)
    after = await constraints.prepare(asked(schema))
    masks = constraints.start_masks([ConstrainedRow(0, after, np.array(words[:1]))], 1)
    assert masks.words().any()
    assert (long.error, after.error) == (None, None)


async def test_a_matcher_is_prepared_with_the_delivered_tokens_beside_the_engine() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 9}
    one = engine()
    try:
        tokens, reason = await answered(one, asked(schema, temperature=1.0, seed=1))
        assert one.constraints is not None
        rest = asked(schema, tokens[:4], temperature=1.0, seed=1)
        matcher = await one.constraints.prepare(rest)
        assert (matcher.num_consumed, one.constraints.num_compiled) == (4, 2)
        stream = one.submit_prefill(rest, for_peer=False, matcher=matcher)
        assert await collected(stream, tokens[:4]) == (tokens, reason)
        assert one.constraints.num_compiled == 2, "the engine thread compiles nothing"
    finally:
        await one.stop()


@pytest.mark.parametrize("grammar", [True, False])
async def test_an_answer_that_was_complete_when_its_pod_was_lost_stops(grammar: bool) -> None:
    one = engine()
    try:
        schema: Any = {"type": "boolean"} if grammar else b""
        tokens = TOKENIZER.encode("true").ids
        sampling = {} if grammar else {"stop_token_ids": (EOS,)}
        for for_peer in (False, True):
            complete = asked(schema, (*tokens, EOS), **sampling)
            stream = one.submit_prefill(complete, for_peer=for_peer)
            assert await collected(stream, []) == ([], FinishReason.STOP)
        assert one.stats().inflight == 0
    finally:
        await one.stop()


@pytest.mark.parametrize(("num_cpus", "num_threads"), [(1, 1), (7, 1), (9, 2), (96, 4)])
def test_a_quarter_of_the_cpus_of_the_process_fills_masks(num_cpus: int, num_threads: int) -> None:
    assert Constraints(WORDS, num_cpus=num_cpus).num_threads == num_threads


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"grammar": b"start: foo"}, "response_format"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 2}, "min_tokens"),
    ],
)
async def test_what_cannot_be_constrained_is_refused_by_name(
    changes: dict[str, Any], param: str
) -> None:
    one = engine()
    try:
        with pytest.raises(InvalidRequestError) as refused:
            await answered(one, asked({"type": "boolean"}, **changes))
        assert refused.value.param == param
    finally:
        await one.stop()


async def test_an_engine_without_a_vocabulary_refuses_a_grammar() -> None:
    bounds = EngineSettings(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
    one = Engine(ChecksumRunner(), settings=bounds, positions=plain_positions)
    one.start(asyncio.get_running_loop())
    try:
        with pytest.raises(InvalidRequestError, match="does not constrain"):
            await answered(one, asked({"type": "boolean"}, max_tokens=20))
    finally:
        await one.stop()


class OneAtATime(Vocabulary):
    """Notes the grammars in the order in which they are compiled; the first one takes long."""

    def __init__(self, watched: Callable[[], object] = lambda: None) -> None:
        super().__init__(TOKENIZER, vocab_size=VOCABULARY, eos_token_ids=(EOS,))
        self.begun, self.end = threading.Event(), threading.Event()
        self.order: list[bytes] = []
        self.seen: list[object] = []
        self._watched = watched

    def compile(self, grammar: bytes) -> Matcher:
        self.begun.set()
        assert self.end.wait(60)
        self.order.append(grammar)
        self.seen.append(self._watched())
        return super().compile(grammar)


async def test_answers_that_have_begun_are_compiled_before_new_ones() -> None:
    """A pod with one thread gets the requests of a lost one behind its own."""
    words = OneAtATime()
    constraints = Constraints(words, num_cpus=1)
    begin = TOKENIZER.encode('"', add_special_tokens=False).ids
    new = [asked({"type": "string", "title": str(number)}) for number in range(3)]
    later = [asked({"type": "string", "title": f"begun {number}"}, begin) for number in range(2)]
    tasks = [asyncio.create_task(constraints.prepare(new[0]))]
    assert await asyncio.to_thread(words.begun.wait, 60)
    tasks += [asyncio.create_task(constraints.prepare(one)) for one in (*new[1:], *later)]
    await asyncio.sleep(0)  # all are in the line
    tasks[1].cancel()
    await asyncio.sleep(0)
    words.end.set()
    await asyncio.wait(tasks)
    assert words.order == [one.sampling.grammar for one in (new[0], *later, new[2])]
    assert [task.result().num_consumed for task in tasks[3:]] == [1, 1]


async def test_the_next_matcher_of_a_running_answer_is_compiled_before_new_ones() -> None:
    begin, inside = (TOKENIZER.encode(text, add_special_tokens=False).ids[0] for text in '"a')
    answer = np.array([begin, *[inside] * (grammars.WINDOW - grammars.SPARE_TOKENS)], np.int32)
    matcher = WORDS.compile(grammar_of({"type": "string"}))
    words = OneAtATime(lambda: matcher._spare is not None)
    constraints = Constraints(words, num_cpus=1)
    tasks = [asyncio.create_task(constraints.prepare(asked({"type": "string"})))]
    assert await asyncio.to_thread(words.begun.wait, 60)
    tasks.append(asyncio.create_task(constraints.prepare(asked({"type": "string"}))))
    await asyncio.sleep(0)
    masks = constraints.start_masks([ConstrainedRow(0, matcher, answer)], 1)
    await asyncio.to_thread(masks.words)
    words.end.set()
    await asyncio.gather(*tasks)
    assert words.seen == [False, True]
