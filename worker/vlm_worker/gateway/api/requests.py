"""The bodies of `/v1/chat/completions` and `/v1/completions` as values, checked to the last field.

Pure: nothing is decoded, fetched or counted here, so a bad request costs next to nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vlm_worker.gateway.api import parameters
from vlm_worker.gateway.api.errors import invalid, unsupported
from vlm_worker.gateway.api.fields import Fields, check_text
from vlm_worker.gateway.api.messages import (
    MAX_PARTS,
    MAX_TEXT,
    ImagePart,
    Message,
    parse_message,
)
from vlm_worker.gateway.api.parameters import refuse
from vlm_worker.gateway.api.sampling import (
    SamplingOptions,
    chat_logprobs,
    completion_logprobs,
    parse_sampling,
)
from vlm_worker.gateway.turns import Steps

MAX_MESSAGES = 1024
MAX_TOKENS = 2**20
MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_LENGTH = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What both endpoints share. None = the client did not say."""

    model: str
    max_tokens: int | None
    max_tokens_param: str
    num_choices: int
    sampling: SamplingOptions
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logged: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRequest:
    """`/v1/chat/completions`."""

    options: Options
    messages: tuple[Message, ...]

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """All pictures, in order."""
        return tuple(part for m in self.messages for part in m.parts if isinstance(part, ImagePart))


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`/v1/completions`."""

    options: Options
    prompt: str


def parse_chat(body: dict[str, Any]) -> Steps[ChatRequest]:
    """Check a chat request; raises ApiError naming the part."""
    fields = Fields("", body)
    refuse(fields, parameters.CHAT)
    refuse(fields, parameters.EXTRA)
    messages = fields.array("messages", min_length=1, max_length=MAX_MESSAGES)
    if messages is None:
        raise fields.missing("messages")
    max_tokens, param = _max_tokens(fields, ("max_completion_tokens", "max_tokens"))
    options = _options(fields, max_tokens, param, parse_sampling(fields, chat_logprobs(fields)))
    fields.done()
    return ChatRequest(options, (yield from _messages(messages)))


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check a completion request; raises ApiError naming the part."""
    fields = Fields("", body)
    refuse(fields, parameters.COMPLETION)
    refuse(fields, parameters.EXTRA)
    prompt = _prompt(fields)
    max_tokens, param = _max_tokens(fields, ("max_tokens",))
    sampling = parse_sampling(fields, completion_logprobs(fields))
    best_of = fields.integer("best_of", minimum=1, maximum=MAX_CHOICES)
    options = _options(fields, 16 if max_tokens is None else max_tokens, param, sampling)
    if best_of not in (None, options.num_choices):
        raise unsupported("best_of", "'best_of' must equal 'n': every choice is returned.")
    fields.done()
    return CompletionRequest(options, prompt)


def _messages(values: Sequence[Any]) -> Steps[tuple[Message, ...]]:
    parsed, num_parts = [], 0
    for index, value in enumerate(values):
        message = yield from parse_message(f"messages[{index}]", value)
        parsed.append(message)
        num_parts += len(message.parts)
        if num_parts > MAX_PARTS:
            raise invalid(
                f"The messages may have up to {MAX_PARTS} parts in all; there are more.",
                param=f"messages[{index}].content",
                code="invalid_value",
            )
        yield
    return tuple(parsed)


def _options(
    fields: Fields, max_tokens: int | None, max_tokens_param: str, sampling: SamplingOptions
) -> Options:
    stream = fields.boolean("stream") or False
    return Options(
        model=fields.required_text("model", max_length=256),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        num_choices=fields.integer("n", minimum=1, maximum=MAX_CHOICES) or 1,
        sampling=sampling,
        stop=_stop(fields),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        logged=_logged(fields),
    )


def _max_tokens(fields: Fields, names: Sequence[str]) -> tuple[int | None, str]:
    given = {
        name: value
        for name in names
        if (value := fields.integer(name, minimum=1, maximum=MAX_TOKENS)) is not None
    }
    if len(set(given.values())) > 1:
        raise invalid(
            "'max_tokens' and 'max_completion_tokens' are two names of one limit; they differ.",
            param="max_tokens",
            code="invalid_value",
        )
    return (next(iter(given.values())), next(iter(given))) if given else (None, names[0])


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    if isinstance(value, list):
        if len(value) > MAX_STOPS:
            raise invalid(
                f"'stop' may have up to {MAX_STOPS} strings, it has {len(value)}.",
                param="stop",
                code="invalid_value",
            )
        named = [(f"stop[{i}]", item) for i, item in enumerate(value)]
    else:
        named = [("stop", value)]
    return tuple(
        check_text(item, path, min_length=1, max_length=MAX_STOP_LENGTH) for path, item in named
    )


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.child("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid(
            "'stream_options' needs 'stream': true.", param="stream_options", code="invalid_value"
        )
    include = options.boolean("include_usage") or False
    options.only("include_obfuscation", (False,), "chunks are not padded.")
    options.done()
    return include


def _logged(fields: Fields) -> dict[str, Any]:
    logged: dict[str, Any] = {
        "user": fields.text("user", max_length=256),
        "safety_identifier": fields.text("safety_identifier", max_length=64),
        "metadata": _metadata(fields),
    }
    return {name: value for name, value in logged.items() if value is not None}


def _metadata(fields: Fields) -> dict[str, str] | None:
    metadata = fields.child("metadata")
    if metadata is None:
        return None
    names = list(metadata.names())
    if len(names) > 16:
        raise invalid(
            f"'metadata' may have up to 16 pairs, it has {len(names)}.",
            param="metadata",
            code="invalid_value",
        )
    pairs = {}
    for name in names:
        check_text(name, "metadata", max_length=64)
        pairs[name] = check_text(metadata.take(name), "metadata", max_length=512)
    return pairs


def _prompt(fields: Fields) -> str:
    value = fields.take("prompt")
    if value is None:
        raise fields.missing("prompt")
    if isinstance(value, list):
        if len(value) != 1 or not isinstance(value[0], str):
            raise unsupported(
                "prompt",
                "'prompt' must be one string: several prompts and token ids are not built.",
            )
        return check_text(value[0], "prompt[0]", min_length=1, max_length=MAX_TEXT)
    return check_text(value, "prompt", min_length=1, max_length=MAX_TEXT)
