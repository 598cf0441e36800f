"""The prompts of a completion: one or several, each as text or token ids. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from vlm_worker.gateway.api.errors import invalid
from vlm_worker.gateway.api.schema import MAX_TEXT, Fields, check_text, check_token_ids

MAX_PROMPTS: Final = 16
"""With 8 choices each, a request has 128 generations: half of the 256 that one pod may hold."""

MAX_ECHO_BYTES: Final = 256 * 1024
"""What `echo` may add to the answers of a request, which are held until they end."""


@dataclasses.dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt as text or token ids, which are not checked against the vocabulary yet.

    `path` is its name in errors.
    """

    path: str
    content: str | tuple[int, ...]


def parse_prompts(fields: Fields) -> tuple[GivenPrompt, ...]:
    """Take `prompt`: a string, token ids, or an array of strings and arrays of token ids.

    Raises:
        ApiError: 400; it names the invalid prompt.
    """
    value = fields.take("prompt")
    if value is None:
        raise fields.missing("prompt")
    if not isinstance(value, list) or (value and isinstance(value[0], int)):
        return (_prompt("prompt", value),)
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise invalid(
            f"'prompt' must have 1 to {MAX_PROMPTS} prompts, it has {len(value)}; send several "
            "requests.",
            param="prompt",
        )
    return tuple(_prompt(f"prompt[{index}]", one) for index, one in enumerate(value))


def _prompt(path: str, value: Any) -> GivenPrompt:
    if not isinstance(value, list):
        return GivenPrompt(path, check_text(value, path, min_length=1, max_length=MAX_TEXT))
    token_ids = check_token_ids(value, path)
    if not token_ids:
        raise invalid(f"'{path}' must have at least one token id.", param=path)
    return GivenPrompt(path, token_ids)


def check_echo(echoes: Sequence[str], num_choices: int) -> None:
    """Raise ApiError (400) if the prompts that precede all choices are too long."""
    num_bytes = num_choices * sum(len(echo.encode()) for echo in echoes)
    if num_bytes > MAX_ECHO_BYTES:
        raise invalid(
            f"'echo' adds {num_bytes} bytes to the answers; at most {MAX_ECHO_BYTES} are allowed: "
            "send fewer or shorter prompts, or a smaller 'n'.",
            param="echo",
        )
