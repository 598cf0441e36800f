"""Bad requests: what is sent, and what comes back. Each is refused before any model runs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from worker.gateway.pictures import ask, png


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
PARTS = [{"type": "text", "text": "x"}] * 10_000

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

FIELD_ROWS = [
    Bad("no model", chat(model=...), 400, "missing_required_parameter", "model"),
    Bad("another model", chat(model="gpt-4o"), 404, "model_not_found", "model"),
    Bad("a model that is a number", chat(model=5), 400, "invalid_type", "model"),
    Bad("no messages", chat(messages=...), 400, "missing_required_parameter", "messages"),
    Bad("null messages", chat(messages=None), 400, "missing_required_parameter", "messages"),
    Bad("empty messages", chat(messages=[]), 400, "invalid_value", "messages"),
    Bad("messages as a string", chat(messages="hi"), 400, "invalid_type", "messages"),
    Bad("a message as a string", chat(messages=["hi"]), 400, "invalid_type", "messages[0]"),
    Bad("an unknown parameter", chat(chat_template="x"), 400, "unknown_parameter", "chat_template"),
    Bad(
        "a template argument",
        chat(chat_template_kwargs={}),
        400,
        "unknown_parameter",
        "chat_template_kwargs",
    ),
    Bad(
        "an unknown parameter with an odd name", chat(**{"\x00": 1}), 400, "unknown_parameter", "?"
    ),
    Bad("a temperature too high", chat(temperature=2.1), 400, "invalid_value", "temperature"),
    Bad("a negative temperature", chat(temperature=-0.1), 400, "invalid_value", "temperature"),
    Bad("a temperature as text", chat(temperature="1"), 400, "invalid_type", "temperature"),
    Bad("a temperature that is true", chat(temperature=True), 400, "invalid_type", "temperature"),
    Bad("top_p above 1", chat(top_p=1.5), 400, "invalid_value", "top_p"),
    Bad("no tokens at all", chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    Bad("a fraction of a token", chat(max_tokens=1.5), 400, "invalid_type", "max_tokens"),
    Bad("a billion tokens", chat(max_tokens=10**9), 400, "invalid_value", "max_tokens"),
    Bad(
        "two limits that differ",
        chat(max_tokens=5, max_completion_tokens=6),
        400,
        "invalid_value",
        "max_tokens",
    ),
    Bad("a seed beyond 64 bits", chat(seed=2**63), 400, "invalid_value", "seed"),
    Bad("five stop strings", chat(stop=list("abcde")), 400, "invalid_value", "stop"),
    Bad("an empty stop string", chat(stop=[""]), 400, "invalid_value", "stop[0]"),
    Bad("a stop string too long", chat(stop="x" * 257), 400, "invalid_value", "stop"),
    Bad("a stop that is a number", chat(stop=5), 400, "invalid_type", "stop"),
    Bad("stream as text", chat(stream="yes"), 400, "invalid_type", "stream"),
    Bad(
        "stream options without a stream",
        chat(stream_options={"include_usage": True}),
        400,
        "invalid_value",
        "stream_options",
    ),
    Bad(
        "an unknown stream option",
        chat(stream=True, stream_options={"x": 1}),
        400,
        "unknown_parameter",
        "stream_options.x",
    ),
    Bad("metadata with a number", chat(metadata={"a": 1}), 400, "invalid_type", "metadata"),
    Bad(
        "17 pairs of metadata",
        chat(metadata={str(i): "" for i in range(17)}),
        400,
        "invalid_value",
        "metadata",
    ),
    Bad("a user too long", chat(user="x" * 257), 400, "invalid_value", "user"),
    Bad("no answer", chat(n=0), 400, "invalid_value", "n"),
    Bad("a million answers", chat(n=10**6), 400, "invalid_value", "n"),
    Bad("likeliest tokens alone", chat(top_logprobs=3), 400, "invalid_value", "top_logprobs"),
    Bad(
        "too many likeliest tokens",
        chat(logprobs=True, top_logprobs=21),
        400,
        "invalid_value",
        "top_logprobs",
    ),
    Bad("tools", chat(tools=[]), 400, "unsupported_parameter", "tools"),
    Bad(
        "a JSON schema",
        chat(response_format={"type": "json_object"}),
        400,
        "unsupported_parameter",
        "response_format",
    ),
    Bad("a bias of a word", chat(logit_bias={"five": 1}), 400, "invalid_value", "logit_bias"),
    Bad("a bias of a million", chat(logit_bias={"5": 1e6}), 400, "invalid_value", "logit_bias"),
    Bad(
        "a bias of a token beyond the model's",
        chat(logit_bias={"9999999": 1}),
        400,
        "invalid_value",
        "logit_bias",
    ),
    Bad("a penalty of three", chat(presence_penalty=3), 400, "invalid_value", "presence_penalty"),
    Bad(
        "a penalty of nothing",
        chat(repetition_penalty=0),
        400,
        "invalid_value",
        "repetition_penalty",
    ),
    Bad("a negative share", chat(min_p=-0.5), 400, "invalid_value", "min_p"),
    Bad("a priority of a million", chat(priority=10**6), 400, "invalid_value", "priority"),
    Bad("audio answers", chat(modalities=["audio"]), 400, "unsupported_parameter", "modalities"),
]

MESSAGE_ROWS = [
    Bad(
        "no role",
        chat(messages=[{"content": "x"}]),
        400,
        "missing_required_parameter",
        "messages[0].role",
    ),
    Bad("an unknown role", content("x", role="god"), 400, "invalid_value", "messages[0].role"),
    Bad(
        "a tool's answer",
        content("x", role="tool"),
        400,
        "unsupported_parameter",
        "messages[0].role",
    ),
    Bad(
        "no content",
        chat(messages=[{"role": "user"}]),
        400,
        "missing_required_parameter",
        "messages[0].content",
    ),
    Bad("content as a number", content(5), 400, "invalid_type", "messages[0].content"),
    Bad("no parts", content([]), 400, "invalid_value", "messages[0].content"),
    Bad("10 000 parts", content(PARTS), 400, "invalid_value", "messages[0].content"),
    Bad("a name", message(name="bob"), 400, "unsupported_parameter", "messages[0].name"),
    Bad(
        "tool calls",
        message(tool_calls=[{}]),
        400,
        "unsupported_parameter",
        "messages[0].tool_calls",
    ),
    Bad("an unknown field in a message", message(x=1), 400, "unknown_parameter", "messages[0].x"),
    Bad("a part as text", content(["x"]), 400, "invalid_type", "messages[0].content[0]"),
    Bad(
        "a part without a type",
        content([{"text": "x"}]),
        400,
        "missing_required_parameter",
        "messages[0].content[0].type",
    ),
    Bad(
        "an unknown part",
        content([{"type": "smell"}]),
        400,
        "invalid_value",
        "messages[0].content[0].type",
    ),
    Bad(
        "sound",
        content([{"type": "input_audio"}]),
        400,
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    Bad(
        "a video",
        content([{"type": "video_url"}]),
        400,
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    Bad(
        "a text part without text",
        content([{"type": "text"}]),
        400,
        "missing_required_parameter",
        "messages[0].content[0].text",
    ),
    Bad(
        "a text part with more",
        content([{"type": "text", "text": "x", "y": 1}]),
        400,
        "unknown_parameter",
        "messages[0].content[0].y",
    ),
    Bad(
        "a picture in a system message",
        chat(messages=[ask(png(), role="system")]),
        400,
        "invalid_value",
        "messages[0].content[0]",
    ),
    Bad(
        "five pictures",
        chat(messages=[ask(*[png()] * 5)]),
        400,
        "too_many_images",
        "messages[0].content[4].image_url",
    ),
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
        "token ids",
        {"model": "shapes", "prompt": [1, 2]},
        400,
        "unsupported_parameter",
        "prompt",
        COMPLETIONS,
    ),
    Bad(
        "several prompts",
        {"model": "shapes", "prompt": ["a", "b"]},
        400,
        "unsupported_parameter",
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

ROWS = [*JSON_ROWS, *FIELD_ROWS, *MESSAGE_ROWS, *FIT_ROWS]
