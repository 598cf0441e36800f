"""What `response_format` may say, what a refusal names, and that no grammar stops the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import signal
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.annotations import MAX_GRAMMAR_BYTES
from vlm_worker.gateway import grammar_process
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.requests import parse_chat
from vlm_worker.gateway.grammar import Grammar, exceeds, of_response_format, of_schema, validated
from vlm_worker.gateway.grammar_checks import MAX_VERDICTS, MAX_WAITING, GrammarChecks
from vlm_worker.gateway.memory import Bound, FullError
from vlm_worker.gateway.turns import at_once

SCHEMA = "response_format.json_schema.schema"


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks()
    yield made
    made.close()


def pid_of(checks: GrammarChecks) -> int:
    pid = checks._process.pid
    assert pid is not None
    return pid


def is_asked(checks: GrammarChecks) -> bool:
    """Whether a grammar is in the pipe of the child, which is stopped."""
    child = checks._process._child
    if child is None or child.stdin is None or child.stdin.closed:
        return False
    return fcntl.ioctl(child.stdin, termios.FIONREAD, bytes(4)) != bytes(4)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  the state of checks
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def stopped(checks: GrammarChecks) -> AsyncIterator[int]:
    """Within the block, the child does nothing; yields its id."""
    await checks.check(of({"type": "object"}), tenant="t")
    pid = pid_of(checks)
    stop(pid)
    yield pid
    resume(pid)


def stop(pid: int) -> None:
    """Stop a child, and wait until it has: before, it may read."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def resume(pid: int) -> None:
    """Let a stopped child go on, or end by the signal that it has got."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, signal.SIGCONT)


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def of(schema: Any) -> Grammar:
    grammar = of_response_format(named(schema))
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_free_text_has_no_grammar(value: Any) -> None:
    assert of_response_format(value) is None


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("json_object", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, SCHEMA),
        (
            {"type": "json_schema", "json_schema": {"schema": {}}},
            "response_format.json_schema.name",
        ),
        (named({}, name="no spaces"), "response_format.json_schema.name"),
        (named({}, strict="yes"), "response_format.json_schema.strict"),
        (named({}, stric=True), "response_format.json_schema.stric"),
        (named(True), SCHEMA),
        (named([]), SCHEMA),
        (named({"x-guidance": {"lenient": True}}), f"{SCHEMA}.x-guidance"),
        (
            named({"properties": {"a": {"x-guidance": {"lenient": True}}}}),
            f"{SCHEMA}.properties.a.x-guidance",
        ),
        (named({"description": "x" * MAX_GRAMMAR_BYTES}), SCHEMA),
    ],
)
def test_a_wrong_response_format_is_refused_by_name(value: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        of_response_format(value)
    assert (refused.value.status, refused.value.param) == (400, param)


class CountingPart(dict[str, Any]):
    """A part of a schema that counts how often anything reads it."""

    num_reads = 0

    def items(self) -> Any:
        CountingPart.num_reads += 1
        return super().items()

    def values(self) -> Any:
        CountingPart.num_reads += 1
        return super().values()


def test_a_schema_that_is_too_large_is_refused_before_all_of_it_is_read() -> None:
    part: Any = CountingPart(type="string")
    num_parts = 1
    while num_parts < MAX_GRAMMAR_BYTES // 2:
        part, num_parts = {"anyOf": [part, part]}, 2 * num_parts
    CountingPart.num_reads = 0
    with pytest.raises(ApiError, match=f"more than the {MAX_GRAMMAR_BYTES} bytes") as refused:
        of_schema(part, "p")
    assert refused.value.param == "p"
    assert CountingPart.num_reads < num_parts // 4


async def test_a_character_counts_as_its_bytes(checks: GrammarChecks) -> None:
    """With escapes, this schema would have twice its bytes."""
    grammar = of({"const": "日" * (MAX_GRAMMAR_BYTES // 4)})
    assert len(grammar.text.encode()) < MAX_GRAMMAR_BYTES
    assert "日" in grammar.text
    await checks.check(of({"enum": ["日", "é"]}), tenant="t")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=VALUES)
def test_a_value_of_as_many_bytes_as_allowed_does_not_exceed_them(value: Any) -> None:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    num_bytes = len(text.encode(errors="surrogatepass"))
    assert not exceeds(value, num_bytes)
    assert exceeds(value, -1)
    assert exceeds([0] * num_bytes, num_bytes)


def test_the_end_of_answers_cannot_be_ignored_and_constrained() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    body |= {"response_format": {"type": "json_object"}, "ignore_eos": True}
    with pytest.raises(ApiError) as refused:
        at_once(parse_chat(body))
    assert refused.value.param == "ignore_eos"


@pytest.mark.parametrize("schema", [
    {}, {"type": "object"}, {"$schema": "http://json-schema.org/draft-07/schema#", "title": "x",
     "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}},
     "$ref": "#/$defs/n"},
    {"properties": {"not": {"type": "string"}, "x-guidance": {"type": "null"}}},
    {"anyOf": [{"type": "integer", "multipleOf": 3}, {"const": "ü"}, {"enum": [1, None, [2]]}]},
    {"type": "string", "pattern": "^[a-z]+$"}, {"type": "string", "format": "date-time"},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
])  # fmt: skip
async def test_what_can_be_enforced_is_accepted(checks: GrammarChecks, schema: Any) -> None:
    await checks.check(of(schema), tenant="t")


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"not": {}}, "not"),
        ({"properties": {"not": {"items": {"if": {}}}}}, "properties.not.items.if"),
        ({"anyOf": [{"type": "null"}, {"uniqueItems": True}]}, "anyOf.1.uniqueItems"),
        ({"$defs": {"a": {"contains": {}}}, "$ref": "#/$defs/a"}, "$defs.a.contains"),
        ({"properties": {"x": {"enum": [{"not": 1}]}, "y": {"not": {}}}}, "properties.y.not"),
        ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"properties": {"a": {"format": "date"}, "b": {"format": "x"}}}, "properties.b.format"),
        ({"items": {"type": "strin"}}, "items.type"),
        ({"items": {"pattern": "(?=a)"}}, "items.pattern"),
        ({"$ref": "https://example.org/schema"}, "$ref"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "properties.a.$ref"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"enum": []}, "enum"),
        ({"properties": 3}, ""),
    ],
)  # fmt: skip
async def test_what_cannot_be_enforced_is_refused_by_keyword_and_path(
    checks: GrammarChecks, schema: Any, where: str
) -> None:
    with pytest.raises(ApiError) as refused:
        await checks.check(of(schema), tenant="t")
    error = refused.value
    assert (error.status, error.code) == (400, "invalid_json_schema")
    assert error.param == (f"{SCHEMA}.{where}" if where else SCHEMA)
    assert error.param in error.message


HOSTILE = {
    "an intersection of patterns": {
        "allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(30)]
    },
    "a product of alternatives": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(6)]}
            for i in range(9)
        ]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_schema_costs_the_child_alone(checks: GrammarChecks, name: str) -> None:
    grammar = of(HOSTILE[name])
    for _ in range(2):
        with pytest.raises(ApiError) as refused:
            await checks.check(grammar, tenant="t")
        assert refused.value.code == "invalid_json_schema"
    assert checks.num_checked == 1, "the verdict is kept"
    await checks.check(of({"type": "object"}), tenant="t")


async def test_the_event_loop_goes_on_while_the_child_works(checks: GrammarChecks) -> None:
    work = asyncio.create_task(checks.check(of(HOSTILE["an intersection of patterns"]), tenant="t"))
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100
    with pytest.raises(ApiError):
        await work


async def test_a_child_that_was_killed_is_replaced(checks: GrammarChecks) -> None:
    await checks.check(of({"type": "object"}), tenant="t")
    os.kill(pid_of(checks), signal.SIGKILL)
    await checks.check(of({"type": "array"}), tenant="t")
    assert (checks.num_checked, checks.num_refused) == (2, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_child_that_is_killed_during_a_check_says_nothing_of_the_grammar(
    checks: GrammarChecks, number: signal.Signals
) -> None:
    async with stopped(checks) as pid:
        check = asyncio.create_task(checks.check(of({"type": "array"}), tenant="t"))
        await until(lambda: is_asked(checks))
        os.kill(pid, number)
        resume(pid)
        await check
    assert checks.num_refused == 0


@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGABRT])
async def test_a_child_that_exceeds_its_own_limits_gives_a_verdict(
    checks: GrammarChecks, number: signal.Signals
) -> None:
    """The timer ends it with SIGPROF, a refused allocation with SIGABRT."""
    grammar = of({"type": "array"})
    async with stopped(checks) as pid:
        check = asyncio.create_task(checks.check(grammar, tenant="t"))
        await until(lambda: is_asked(checks))
        os.kill(pid, number)
        resume(pid)
        with pytest.raises(ApiError, match="takes too long"):
            await check
    assert (checks.knows(grammar), checks.num_refused) == (True, 1)


async def test_without_a_verdict_from_two_children_there_is_a_503_that_is_not_kept(
    checks: GrammarChecks,
) -> None:
    killed: set[int] = set()

    def kill() -> bool:
        pid = checks._process.pid
        if pid is not None and pid not in killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        return check.done()

    check = asyncio.create_task(checks.check(of({"type": "array"}), tenant="t"))
    await until(kill)
    with pytest.raises(ApiError) as failed:
        await check
    assert (failed.value.status, len(killed)) == (503, 2)
    assert failed.value.headers == {"retry-after": "1"}
    await checks.check(of({"type": "array"}), tenant="t")
    assert checks.num_checked == 1


async def test_a_silent_child_gives_no_verdict_and_is_replaced(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar larger than the buffer of a pipe: nothing reads it."""
    large = of({"const": "x" * (200 << 10)})
    async with stopped(checks):
        monkeypatch.setattr(grammar_process, "WALL_SECONDS", 0.05)
        with pytest.raises(ApiError) as failed:
            await checks.check(large, tenant="t")
        monkeypatch.undo()
    assert failed.value.status == 503
    await checks.check(large, tenant="t")


async def test_a_client_that_leaves_changes_no_verdict(checks: GrammarChecks) -> None:
    bad, good = of({"not": {}}), of({"type": "array"})
    async with stopped(checks):
        left = asyncio.create_task(checks.check(bad, tenant="t"))
        await until(lambda: is_asked(checks))
        left.cancel()
        await asyncio.wait([left])
        following = asyncio.create_task(checks.check(good, tenant="t"))
        await asyncio.sleep(0)
    await following
    assert (checks.num_checked, checks.num_refused) == (3, 1), "the verdict on both is kept"
    with pytest.raises(ApiError):
        await checks.check(bad, tenant="t")


async def test_a_check_that_waits_ends_with_its_last_request(checks: GrammarChecks) -> None:
    async with stopped(checks):
        asked = asyncio.create_task(checks.check(of({"type": "array"}), tenant="t"))
        await until(lambda: is_asked(checks))
        both = [asyncio.create_task(checks.check(of({"not": {}}), tenant="t")) for _ in range(2)]
        await until(lambda: checks._turns.num_waiting("t") == 1)
        for one in both:
            one.cancel()
        await asyncio.wait(both)
        assert len(checks._running) == 1
        again = asyncio.create_task(checks.check(of({"type": "null"}), tenant="t"))
        await asyncio.sleep(0)
    await asyncio.gather(asked, again)
    assert (checks.num_checked, checks.num_refused) == (3, 0)


async def test_requests_with_the_same_grammar_share_a_check(checks: GrammarChecks) -> None:
    async with stopped(checks):
        many = [
            asyncio.create_task(checks.check(of({"type": "array"}), tenant=tenant))
            for tenant in "ab" * (MAX_WAITING + 1)
        ]
        await until(lambda: is_asked(checks))
        many.pop(0).cancel()
    await asyncio.gather(*many)
    assert checks.num_checked == 2


async def test_a_tenant_with_many_grammars_delays_another_by_one(checks: GrammarChecks) -> None:
    ended: list[str] = []

    async def check(tenant: str, number: int) -> None:
        await checks.check(of({"const": f"{tenant}{number}"}), tenant=tenant)
        ended.append(tenant)

    async with stopped(checks), asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(check("a", number))
        await until(lambda: is_asked(checks))
        group.create_task(check("b", 0))
        await until(lambda: checks._turns.num_waiting("b") == 1)
        os.kill(pid_of(checks), signal.SIGCONT)
    assert ended.index("b") <= 2


async def test_a_tenant_has_a_bound_on_checks_that_wait(checks: GrammarChecks) -> None:
    async with stopped(checks):
        tasks = [
            asyncio.create_task(checks.check(of({"const": number}), tenant="a"))
            for number in range(MAX_WAITING + 1)
        ]
        await until(lambda: checks._turns.num_waiting("a") == MAX_WAITING)
        with pytest.raises(FullError, match="checks of grammars") as full:
            await checks.check(of({"const": "one more"}), tenant="a")
        assert full.value.bound is Bound.TENANT_CHECKS
        other = asyncio.create_task(checks.check(of({"const": "b"}), tenant="b"))
        for task in tasks[2:]:
            task.cancel()
    await asyncio.gather(*tasks[:2], other)


async def test_the_child_is_asked_through_any_descriptor(checks: GrammarChecks) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    opened = []
    try:
        while not opened or opened[-1] < 1024:  # as connections of clients
            opened.append(os.dup(0))
        await checks.check(of({"type": "object"}), tenant="t")
    finally:
        for one in opened:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_nothing_is_asked_after_the_end(checks: GrammarChecks) -> None:
    async with stopped(checks):
        running = asyncio.create_task(checks.check(of({"type": "array"}), tenant="t"))
        await until(lambda: is_asked(checks))
        await asyncio.to_thread(checks.close)
        with pytest.raises(ApiError) as failed:
            await running
    assert failed.value.status == 503
    assert checks._process.pid is None


async def test_verdicts_are_bounded(checks: GrammarChecks) -> None:
    for number in range(MAX_VERDICTS + 9):
        checks._keep(str(number).encode(), "")
    assert len(checks._verdicts) == MAX_VERDICTS


UNSATISFIABLE: list[tuple[Any, str]] = [
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 5}, "exclusiveMinimum"),
    ({"anyOf": []}, "anyOf"),
    ({"type": "integer", "enum": ["a"]}, "enum"),
    ({"type": "object", "additionalProperties": False, "required": ["minimum ("]}, "required"),
    ({"properties": {"minimum (": {"not": {}}}, "minimum": 1}, "properties.minimum (.not"),
    ({"description": "multiple of", "type": "foo"}, "type"),
    ({"type": "string", "const": "multiple of", "enum": ["b"]}, ""),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, ""),
    ({"type": "string", "maxLength": -1}, "maxLength"),
    ({"minLength": 5, "maxLength": 3, "type": "string"}, "minLength"),
]


@pytest.mark.parametrize("index", range(len(UNSATISFIABLE)))
async def test_an_error_names_a_keyword_of_the_schema_or_none(
    checks: GrammarChecks, index: int
) -> None:
    schema, where = UNSATISFIABLE[index]
    with pytest.raises(ApiError) as refused:
        await checks.check(of(schema), tenant="")
    assert refused.value.param == (f"{SCHEMA}.{where}" if where else SCHEMA)
    lark = f"start: call\ncall: %json {json.dumps(schema)}"
    with pytest.raises(ApiError) as refused:
        await checks.check(validated(lark, "tools", schema=schema), tenant="")
    assert refused.value.param == (f"tools.{where}" if where else "tools")
    with pytest.raises(ApiError) as refused:
        await checks.check(validated(lark, "tool_choice"), tenant="")
    assert refused.value.param == "tool_choice"


async def test_a_lark_text_is_checked_under_its_path(checks: GrammarChecks) -> None:
    arguments = json.dumps({"type": "object"})
    await checks.check(
        validated(f'start: "<call>" args\nargs: %json {arguments}', "tools"), tenant="t"
    )
    with pytest.raises(ApiError) as refused:
        await checks.check(validated("start: nothing", "tools"), tenant="t")
    assert (refused.value.param, refused.value.code) == ("tools", "invalid_json_schema")
    with pytest.raises(ApiError):
        validated("x" * (MAX_GRAMMAR_BYTES + 1), "tools")
