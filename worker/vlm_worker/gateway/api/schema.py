"""Defines what the API accepts: typed fields, and a table of parameters.

No parameter is ignored. It has an effect, is written to the log, is accepted because it asks for
the default, or is rejected with a 400. docs/openai.md prints the tables.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
from collections.abc import Sequence
from typing import Any, Final, Self

from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported
from vlm_worker.types import PARAMETERS

# Similarity of names that differ by a letter or two.
_TYPO = 0.85
# Characters of one text.
MAX_TEXT: Final = 4 * 2**20


class Fields:
    """Typed access to one object; `path` is its name in errors, "" for the body itself.

    A null field counts as absent, because OpenAI's client sends null. The methods that take a field
    return None if it is absent, and raise ApiError (400) if it is invalid.
    """

    def __init__(self, path: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise invalid(f"'{path}' must be an object.", param=path, code="invalid_type")
        self.path = path
        self._remaining: dict[str, Any] = dict(value)
        self._known: set[str] = set()

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """Take the raw value, or None."""
        self._known.add(name)
        return self._remaining.pop(name, None)

    def names(self) -> list[str]:
        """The fields that are not taken yet."""
        return list(self._remaining)

    def text(self, name: str, *, max_length: int, min_length: int = 0) -> str | None:
        """Take a string of `min_length` to `max_length` characters."""
        value = self.take(name)
        if value is None:
            return None
        return check_text(value, self.at(name), max_length=max_length, min_length=min_length)

    def required_text(self, name: str, *, max_length: int, min_length: int = 1) -> str:
        value = self.text(name, max_length=max_length, min_length=min_length)
        if value is None:
            raise self.missing(name)
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """Take one of the strings in `choices`."""
        value = self.take(name)
        if value is None or (isinstance(value, str) and value in choices):
            return value
        listed = ", ".join(f"'{choice}'" for choice in choices)
        raise invalid(f"'{self.at(name)}' must be one of {listed}.", param=self.at(name))

    def integer(self, name: str, *, minimum: float, maximum: float) -> int | None:
        """Take an integer in `[minimum, maximum]`; neither 4.0 nor true is one."""
        value = self._number(name, "an integer", int, minimum=minimum, maximum=maximum)
        return None if value is None else int(value)

    def number(self, name: str, *, minimum: float, maximum: float) -> float | None:
        """Take a number in `[minimum, maximum]`."""
        value = self._number(name, "a number", (int, float), minimum=minimum, maximum=maximum)
        return None if value is None else float(value)

    def boolean(self, name: str) -> bool | None:
        value = self.take(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._type(name, "a boolean")

    def child(self, name: str) -> Fields | None:
        value = self.take(name)
        return None if value is None else Fields(self.at(name), value)

    def array(self, name: str, *, max_length: int, min_length: int = 0) -> list[Any] | None:
        """Take an array of `min_length` to `max_length` items."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self._type(name, "an array")
        if not min_length <= len(value) <= max_length:
            raise invalid(
                f"'{self.at(name)}' must have {min_length} to {max_length} items, "
                f"it has {len(value)}.",
                param=self.at(name),
            )
        return value

    def only(self, name: str, neutral: Sequence[Any], message: str) -> None:
        """Reject the field unless its value is in `neutral`, which has no effect."""
        value = self.take(name)
        if value is None or any(_same(value, allowed) for allowed in neutral):
            return
        raise unsupported(self.at(name), f"'{self.at(name)}' is not supported: {message}")

    def done(self) -> Self:
        """Reject the fields that were not taken."""
        for name in self._remaining:
            where = self.at(name if len(name) <= 64 and name.isprintable() else "?")
            meant = difflib.get_close_matches(name[:64], sorted(self._known), 1, _TYPO)
            hint = f": is '{self.at(meant[0])}' meant?" if meant else "."
            raise invalid(
                f"'{where}' is not a known parameter{hint}", param=where, code="unknown_parameter"
            )
        return self

    def missing(self, name: str) -> ApiError:
        """Return the error of a missing required field."""
        return invalid(
            f"'{self.at(name)}' is required.",
            param=self.at(name),
            code="missing_required_parameter",
        )

    def _type(self, name: str, expected: str) -> ApiError:
        return invalid(
            f"'{self.at(name)}' must be {expected}.", param=self.at(name), code="invalid_type"
        )

    def _number(
        self, name: str, expected: str, types: Any, *, minimum: float, maximum: float
    ) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, types):
            raise self._type(name, expected)
        number: float = value
        if minimum <= number <= maximum:  # NaN is in no range, and an integer may exceed any float
            return number
        raise invalid(
            f"'{self.at(name)}' must be between {minimum} and {maximum}.", param=self.at(name)
        )


def check_text(value: Any, path: str, *, max_length: int, min_length: int = 0) -> str:
    """Return a string of valid length. Raises ApiError (400) otherwise."""
    if not isinstance(value, str):
        raise invalid(f"'{path}' must be a string.", param=path, code="invalid_type")
    if not min_length <= len(value) <= max_length:
        raise invalid(
            f"'{path}' must have {min_length} to {max_length} characters, it has {len(value)}.",
            param=path,
        )
    return value


def check_token_ids(value: Any, path: str) -> tuple[int, ...]:
    """Return an array of token ids. Raises ApiError (400) if one is not an integer from 0 on."""
    if not isinstance(value, list):
        raise invalid(f"'{path}' must be an array of token ids.", param=path, code="invalid_type")
    for index, one in enumerate(value):
        if type(one) is not int:
            where = f"{path}[{index}]"
            raise invalid(f"'{where}' must be a token id.", param=where, code="invalid_type")
        if one < 0:
            raise invalid(f"'{path}[{index}]' must be 0 or more.", param=f"{path}[{index}]")
    return tuple(value)


def _same(value: Any, allowed: Any) -> bool:
    """Whether two values are equal; true and 1 are not."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


class StreamUsage(enum.Enum):
    """Which chunks of a stream have `usage`; the others of a stream with usage have null."""

    NONE = enum.auto()
    AT_END = enum.auto()
    IN_EACH = enum.auto()


class Support(enum.StrEnum):
    SUPPORTED = "supported"
    LOGGED = "logged"
    NEUTRAL = "neutral value only"
    UNREAD = "taken unread"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the table. `neutral` are the values that ask for the default."""

    support: Support
    name: str
    note: str
    neutral: tuple[Any, ...] = ()


_supported = functools.partial(Parameter, Support.SUPPORTED)
_logged = functools.partial(Parameter, Support.LOGGED)
_neutral = functools.partial(Parameter, Support.NEUTRAL)
_refused = functools.partial(Parameter, Support.REFUSED)
_unread = functools.partial(Parameter, Support.UNREAD)


def _sampling(*, is_extension: bool) -> list[Parameter]:
    return [
        _supported(field.name, parameter.note)
        for field, parameter in PARAMETERS
        if parameter.is_extension == is_extension
    ]


_SHARED: Final = (
    _supported("model", "required: the served name; any other is 404 `model_not_found`"),
    *_sampling(is_extension=False),
    _supported("stop", "a string or up to 16 of 1 to 256 characters; found across token borders"),
    _supported("stream", "server-sent events"),
    _supported(
        "stream_options",
        "`include_usage`, and vLLM's `continuous_usage_stats` beside it; only with `stream`",
    ),
    _supported("n", "1 to 8 choices; each draws by its own seed, made from the request's"),
    _supported("logit_bias", "up to 1024 pairs: token id to a number from -100 to 100"),
    _logged("user", "up to 256 characters; written to the log, used for nothing else"),
)

CHAT: Final = (
    _supported(
        "messages",
        "required: roles system, developer (as system), user, assistant, tool; see below",
    ),
    _supported("max_completion_tokens", "1 to the context; default: what the context leaves"),
    _supported("max_tokens", "the older name of `max_completion_tokens`; both only if they agree"),
    *_SHARED,
    _logged("safety_identifier", "up to 64 characters; written to the log, used for nothing else"),
    _logged(
        "metadata", "up to 16 pairs, keys to 64 and values to 512 characters; written to the log"
    ),
    _supported(
        "prompt_cache_key",
        "up to 256 characters: images of requests with one are evicted after others, if the "
        "service sets `sessionPinSeconds`; its value has no effect, caches are keyed by content",
    ),
    _supported("logprobs", "of the answer's tokens; see below"),
    _supported("top_logprobs", "0 to 20; only with `logprobs`"),
    _supported(
        "response_format",
        "`text`, `json_object` or `json_schema`; see [constrained answers](#constrained-answers)",
    ),
    _neutral("modalities", "answers are text", (["text"],)),
    _neutral("service_tier", "there is one tier", ("auto", "default")),
    _neutral("store", "nothing is stored", (False,)),
    _refused("audio", "answers are text"),
    _supported(
        "tools", "1 to 128 functions, if the model's chat template writes tools; see tool calls"
    ),
    _supported("tool_choice", "`auto`, `none`, `required`, or a named function"),
    _supported("parallel_tool_calls", "`false`: the answer ends after its first call"),
    _supported(
        "reasoning_effort",
        "`none` to `xhigh`, if the chat template has `enable_thinking` or `reasoning_effort`",
    ),
    _refused("function_call", "send `tool_choice`"),
    _refused("functions", "send `tools`"),
    _refused("moderation", "moderation is not built"),
    _refused("prediction", "predicted output is not built"),
    _refused("prompt_cache_options", "caches are keyed by content and tenant, never by the client"),
    _refused("prompt_cache_retention", "caches keep what fits"),
    _refused("verbosity", "the model has no such setting"),
    _refused("web_search_options", "nothing is fetched from the web"),
)

COMPLETION: Final = (
    _supported(
        "prompt", "required: a string, token ids, or an array of up to 16 of these; see below"
    ),
    _supported("max_tokens", "1 to the context, or 0 with `echo`; default: 16, as with OpenAI"),
    *_SHARED,
    _supported(
        "logprobs",
        "0 to 20 likeliest tokens beside each of the answer's, with `echo` the prompt's; see below",
    ),
    _supported("best_of", "the same as `n`: every choice is returned"),
    _supported(
        "echo",
        "true: each text begins with that of its prompt, with its `logprobs` if you ask for them",
    ),
    _refused("suffix", "the model completes, it does not fill in"),
)

# Extensions that vLLM's clients send in `extra_body`, to both endpoints.
EXTRA: Final = (
    *_sampling(is_extension=True),
    _supported(
        "priority",
        "0 to 1000, 0 by default: a smaller one goes first; "
        "from -1000 where the gateway runs with `--client-priority=any`",
    ),
    _supported(
        "visual",
        "`off`, `low`, `medium`, `high` or `auto`: visual tokens of images of `detail: auto`, if "
        "the service allows it ([visual tokens](visual-tokens.md)); a completion has no images",
    ),
    _supported(
        "stop_token_ids",
        "up to 64 token ids: the answer ends before the first of them, with `stop`",
    ),
    _refused("bad_words", "send a `logit_bias` of -100"),
    _refused("prompt_logprobs", "of `/v1/completions` alone, which takes 0 to 20; see there"),
    _refused("guided_json", "send `response_format` of type `json_schema` to chat completions"),
    _refused("guided_regex", "send a `pattern` in the schema of `response_format`"),
    _refused("guided_choice", "send an `enum` in the schema of `response_format`"),
    _refused("structured_outputs", "send `response_format`"),
)

# vLLM's.
TOKENIZE: Final = (
    _supported("model", "required: the served name; any other is 404 `model_not_found`"),
    _supported("messages", "as in a chat, with its images; either these or `prompt`"),
    _supported("tools", "as in a chat; only with `messages`"),
    _supported("tool_choice", "as in a chat; only with `messages`"),
    _supported("reasoning_effort", "as in a chat; only with `messages`"),
    _supported("visual", "as in a chat; only with `messages`"),
    _supported(
        "add_generation_prompt",
        "true by default: the prompt ends with the beginning of an answer; only with `messages`",
    ),
    _supported("prompt", "a string, as in a completion"),
    _supported(
        "add_special_tokens",
        "true by default: with those that the tokenizer adds around a text; with `messages` only "
        "false, because the chat template writes them",
    ),
    _supported("return_token_strs", "true: `token_strs` has each token as the vocabulary has it"),
    _neutral("continue_final_message", "the last message is complete", (False,)),
    _refused("chat_template", "prompts have the model's chat template"),
    _refused("chat_template_kwargs", "send `reasoning_effort`"),
    _refused("mm_processor_kwargs", "images are shown as `detail` and `visual` ask"),
)

DETOKENIZE: Final = (
    _supported("model", "required: the served name; any other is 404 `model_not_found`"),
    _supported("tokens", "required: an array of ids, of control tokens and images too"),
)

# Fields of a message in OpenAI's client. Any other field is unknown.
MESSAGE: Final = (
    _supported("role", "system, developer, user, assistant or tool; function is refused"),
    _supported("content", "a string, or parts: `text` in any role, `image_url` in user messages"),
    _supported("tool_calls", "of an assistant: up to 128 calls, as an answer has them"),
    _supported("tool_call_id", "of a tool: the id of a call in a message before it"),
    _supported(
        "reasoning_content", "of an assistant; the chat template may leave it out, as in training"
    ),
    _supported(
        "name",
        "1 to 64 characters; `message.name` of the chat template, without effect if it writes no "
        "names; of a tool: the function of its call",
    ),
    _neutral("annotations", "an answer's own field, given back", ([],)),
    _unread(
        "parsed",
        "of an assistant: what a client has read from `content`, as `parsed_arguments` "
        "of a call is from `arguments`; the openai client gives both back",
    ),
    _refused("audio", "audio is not built"),
    _refused("function_call", "send `tool_calls`"),
    _refused("refusal", "the model has no refusals"),
)


def refuse(fields: Fields, table: Sequence[Parameter]) -> None:
    """Take the refused and neutral parameters. Raises ApiError unless their value is neutral."""
    for row in table:
        if row.support in (Support.NEUTRAL, Support.REFUSED):
            fields.only(row.name, row.neutral, f"{row.note}.")
