"""Names of a request's parts: an error of the chat path names the field that the client sent. Pure.

messages[2].content[1].image_url.url ─▶ input[3].content[1].image_url
"""

from __future__ import annotations

import re
from typing import Final

from vlm_worker.gateway.api.errors import ApiError

# Parts of a chat that have another name here, wherever they are.
_FIXED: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "image_url.url": "image_url",
}
# Longer than each name of a part. What follows it in a path or message are names of the client.
_MAX_NAME: Final = 128
_MAX_MESSAGE: Final = 4096
_ENTRY_BYTES: Final = 256  # two strings and their place in the dict
_BOUNDARY: Final = re.compile(r"[.\[]")
# An image and a function are objects of their own in a chat.
_FLAT: Final = (
    (re.compile(r"\.image_url\.(url|detail)\Z"), {"url": ".image_url", "detail": ".detail"}),
    (re.compile(r"\.function\.(name|arguments)\Z"), {"name": ".name", "arguments": ".arguments"}),
)
_QUOTED: Final = re.compile(r"(['`])([a-z_]+(?:[.\[][^'`]*)?)\1")


class Paths:
    """The client's names of the parts of one chat. The translation is the only writer."""

    def __init__(self) -> None:
        self._places = dict(_FIXED)

    @property
    def num_bytes(self) -> int:
        """What the names take."""
        return (len(self._places) - len(_FIXED)) * _ENTRY_BYTES

    def put(self, chat: str, ours: str) -> None:
        """Note that the part `chat` of the chat comes from `ours`, and so do the parts in it."""
        self._places[chat] = ours

    def of(self, path: str) -> str:
        """Return the client's name of a part of the chat."""
        ends = [found.start() for found in _BOUNDARY.finditer(path, 0, _MAX_NAME)]
        ends += [len(path)] if len(path) <= _MAX_NAME else []
        for end in sorted(ends, reverse=True):
            ours = self._places.get(path[:end])
            if ours is not None:
                return ours + _flat(path[end:])
        return path

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error of the chat path with the client's names in `param` and message."""
        first, rest = error.message[:_MAX_MESSAGE], error.message[_MAX_MESSAGE:]
        message = _QUOTED.sub(lambda m: f"{m[1]}{self.of(m[2])}{m[1]}", first) + rest
        return ApiError(
            error.status,
            message,
            param=None if error.param is None else self.of(error.param),
            code=error.code,
            retry_after_seconds=error.retry_after_seconds,
        )


def _flat(rest: str) -> str:
    if len(rest) > _MAX_NAME:
        return rest
    for pattern, names in _FLAT:
        if found := pattern.search(rest):
            return rest[: found.start()] + names[found[1]]
    return rest
