"""JSON is read as the standard library reads it, or refused."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.strict_json import MAX_DEPTH, parse_object

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
