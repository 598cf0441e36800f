"""JSON is read as the standard library reads it, or refused."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.body import (
    MAX_DATA_STRINGS,
    MAX_DEPTH,
    MAX_REST_BYTES,
    MAX_VALUES,
    read_json,
)
from vlm_worker.gateway.memory import MemoryBudget
from vlm_worker.gateway.turns import Steps, at_once


def parse_object(body: bytes) -> dict[str, Any]:
    return at_once(read_json(body)).value


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=5)
    ),
    max_leaves=30,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES), st.booleans())
def test_what_is_valid_is_read_as_by_the_standard_library(
    value: dict[str, object], ascii_only: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_object(text.encode()) == json.loads(text)


@given(st.text('{}[]":\\,a1 ', max_size=40))
def test_what_the_standard_library_refuses_is_refused(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        with pytest.raises(ApiError, match="not valid"):
            parse_object(text.encode())


@given(st.text('{}[]":\\,a1 ', max_size=40).map(lambda inner: '{"a":' + inner + "}"))
def test_keys_are_counted_rightly_whatever_strings_hold(text: str) -> None:
    pairs_seen = 0

    def count(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal pairs_seen
        pairs_seen += len(pairs) - len(dict(pairs))
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=count)
    except ValueError:
        return
    if pairs_seen:
        with pytest.raises(ApiError, match="twice"):
            parse_object(text.encode())
    else:
        assert parse_object(text.encode()) == value


def test_the_deepest_allowed_is_read_and_one_more_is_not() -> None:
    inner = MAX_DEPTH - 1
    assert parse_object(b'{"a":' + b"[" * inner + b"]" * inner + b"}")
    with pytest.raises(ApiError, match="deeper"):
        parse_object(b'{"a":' + b"[" * (inner + 1) + b"]" * (inner + 1) + b"}")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"a":"' + b"\\" * 8_000_000 + b'"}', id="backslashes"),
        pytest.param(b'{"a":' + b'"' * 8_000_001, id="quotes"),
        pytest.param(b"[" * 8_000_000, id="brackets"),
        pytest.param(b'{"a":1,' * 1_000_000, id="objects"),
    ],
)
def test_hostile_bodies_take_linear_time(body: bytes) -> None:
    started = time.perf_counter()
    with contextlib.suppress(ApiError):
        parse_object(body)
    assert time.perf_counter() - started < 5.0


# ---- bounds, before anything is decoded ----------------------------------------------------------

LARGE = 31 * 2**20


def steps_of(work: Steps[object]) -> tuple[int, BaseException | None]:
    """How many steps it takes, and how it ends."""
    count = 0
    try:
        while True:
            next(work)
            count += 1
    except StopIteration:
        return count, None
    except ApiError as error:
        return count, error


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'{"a":{}},', b"0,", b'"",', b"[["])
def test_a_large_body_of_any_values_is_refused_before_it_is_read_to_its_end(unit: bytes) -> None:
    body = bytearray(b'{"a":[' + unit * (LARGE // len(unit)) + b"0]}")
    count, error = steps_of(read_json(body))
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (400, "request_too_large")
    assert str(MAX_REST_BYTES) in error.message
    assert count < 4 * 2**20 // 512


def test_a_body_of_too_many_data_strings_is_refused_before_they_are_all_looked_at() -> None:
    body = bytearray(b'{"a":[' + b'"data:",' * (LARGE // 8) + b"0]}")
    count, error = steps_of(read_json(body))
    assert isinstance(error, ApiError)
    assert (error.status, error.code) == (400, "invalid_json")
    assert str(MAX_DATA_STRINGS) in error.message
    assert count <= MAX_DATA_STRINGS // 256
    assert (
        at_once(read_json(b'{"a":"' + b'\\"data:' * 1000 + b'"}')).value["a"].count("data:") == 1000
    )


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'{"a":{}},', b"0,", b'"",'])
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(unit: bytes) -> None:
    def of(count: int) -> bytes:
        return b'{"a":[' + unit * count + b"0]}"

    per_unit = unit.count(b",") + unit.count(b"[") + unit.count(b"{")
    fits = (MAX_VALUES - 5) // per_unit
    assert len(parse_object(of(fits))["a"]) == fits + 1
    with pytest.raises(ApiError, match=f"more than {MAX_VALUES} values"):
        parse_object(of(fits + 5))
    with pytest.raises(ApiError, match=f"more than {MAX_VALUES} values"):
        parse_object(of(4 * 2**20 // len(unit) - 10))


def test_the_work_on_a_large_body_comes_in_small_steps() -> None:
    url = b"data:image/png;base64," + b"A" * (LARGE - 2**20)
    body = b'{"m":{"url":"' + url + b'"},"t":"' + b"\\n" * 2**18 + b'"}'
    count, error = steps_of(read_json(bytearray(body)))
    assert error is None
    assert count > LARGE // 2**18


# ---- images are taken out ------------------------------------------------------------------------

URLS = st.integers(0, 3).map(lambda n: "data:image/png;base64," + "AB/+" * 2000 * n)
PARTS = st.recursive(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | URLS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["url", "x", 'url"', "\\"]), inner, max_size=3
    ),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["url", "a", "b"]), PARTS), st.booleans(), st.booleans())
def test_with_the_images_put_back_it_reads_as_by_the_standard_library(
    value: dict[str, object], spaced: bool, slashes: bool
) -> None:
    text = json.dumps(value, separators=(" , ", " : ") if spaced else (",", ":"))
    text = text.replace("/", "\\/") if slashes else text
    found = at_once(read_json(text.encode()))
    long_urls = []

    def put_back(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: put_back(item) for name, item in part.items()}
        if isinstance(part, list):
            return [put_back(item) for item in part]
        if part in found.images:
            long_urls.append(part)
            return json.loads(b'"' + bytes(found.images[part]) + b'"')
        return part

    assert put_back(found.value) == json.loads(text)
    assert len(long_urls) == len(found.images)


# ---- memory --------------------------------------------------------------------------------------

MANY = MAX_VALUES // 4
SHAPES = {
    "empty lists": b"[" + b",".join([b"[]"] * MANY) + b"]",
    "objects with a key": b"[" + b",".join(b'{"k%d":{}}' % n for n in range(MANY)) + b"]",
    "objects in objects": b"[" + b",".join([b'{"a":' * 9 + b"{}" + b"}" * 9] * (MANY // 5)) + b"]",
    "one object": b"{" + b",".join(b'"key %d":%d.5' % (n, n) for n in range(2 * MANY)) + b"}",
    "short strings": b"[" + b",".join(b'"s%d"' % n for n in range(2 * MANY)) + b"]",
    "a long text": b'"' + b"x" * (3 << 20) + b'"',
    "a long text with one wide character": b'"' + b"x" * (3 << 20) + "\U0001f642".encode() + b'"',
    "wide characters by their numbers": b'"' + b"\\ud83d\\ude42" * (100 << 10) + b'"',
}


@pytest.mark.parametrize("value", SHAPES.values(), ids=SHAPES.keys())
def test_what_json_is_decoded_to_takes_no_more_than_was_held_for_it(value: bytes) -> None:
    body = b'{"value":' + value + b"}"
    held = MemoryBudget(1 << 40).hold("", shared=False)
    held.admit(len(body))
    at_once(read_json(body, held.decode))  # patterns are compiled, and the like
    held.release()
    held.admit(len(body))
    tracemalloc.start()
    try:
        found = at_once(read_json(body, held.decode))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.value
    # the body itself was there before
    assert peak + len(body) <= held.num_bytes
