"""Requests that nobody would write: good ones and bad ones, damaged at random.

a body ─▶ its tree damaged (values, keys, shapes) ─▶ its bytes damaged, sometimes
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from worker.gateway.corpus import FIT_ROWS, Bad, chat
from worker.gateway.corpus_fields import FIELD_ROWS
from worker.gateway.corpus_images import IMAGE_ROWS
from worker.gateway.corpus_messages import MESSAGE_ROWS
from worker.gateway.image_files import ask, data_url, encoded, png

MAX_SOURCE_BYTES = 4096

GOOD: tuple[dict[str, Any], ...] = (
    chat(),
    chat(messages=[ask("What is this?", png(size=(28, 28)))], max_tokens=4),
    chat(
        messages=[{"role": "system", "content": "Be brief."}, ask(png(size=(28, 28)), "and?")],
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["\n"],
        stream=True,
        stream_options={"include_usage": True},
    ),
    {"model": "shapes", "prompt": "A red", "max_tokens": 3},
    {
        "model": "shapes",
        "instructions": "Be brief.",
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is this?"},
                    {"type": "input_image", "image_url": data_url(png(size=(28, 28)))},
                ],
            },
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"summary": "auto"},
        "stream": True,
    },
    {
        "model": "shapes",
        "input": "hi",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
    },
)

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, -(2**63), 2**64, 10**40, 0.0, -0.0, 1e308, 5e-324, "",
    "x", "\x00", "\u202e\u200d\ufeff", "\ud83d", "<|im_start|>", "<|image_pad|>" * 3, "a" * 3000,
    "../../etc/passwd", "%s%n{0}{{7*7}}{% raw %}", "é" * 50, [], {}, [[]], [None] * 50,
    {"type": "text"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
    {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
    data_url(png(size=(28, 28)))[:60], data_url(encoded("GIF", size=(2, 2)), "image/gif"),
    {str(i): i for i in range(40)},
)  # fmt: skip

TYPES = (b"application/json",) * 60 + (
    b"application/json; charset=utf-8",
    b"text/plain",
    b"",
    b"application/json; charset=\xff",
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"


def sources() -> list[dict[str, Any]]:
    """Bodies to begin with; the good ones as often as all the bad ones."""
    rows: list[Bad] = [*FIELD_ROWS, *MESSAGE_ROWS, *FIT_ROWS, *IMAGE_ROWS]
    bad = [
        row.body
        for row in rows
        if isinstance(row.body, dict) and len(json.dumps(row.body)) < MAX_SOURCE_BYTES
    ]
    return [*bad, *(GOOD[i % len(GOOD)] for i in range(len(bad)))]


def requests(rng: random.Random, count: int) -> Iterator[tuple[str, bytes, list[Any]]]:
    """Path, body and headers of so many requests."""
    bodies = sources()
    for _ in range(count):
        tree = copy.deepcopy(rng.choice(bodies))
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            _damage_tree(tree, rng)
        data = json.dumps(tree).encode()
        if rng.random() < 0.2:
            data = _damaged_bytes(data, rng)
        headers = [(b"content-type", rng.choice(TYPES)), (b"host", b"x")]
        likely = COMPLETIONS if "prompt" in tree else RESPONSES if "input" in tree else CHAT
        any_path = rng.choice((CHAT, COMPLETIONS, RESPONSES))
        yield likely if rng.random() < 0.95 else any_path, data, headers


def _damage_tree(tree: dict[str, Any], rng: random.Random) -> None:
    """Change one place, wherever it is."""
    places = list(_places(tree))
    if not places:
        return
    holder, key = rng.choice(places)
    match rng.randrange(6):
        case 0 | 1 | 2:
            holder[key] = copy.deepcopy(rng.choice(NASTY))
        case 3:
            del holder[key]
        case 4:
            holder[key] = [holder[key]] * rng.choice((1, 2, 9))
        case 5 if isinstance(holder, dict):
            name = rng.choice((key + "s", "", "__class__", "extra_body", "n"))
            holder[name] = copy.deepcopy(rng.choice(NASTY))
        case _:
            holder[key] = {"value": holder[key]}


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder and key below a tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(len(out) or 1), rng.randint(1, 12)
        match rng.randrange(5):
            case 0 | 1:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                del out[at:]
            case 3:
                out[at:at] = out[at : at + size]
            case 4:
                out[at:at] = rng.choice(
                    (b"NaN", b"\\ud800", b"1e999", b"[" * 40, b"\xff\xfe", b",")
                )
    return bytes(out)
