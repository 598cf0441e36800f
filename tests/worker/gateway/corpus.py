"""Bad requests: what a row says, bodies that are no JSON, and what fits in no context."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Bad:
    """One row. `body` is a dict (sent as JSON) or raw bytes."""

    id: str
    body: dict[str, Any] | bytes
    status: int
    code: str
    param: str | None = None
    path: str = "/v1/chat/completions"
    headers: tuple[tuple[str, str], ...] = ()


def chat(**changes: Any) -> dict[str, Any]:
    """A good request, changed; a value of `...` leaves the field out."""
    body = {"model": "shapes", "messages": [{"role": "user", "content": "hi"}], **changes}
    return {name: value for name, value in body.items() if value is not ...}


def raw(text: str) -> bytes:
    """A chat request with something more in it, as it stands."""
    start = '{"model":"shapes","messages":[{"role":"user","content":"hi"}]'
    return f"{start}{text}}}".encode()


def content(value: Any, role: str = "user") -> dict[str, Any]:
    return chat(messages=[{"role": role, "content": value}])


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "hi", **fields}])


COMPLETIONS = "/v1/completions"

JSON_ROWS = [
    Bad("no body", b"", 400, "invalid_json"),
    Bad("an array", b"[]", 400, "invalid_json"),
    Bad("a byte order mark", b"\xef\xbb\xbf" + json.dumps(chat()).encode(), 400, "invalid_json"),
    Bad("trailing garbage", json.dumps(chat()).encode() + b"x", 400, "invalid_json"),
    Bad("a trailing comma", raw(',"n":1,'), 400, "invalid_json"),
    Bad("NaN", raw(',"temperature":NaN'), 400, "invalid_json"),
    Bad("Infinity", raw(',"temperature":Infinity'), 400, "invalid_json"),
    Bad("1e400", raw(',"temperature":1e400'), 400, "invalid_json"),
    Bad("5000 digits", raw(',"seed":' + "1" * 5000), 400, "invalid_json"),
    Bad("a duplicate key", raw(',"n":1,"n":2'), 400, "invalid_json"),
    Bad(
        "a duplicate key deep inside",
        raw(',"metadata":{"a":"1","\\u0061":"2"}'),
        400,
        "invalid_json",
    ),
    Bad("100 000 brackets", b"[" * 100_000, 400, "invalid_json"),
    Bad("33 levels", raw(',"x":' + "[" * 32 + "]" * 32), 400, "invalid_json"),
    Bad("a lone high surrogate", raw(',"user":"\\ud800"'), 400, "invalid_json"),
    Bad("a lone low surrogate", raw(',"user":"\\udc00"'), 400, "invalid_json"),
    Bad(
        "bytes that are no UTF-8",
        raw(',"user":"').replace(b'"user":"', b'"user":"\xff"'),
        400,
        "invalid_json",
    ),
    Bad("a raw control character", raw(',"user":"\n"'), 400, "invalid_json"),
]

FIT_ROWS = [
    Bad("a prompt too long", content("word " * 5000), 400, "context_length_exceeded", "messages"),
    Bad("a megabyte of one word", content("a" * 2**20), 400, "context_length_exceeded", "messages"),
    Bad("an answer too long", chat(max_tokens=4096), 400, "context_length_exceeded", "max_tokens"),
    Bad(
        "a plain prompt too long",
        {"model": "shapes", "prompt": "word " * 5000},
        400,
        "context_length_exceeded",
        "prompt",
        COMPLETIONS,
    ),
    Bad("no prompt", {"model": "shapes"}, 400, "missing_required_parameter", "prompt", COMPLETIONS),
    Bad(
        "an empty prompt",
        {"model": "shapes", "prompt": ""},
        400,
        "invalid_value",
        "prompt",
        COMPLETIONS,
    ),
    Bad(
        "a token id that is none",
        {"model": "shapes", "prompt": [1, "2"]},
        400,
        "invalid_type",
        "prompt[1]",
        COMPLETIONS,
    ),
    Bad(
        "too many prompts",
        {"model": "shapes", "prompt": ["a"] * 17},
        400,
        "invalid_value",
        "prompt",
        COMPLETIONS,
    ),
    Bad(
        "messages as a prompt",
        {**chat(), "prompt": "x"},
        400,
        "unknown_parameter",
        "messages",
        COMPLETIONS,
    ),
    Bad(
        "best of three",
        {"model": "shapes", "prompt": "x", "best_of": 3},
        400,
        "unsupported_parameter",
        "best_of",
        COMPLETIONS,
    ),
    Bad(
        "form data",
        b"model=shapes",
        415,
        "unsupported_media_type",
        headers=(("content-type", "application/x-www-form-urlencoded"),),
    ),
    Bad(
        "latin-1",
        json.dumps(chat()).encode(),
        415,
        "unsupported_media_type",
        headers=(("content-type", "application/json; charset=latin-1"),),
    ),
    Bad(
        "a compressed body",
        b"\x1f\x8b",
        415,
        "unsupported_content_encoding",
        headers=(("content-encoding", "gzip"),),
    ),
    Bad("33 MiB", b" " * (33 * 2**20), 413, "request_too_large"),
]
