"""Defines what the API accepts: strict JSON, typed fields, and a table of parameters.

The decoder rejects duplicate keys, NaN, lone surrogates and deep nesting. Parsers differ on them,
so another parser may have validated a different request. The decoder counts values before it
decodes them, in the text with its strings blanked out:

    {"a": [1, {"b": "…"}]}  ──blank──▶  {:[1,{:}]}   depth 3, 4 values, 2 keys

No parameter is ignored. It has an effect, is written to the log, is accepted because it asks for
the default, or is rejected with a 400. docs/openai.md prints the tables.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

import msgspec

from vlm_worker import annotations as an
from vlm_worker.gateway.api.data_urls import BodyBytes, take_images
from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported
from vlm_worker.gateway.turns import Steps
from vlm_worker.types import PARAMETERS

# Similarity of names that differ by a letter or two.
_TYPO = 0.85


class Fields:
    """Typed access to one object; `path` is its name in errors, "" for the body itself.

    A null field counts as absent, because OpenAI's client sends null. The methods that take a field
    return None if it is absent, and raise ApiError (400) if it is invalid.
    """

    def __init__(self, path: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise invalid(f"'{path}' must be an object.", param=path, code="invalid_type")
        self.path = path
        self._left: dict[str, Any] = dict(value)
        self._known: set[str] = set()

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """Take the raw value, or None."""
        self._known.add(name)
        return self._left.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._left.get(name) is not None

    def names(self) -> Iterator[str]:
        """Yield the fields that are not taken yet."""
        yield from self._left

    def text(self, name: str, *, max_length: int, min_length: int = 0) -> str | None:
        """Take a string of `min_length` to `max_length` characters."""
        value = self.take(name)
        return (
            None
            if value is None
            else check_text(value, self.at(name), max_length=max_length, min_length=min_length)
        )

    def required_text(self, name: str, *, max_length: int, min_length: int = 1) -> str:
        """Take a string; its absence is an error."""
        value = self.text(name, max_length=max_length, min_length=min_length)
        return self._required(name, value)

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """Take one of the strings in `choices`."""
        value = self.take(name)
        if value is None or (isinstance(value, str) and value in choices):
            return value
        listed = ", ".join(f"'{choice}'" for choice in choices)
        raise invalid(
            f"'{self.at(name)}' must be one of {listed}.", param=self.at(name), code="invalid_value"
        )

    def integer(self, name: str, *, minimum: float, maximum: float) -> int | None:
        """Take an integer in `[minimum, maximum]`; neither 4.0 nor true is one."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._type(name, "an integer")
        return int(self._bounded(name, value, minimum, maximum))

    def number(self, name: str, *, minimum: float, maximum: float) -> float | None:
        """Take a number in `[minimum, maximum]`."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._type(name, "a number")
        return float(self._bounded(name, value, minimum, maximum))

    def parameter(self, field: an.Field, parameter: an.Parameter) -> float | bool | None:
        """Take a sampling parameter within its bounds."""
        if field.kind is bool:
            return self.boolean(field.name)
        take = self.integer if field.kind is int else self.number
        return take(field.name, minimum=parameter.minimum, maximum=parameter.maximum)

    def boolean(self, name: str) -> bool | None:
        value = self.take(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._type(name, "a boolean")

    def child(self, name: str) -> Fields | None:
        """Take an object."""
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
                code="invalid_value",
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
        for name in self._left:
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

    def _required(self, name: str, value: str | None) -> str:
        if value is None:
            raise self.missing(name)
        return value

    def _type(self, name: str, wanted: str) -> ApiError:
        return invalid(
            f"'{self.at(name)}' must be {wanted}.", param=self.at(name), code="invalid_type"
        )

    def _bounded(self, name: str, value: float, minimum: float, maximum: float) -> float:
        if math.isfinite(value) and minimum <= value <= maximum:
            return value
        raise invalid(
            f"'{self.at(name)}' must be between {minimum} and {maximum}.",
            param=self.at(name),
            code="invalid_value",
        )


def check_text(value: Any, path: str, *, max_length: int, min_length: int = 0) -> str:
    """Return a string of valid length. Raises ApiError (400) otherwise."""
    if not isinstance(value, str):
        raise invalid(f"'{path}' must be a string.", param=path, code="invalid_type")
    if not min_length <= len(value) <= max_length:
        raise invalid(
            f"'{path}' must have {min_length} to {max_length} characters, it has {len(value)}.",
            param=path,
            code="invalid_value",
        )
    return value


def _same(value: Any, allowed: Any) -> bool:
    """Whether two values are equal; true and 1 are not."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


class Support(enum.StrEnum):
    """Treatment of a parameter."""

    SUPPORTED = "supported"
    LOGGED = "logged"
    NEUTRAL = "neutral value only"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the table. `neutral` are the values that ask for the default."""

    name: str
    support: Support
    note: str
    neutral: tuple[Any, ...] = ()


def _supported(name: str, note: str) -> Parameter:
    return Parameter(name, Support.SUPPORTED, note)


def _logged(name: str, note: str) -> Parameter:
    return Parameter(name, Support.LOGGED, note)


def _neutral(name: str, note: str, *values: Any) -> Parameter:
    return Parameter(name, Support.NEUTRAL, note, values)


def _refused(name: str, note: str) -> Parameter:
    return Parameter(name, Support.REFUSED, note)


def _sampling(*, is_extension: bool) -> list[Parameter]:
    return [
        _supported(field.name, parameter.note)
        for field, parameter in PARAMETERS
        if parameter.is_extension == is_extension
    ]


_SHARED: Final = (
    _supported("model", "required: the served name; any other is 404 `model_not_found`"),
    *_sampling(is_extension=False),
    _supported("stop", "a string or up to 4 of 1 to 256 characters; found across token borders"),
    _supported("stream", "server-sent events"),
    _supported("stream_options", "`include_usage`; only with `stream`"),
    _supported("n", "1 to 8 choices; each draws by its own seed, made from the request's"),
    _supported("logit_bias", "up to 1024 pairs: token id to a number from -100 to 100"),
    _logged("user", "up to 256 characters; written to the log, used for nothing else"),
)

CHAT: Final = (
    _supported(
        "messages",
        "required: roles system, developer (as system), user, assistant; see the parts below",
    ),
    _supported("max_completion_tokens", "1 to the context; default: what the context leaves"),
    _supported("max_tokens", "the older name of `max_completion_tokens`; both only if they agree"),
    *_SHARED,
    _logged("safety_identifier", "up to 64 characters; written to the log, used for nothing else"),
    _logged(
        "metadata", "up to 16 pairs, keys to 64 and values to 512 characters; written to the log"
    ),
    _supported("logprobs", "of the answer's tokens; see below"),
    _supported("top_logprobs", "0 to 20; only with `logprobs`"),
    _neutral("modalities", "answers are text", ["text"]),
    _neutral("response_format", "constrained output is not built", {"type": "text"}),
    _neutral("service_tier", "there is one tier", "auto", "default"),
    _neutral("store", "nothing is stored", False),
    _refused("audio", "answers are text"),
    _refused("function_call", "tools are not built"),
    _refused("functions", "tools are not built"),
    _refused("moderation", "moderation is not built"),
    _refused("parallel_tool_calls", "tools are not built"),
    _refused("prediction", "predicted output is not built"),
    _refused("prompt_cache_key", "caches are keyed by content and tenant, never by the client"),
    _refused("prompt_cache_options", "caches are keyed by content and tenant, never by the client"),
    _refused("prompt_cache_retention", "caches keep what fits"),
    _refused("reasoning_effort", "the model has no such setting"),
    _refused("tool_choice", "tools are not built"),
    _refused("tools", "tools are not built"),
    _refused("verbosity", "the model has no such setting"),
    _refused("web_search_options", "nothing is fetched from the web"),
)

COMPLETION: Final = (
    _supported("prompt", "required: one string, or an array of one"),
    _supported("max_tokens", "1 to the context; default: 16, as with OpenAI"),
    *_SHARED,
    _supported("logprobs", "0 to 20 likeliest tokens beside each of the answer's; see below"),
    _supported("best_of", "the same as `n`: every choice is returned"),
    _neutral("echo", "the prompt is not repeated", False),
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
    _refused("min_tokens", "an answer may end at its first token; `ignore_eos` is taken"),
    _refused("stop_token_ids", "answers end by text: send `stop`"),
    _refused("bad_words", "send a `logit_bias` of -100"),
    _refused("prompt_logprobs", "`logprobs` are of the answer"),
    _refused("guided_json", "constrained output is not built"),
    _refused("guided_regex", "constrained output is not built"),
    _refused("guided_choice", "constrained output is not built"),
    _refused("structured_outputs", "constrained output is not built"),
)

# Fields of a message in OpenAI's client. Any other field is unknown.
MESSAGE: Final = (
    _supported("role", "system, developer, user or assistant; tool and function are refused"),
    _supported("content", "a string, or parts: `text` in any role, `image_url` in user messages"),
    _refused("name", "the chat template knows no names"),
    _neutral("annotations", "an answer's own field, given back", []),
    _refused("audio", "audio is not built"),
    _refused("function_call", "tools are not built"),
    _refused("refusal", "the model has no refusals"),
    _refused("tool_call_id", "tools are not built"),
    _refused("tool_calls", "tools are not built"),
)


def refuse(fields: Fields, table: Sequence[Parameter]) -> None:
    """Take the refused and neutral parameters. Raises ApiError unless their value is neutral."""
    for row in table:
        if row.support in (Support.NEUTRAL, Support.REFUSED):
            fields.only(row.name, row.neutral, f"{row.note}.")


MAX_DEPTH: Final = 32
MAX_VALUES: Final = 16_384
"""Limit on the JSON values of a body; 1,024 messages with an image each have 8,200."""

# Blanking this many bytes takes less than a millisecond, for any content.
_PIECE = 16 * 1024
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclasses.dataclass(frozen=True, slots=True)
class JsonBody:
    """A JSON object. `images` has the long data URLs by their placeholders in `value`."""

    value: dict[str, Any]
    images: Mapping[str, memoryview]


def read_json(body: BodyBytes, hold: Callable[[int, int], None] | None = None) -> Steps[JsonBody]:
    """Decode the JSON object in `body`.

    Before it decodes, it calls `hold` with the numbers of bytes and values without the images.

    Raises:
        ApiError: 400; the message does not contain the input.
        FullError: from `hold`.
    """
    taken = yield from take_images(body)
    num_keys, num_values = yield from _count_keys_and_values(taken.rest)
    if hold is not None:
        hold(len(taken.rest), num_values)
    try:
        value = msgspec.json.decode(taken.rest)
    except msgspec.ValidationError as error:
        raise _invalid("a number is out of range") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid("it cannot be parsed as JSON in UTF-8") from error
    yield
    if not isinstance(value, dict):
        raise _invalid("it must be a JSON object")
    if _count_keys(value) != num_keys:
        raise _invalid("a key occurs twice in one object")
    return JsonBody(value, taken.images)


def _count_keys_and_values(text: bytes) -> Steps[tuple[int, int]]:
    """Count the keys, repeated ones included, and the values of a JSON text.

    Raises:
        ApiError: 400; the text is nested too deeply or has too many values.
    """
    at = depth = inside = num_keys = num_quotes = 0
    num_values = 1
    while at < len(text):
        end = _between_escapes(text, at, at + _PIECE)
        piece = text[at:end]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        # The remaining quotes delimit strings.
        num_quotes += piece.count(b'"')
        if num_quotes > 4 * MAX_VALUES:
            raise _too_many_values()
        segments = piece.split(b'"')
        skeleton = b"".join(segments[inside::2])
        inside = (inside + len(segments) - 1) % 2
        num_keys += skeleton.count(b":")
        num_values += sum(map(skeleton.count, (b",", b"[", b"{")))
        if num_values > MAX_VALUES:
            raise _too_many_values()
        depth = _depth_after(depth, skeleton.translate(None, _NOT_BRACKETS))
        at = end
        yield
    return num_keys, num_values


def _between_escapes(text: bytes, start: int, end: int) -> int:
    """Return `end`, or `end` - 1 if that would split an escape."""
    piece = text[start:end]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return end - num_backslashes % 2 if end < len(text) else len(text)


def _depth_after(depth: int, brackets: bytes) -> int:
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise _invalid(f"it is nested deeper than {MAX_DEPTH} levels")
        if depth < 0:
            raise _invalid("it cannot be parsed as JSON in UTF-8")
    return depth


def _count_keys(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(_count_keys(item) for item in value.values())
    if isinstance(value, list):
        return sum(_count_keys(item) for item in value)
    return 0


def _too_many_values() -> ApiError:
    return _invalid(f"it has more than {MAX_VALUES} values")


def _invalid(reason: str) -> ApiError:
    return invalid(f"The body is not valid: {reason}.", param=None, code="invalid_json")
