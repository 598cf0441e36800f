"""The prompts of a completion: one or several, each as text or token ids. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from vlm_worker.gateway.api.errors import invalid
from vlm_worker.gateway.api.schema import MAX_TEXT, Fields, check_text, check_token_ids

MAX_PROMPTS: Final = 16
"""With 8 choices each, a request has 128 generations: half of the 256 that one pod may hold."""


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
