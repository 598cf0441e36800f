"""What `Annotated` declares of a field: its bounds, and its form in a message.

A bound has `accepts(value)` and `problem(value)`, the text of an error after the field's name.
`wire/codec.py` reads both. `Parameter` declares a sampling parameter to all that read it.
"""

from __future__ import annotations

import dataclasses
import re
import string
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

MAX_ITEMS = 64
MAX_TOKENS = 1 << 21
MAX_IMAGE_BYTES = 20 << 20
"""Maximum file size; the decoder accepts no larger file (`media.image_header.ImageLimits`)."""
MAX_IDS = 1024
MAX_TOKEN_ID = (1 << 31) - 1
MAX_ATTEMPT = 1 << 20
MAX_SPANS = 1024
MAX_BYTES = 1 << 42
MAX_PIXELS = 1 << 40
MAX_SIDE = 1 << 20
MAX_COUNT = 1 << 40
MAX_SECONDS = 86400.0
MAX_LABEL = 64
MAX_TEXT = 1024

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 128
"""Tokens of a prompt whose log-probabilities are in one message, which an event loop decodes."""
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PRIORITY = 1000
MAX_STOP_TOKENS = 256
MAX_WEIGHTED_SECONDS = 1e6
MAX_TEMPERATURE = 100.0
MAX_GRAMMAR_BYTES = 256 << 10

_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/")
_MAX_ID = 128
_MAX_ADDRESS = 300
_MAX_SHOWN = 80

M = TypeVar("M")


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    name: str
    kind: Any
    is_optional: bool
    markers: tuple[Any, ...]
    default: Any

    def marker(self, kind: type[M]) -> M | None:
        return next((one for one in self.markers if isinstance(one, kind)), None)

    @property
    def bounds(self) -> list[Bound | Between]:
        return [one for one in self.markers if isinstance(one, Bound | Between)]


def fields_of(cls: type[Any]) -> list[Field]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return [_field(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    markers: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, *rest = typing.get_args(hint)
        markers = tuple(rest)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if is_union:
        hint = next(one for one in typing.get_args(hint) if one is not types.NoneType)
    return Field(field.name, hint, is_union, markers, field.default)


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """What a field may contain; `must` says it. An error shows `shown(value)`."""

    accepts: Callable[[Any], bool]
    must: str
    shown: Callable[[Any], Any] = repr

    def problem(self, value: Any) -> str:
        return f"must {self.must}, not {str(self.shown(value))[:_MAX_SHOWN]}"


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    """A number from `minimum` to `maximum`; NaN is none."""

    minimum: float
    maximum: float

    def accepts(self, value: float) -> bool:
        return self.minimum <= value <= self.maximum

    def problem(self, value: float) -> str:
        return f"must be {_number(self.minimum)} to {_number(self.maximum)}, not {value}"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def count(minimum: int, maximum: int) -> Bound:
    return Bound(lambda x: minimum <= len(x) <= maximum, f"have {minimum} to {maximum} items", len)


def each(bound: Bound) -> Bound:
    return Bound(lambda x: all(map(bound.accepts, x)), f"{bound.must} each", lambda _: "another")


def token_ids(minimum: int, maximum: int) -> Bound:
    """`minimum` to `maximum` token ids, each a non-negative int32."""
    return Bound(
        lambda x: minimum <= len(x) <= maximum and (not x or max(x) <= MAX_TOKEN_ID),
        f"be {minimum} to {maximum} tokens of 0 to {MAX_TOKEN_ID}",
        lambda x: f"{len(x)} up to {max(x, default=0)}",
    )


def identifier() -> Bound:
    return Bound(
        lambda x: 0 < len(x) <= _MAX_ID and _ID_CHARACTERS.issuperset(x),
        f"be 1 to {_MAX_ID} letters, digits or -_.:/",
    )


def address() -> Bound:
    pattern = re.compile(r".+:\d+", re.DOTALL)
    return Bound(lambda x: len(x) <= _MAX_ADDRESS and bool(pattern.fullmatch(x)), "read host:port")


def text(maximum: int) -> Bound:
    return Bound(lambda x: len(x) <= maximum, f"have at most {maximum} characters", len)


def num_bytes(*lengths: int) -> Bound:
    allowed = " or ".join(map(str, lengths))
    return Bound(lambda x: len(x) in lengths, f"have {allowed} bytes", len)


def max_bytes(maximum: int) -> Bound:
    return Bound(lambda x: len(x) <= maximum, f"have at most {maximum} bytes", len)


def grid(*, may_lack: bool = False) -> Bound:
    """A patch grid (time, height, width); with `may_lack`, also nothing."""
    lengths = (0, 3) if may_lack else (3,)
    return Bound(
        lambda x: len(x) in lengths and all(0 < side < 1 << 16 for side in x),
        "be three positive numbers below 65536" + (", or none" if may_lack else ""),
        lambda x: list(x)[:4],
    )


def biases() -> Bound:
    return Bound(
        lambda x: len(x) <= MAX_LOGIT_BIASES and all(abs(b) <= MAX_LOGIT_BIAS for _, b in x),
        f"be up to {MAX_LOGIT_BIASES} biases of {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
        lambda x: f"{len(x)} biases",
    )


# ---- the form of a field in a message; without one, the message has the same field --------------


@dataclasses.dataclass(frozen=True)
class Flat:
    """The message has the fields of this value itself."""


@dataclasses.dataclass(frozen=True)
class NotSent:
    """No message has this field; it has its default."""


@dataclasses.dataclass(frozen=True)
class OneOf:
    """The event of a reply, one of the fields of the oneof `kind`."""


@dataclasses.dataclass(frozen=True)
class Named:
    """The field has another `name` on the wire."""

    name: str


@dataclasses.dataclass(frozen=True)
class Ticks:
    """Seconds, `per_second` ticks in `name` on the wire; negative seconds become 0."""

    name: str
    per_second: int


@dataclasses.dataclass(frozen=True)
class Choice:
    """A truth that is one of two texts in `name` on the wire; an unknown text is False."""

    name: str
    true: str
    false: str


@dataclasses.dataclass(frozen=True)
class Unset:
    """0 on the wire means this."""

    means: float


@dataclasses.dataclass(frozen=True)
class OffsetByOne:
    """0 on the wire means None, n + 1 means n."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A longer text is cut where it is encoded."""

    maximum: int


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A map on the wire; here its pairs in the order of the keys."""


@dataclasses.dataclass(frozen=True)
class Column:
    """Field `name` of each element of the repeated field `of`."""

    of: str
    name: str


@dataclasses.dataclass(frozen=True)
class Known:
    """Elements whose field `name` has another value, from a newer worker, are dropped."""

    name: str
    values: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter that a client may set.

    Attributes:
        note: its row in docs/openai.md.
        minimum, maximum: its bounds in the API, if it is a number.
        unset: in the API the same as the default here, but not the model's default.
        is_extension: vLLM's API has it, OpenAI's has not.
        model_default: the default if `generation_config.json` samples; that file may set another.
        greedy_model_default: the file may set it even if it does not sample.
        dtype: numpy's type in the batch, if it chooses among the tokens of one row.
        is_penalty: it changes logits by the tokens so far.
    """

    note: str
    minimum: float = 0
    maximum: float = 0
    unset: float | None = None
    is_extension: bool = False
    model_default: float | None = None
    greedy_model_default: bool = False
    dtype: str | None = None
    is_penalty: bool = False
