"""Validates the bodies of `/v1/chat/completions`, and what `/v1/completions` shares with them.

Pure: it decodes and fetches no image and counts no tokens, so an invalid request is cheap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast, get_args

from vlm_worker.annotations import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_TOKEN_ID,
)
from vlm_worker.gateway.api import schema
from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported
from vlm_worker.gateway.api.parts import ImagePart, TextPart, parse_part
from vlm_worker.gateway.api.schema import MAX_TEXT, Fields, StreamUsage, check_text, refuse
from vlm_worker.gateway.api.tools import MAX_ID, CallsParser, ToolCall, ToolUse, parse_tools
from vlm_worker.gateway.grammar import Grammar, of_response_format
from vlm_worker.gateway.turns import Steps
from vlm_worker.types import PARAMETERS

# Limit on the parts of one message, and of all together; a string is one part.
MAX_PARTS = 1024
MAX_NAME = 64

ChatRole = Literal["system", "user", "assistant", "tool"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Visual = Literal["off", "low", "medium", "high", "auto"]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message. A string stays a string: chat templates render it unlike a list of one text.

    An assistant's message may have `reasoning` and `tool_calls`. A tool's has the id of its call,
    and its `name` is the function that was called.
    """

    role: ChatRole
    content: str | tuple[TextPart | ImagePart, ...]
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def parts(self) -> tuple[TextPart | ImagePart, ...]:
        return (TextPart(self.content),) if isinstance(self.content, str) else self.content


def parse_message(path: str, value: Any, calls: CallsParser) -> Steps[Message]:
    """Check one message; `calls` has those of the messages before it.

    Raises:
        ApiError: it names the invalid part under `path`.
    """
    fields = Fields(path, value)
    role = fields.required_text("role", max_length=32)
    if role == "function":
        raise unsupported(f"{path}.role", f"'{path}.role' is 'function': send 'tool'.")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise invalid(
            f"'{path}.role' must be one of 'system', 'developer', 'user', 'assistant', 'tool'.",
            param=f"{path}.role",
        )
    refuse(fields, schema.MESSAGE)
    known = cast(ChatRole, "system" if role == "developer" else role)
    for field, owner in _OWNERS.items():
        if known != owner and fields.take(field) is not None:
            raise invalid(f"'{path}.{field}' is for the role '{owner}'.", param=f"{path}.{field}")
    reasoning = fields.text("reasoning_content", max_length=MAX_TEXT)
    fields.take("parsed")
    tool_calls = yield from calls.parse(fields)
    call_id, called = None, fields.text("name", min_length=1, max_length=MAX_NAME)
    if known == "tool":
        call_id, called = _answered_call(fields, calls, called)
    content = fields.take("content")
    fields.done()
    if content is None and tool_calls:
        content = ""
    checked = yield from _content(f"{path}.content", content, known)
    return Message(known, checked, reasoning, tool_calls, call_id, called)


_OWNERS: Final[Mapping[str, ChatRole]] = {
    "reasoning_content": "assistant", "tool_calls": "assistant", "parsed": "assistant",
    "tool_call_id": "tool",
}  # fmt: skip


def _answered_call(fields: Fields, calls: CallsParser, given: str | None) -> tuple[str, str]:
    """Return the id and the function of the call that a tool's message answers."""
    call_id = fields.required_text("tool_call_id", max_length=MAX_ID)
    name = calls.name_of(call_id)
    if name is None:
        where = fields.at("tool_call_id")
        raise invalid(
            f"'{where}' is the id of no call in 'tool_calls' of the messages before it; send the "
            "assistant's message with the call.",
            param=where,
        )
    if given not in (None, name):
        where = fields.at("name")
        raise invalid(
            f"'{where}' must be '{name}', the function of its call, or absent.", param=where
        )
    return call_id, name


def _content(
    path: str, value: Any, role: ChatRole
) -> Steps[str | tuple[TextPart | ImagePart, ...]]:
    if value is None:
        raise invalid(f"'{path}' is required.", param=path, code="missing_required_parameter")
    if isinstance(value, str):
        return check_text(value, path, max_length=MAX_TEXT)
    if not isinstance(value, list):
        raise invalid(
            f"'{path}' must be a string or an array of parts.", param=path, code="invalid_type"
        )
    if not 1 <= len(value) <= MAX_PARTS:
        raise invalid(
            f"'{path}' must have 1 to {MAX_PARTS} parts, it has {len(value)}.", param=path
        )
    parts = []
    for index, item in enumerate(value):
        parts.append(parse_part(f"{path}[{index}]", item, role))
        yield
    return tuple(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters of a request.

    `given` has those of `PARAMETERS` that the client sets, by name. `logit_bias` has (token id,
    bias) pairs in the order of their ids. `num_logprobs` is the number of most likely tokens to
    return with the chosen one; None returns no log-probabilities. `num_prompt_logprobs` is that of
    the prompt's tokens. Requests of a larger `priority` run first. `stop_token_ids` end the answer
    and have no text in it. `grammar` is what the answer must be, not checked yet; None if it may be
    anything.
    """

    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    priority: int = 0
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None


def check_end(given: Mapping[str, Any], grammar: Grammar | None) -> None:
    """Raise ApiError (400) if an answer with a grammar should not end where the grammar ends."""
    for name in ("ignore_eos", "min_tokens"):
        if grammar is not None and given.get(name):
            raise invalid(
                f"'{name}' and '{grammar.path}' exclude each other: a grammar says where an answer "
                "ends. Leave one of them out.",
                param=name,
            )


def parse_sampling(
    fields: Fields, num_logprobs: int | None, grammar: Grammar | None = None
) -> SamplingOptions:
    """Take the parameters of both endpoints. Raises ApiError that names the invalid one."""
    given = {}
    for field, parameter in PARAMETERS:
        value: float | bool | None
        if field.kind is bool:
            value = fields.boolean(field.name)
        else:
            take = fields.integer if field.kind is int else fields.number
            value = take(field.name, minimum=parameter.minimum, maximum=parameter.maximum)
        if value is not None:
            given[field.name] = field.default if value == parameter.unset else value
    check_end(given, grammar)
    priority = fields.integer("priority", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)
    return SamplingOptions(
        given=given,
        logit_bias=_logit_bias(fields),
        num_logprobs=num_logprobs,
        # In vLLM's API the smaller value runs first; internally the larger does.
        priority=-(priority or 0),
        stop_token_ids=_stop_token_ids(fields),
        grammar=grammar,
    )


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.array("stop_token_ids", max_length=MAX_STOP_TOKEN_IDS) or []
    if any(type(one) is not int or not 0 <= one <= MAX_TOKEN_ID for one in ids):
        raise invalid(
            f"'stop_token_ids' must have integers from 0 to {MAX_TOKEN_ID}.",
            param="stop_token_ids",
        )
    return tuple(dict.fromkeys(ids))


def chat_logprobs(fields: Fields) -> int | None:
    """Return `num_logprobs` from `logprobs` and `top_logprobs` of a chat."""
    is_enabled = fields.boolean("logprobs") or False
    num_top = fields.integer("top_logprobs", minimum=0, maximum=MAX_LOGPROBS)
    if num_top is not None and not is_enabled:
        raise invalid("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return (num_top or 0) if is_enabled else None


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.child("logit_bias")
    if biases is None:
        return ()
    names = biases.names()
    if len(names) > MAX_LOGIT_BIASES:
        raise _wrong(f"'logit_bias' may have up to {MAX_LOGIT_BIASES} pairs, it has {len(names)}.")
    pairs = {}
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            raise _wrong("'logit_bias' must have token ids as its keys.")
        pairs[int(name)] = _bias(biases.take(name))
    if len(pairs) < len(names):
        raise _wrong("'logit_bias' names a token twice.")
    return tuple(sorted(pairs.items()))


def _bias(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not abs(value) <= MAX_LOGIT_BIAS:  # NaN is not
        raise _wrong(
            f"'logit_bias' must map token ids to numbers between {-MAX_LOGIT_BIAS:g} and "
            f"{MAX_LOGIT_BIAS:g}."
        )
    return float(value)


def _wrong(message: str) -> ApiError:
    return invalid(message, param="logit_bias")


MAX_MESSAGES = 1024
MAX_TOKENS = 2**20
MAX_CHOICES = 8
MAX_STOPS = 16  # OpenAI takes 4; tasks of lm-evaluation-harness send more
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
MAX_SESSION_KEY = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The parameters of both endpoints. None = not set by the client."""

    model: str
    max_tokens: int | None
    max_tokens_param: str
    num_choices: int
    sampling: SamplingOptions
    stop: tuple[str, ...]
    stream: bool
    usage: StreamUsage
    logged: dict[str, Any]


_NO_TOOLS: Final = ToolUse()


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat. If `is_session`, the client named the conversation by `prompt_cache_key`.

    If it `asks`, the prompt ends with the beginning of an answer.
    """

    options: Options
    messages: tuple[Message, ...]
    visual: Visual | None = None
    tools: ToolUse = _NO_TOOLS
    reasoning_effort: Effort | None = None
    is_session: bool = False
    asks: bool = True

    @property
    def images(self) -> tuple[ImagePart, ...]:
        return tuple(part for m in self.messages for part in m.parts if isinstance(part, ImagePart))


def parse_chat(body: dict[str, Any]) -> Steps[ChatRequest]:
    """Check a chat request. Raises ApiError that names the invalid part."""
    fields = Fields("", body)
    refuse(fields, schema.CHAT)
    refuse(fields, schema.EXTRA)
    messages = fields.array("messages", min_length=1, max_length=MAX_MESSAGES)
    if messages is None:
        raise fields.missing("messages")
    max_tokens, param = take_max_tokens(fields, ("max_completion_tokens", "max_tokens"))
    grammar = of_response_format(fields.take("response_format"))
    sampling = parse_sampling(fields, chat_logprobs(fields), grammar)
    options = take_options(fields, max_tokens, param, sampling)
    visual = take_visual(fields)
    tools = yield from parse_tools(fields)
    effort = cast(Effort | None, fields.choice("reasoning_effort", get_args(Effort)))
    is_session = bool(fields.text("prompt_cache_key", max_length=MAX_SESSION_KEY))
    fields.done()
    parsed = yield from _messages(messages)
    return ChatRequest(options, parsed, visual, tools, effort, is_session)


def take_visual(fields: Fields) -> Visual | None:
    return cast(Visual | None, fields.choice("visual", get_args(Visual)))


def _messages(values: Sequence[Any]) -> Steps[tuple[Message, ...]]:
    parsed, num_parts, calls = [], 0, CallsParser()
    for index, value in enumerate(values):
        message = yield from parse_message(f"messages[{index}]", value, calls)
        parsed.append(message)
        num_parts += len(message.parts)
        if num_parts > MAX_PARTS:
            raise invalid(
                f"The messages may have up to {MAX_PARTS} parts in all; there are more.",
                param=f"messages[{index}].content",
            )
        yield
    return tuple(parsed)


def take_options(
    fields: Fields, max_tokens: int | None, max_tokens_param: str, sampling: SamplingOptions
) -> Options:
    """Take the parameters that both endpoints have."""
    stream = fields.boolean("stream") or False
    return Options(
        model=fields.required_text("model", max_length=256),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        num_choices=fields.integer("n", minimum=1, maximum=MAX_CHOICES) or 1,
        sampling=sampling,
        stop=_stop(fields),
        stream=stream,
        usage=_stream_usage(fields, stream),
        logged=_logged(fields),
    )


def take_max_tokens(
    fields: Fields, names: Sequence[str], *, minimum: int = 1
) -> tuple[int | None, str]:
    """Take the limit of the answer by its names; also return the name that has it."""
    given = {
        name: value
        for name in names
        if (value := fields.integer(name, minimum=minimum, maximum=MAX_TOKENS)) is not None
    }
    if len(set(given.values())) > 1:
        raise invalid(
            "'max_tokens' and 'max_completion_tokens' are two names of one limit; they differ.",
            param="max_tokens",
        )
    return (next(iter(given.values())), next(iter(given))) if given else (None, names[0])


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    if isinstance(value, list):
        if len(value) > MAX_STOPS:
            raise invalid(
                f"'stop' may have up to {MAX_STOPS} strings, it has {len(value)}.", param="stop"
            )
        named = [(f"stop[{i}]", item) for i, item in enumerate(value)]
    else:
        named = [("stop", value)]
    return tuple(
        check_text(item, path, min_length=1, max_length=MAX_STOP_LENGTH) for path, item in named
    )


def _stream_usage(fields: Fields, stream: bool) -> StreamUsage:
    options = fields.child("stream_options")
    if options is None:
        return StreamUsage.NONE
    if not stream:
        raise invalid("'stream_options' needs 'stream': true.", param="stream_options")
    include = options.boolean("include_usage") or False
    in_each = options.boolean("continuous_usage_stats") or False
    if in_each and not include:
        raise invalid(
            "'continuous_usage_stats' needs 'include_usage': true.",
            param="stream_options.continuous_usage_stats",
        )
    options.only("include_obfuscation", (False,), "chunks are not padded.")
    options.done()
    if in_each:
        return StreamUsage.IN_EACH
    return StreamUsage.AT_END if include else StreamUsage.NONE


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
    names = metadata.names()
    if len(names) > 16:
        raise invalid(f"'metadata' may have up to 16 pairs, it has {len(names)}.", param="metadata")
    pairs = {}
    for name in names:
        check_text(name, "metadata", max_length=64)
        pairs[name] = check_text(metadata.take(name), "metadata", max_length=512)
    return pairs
