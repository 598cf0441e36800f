"""What `Annotated` declares of a field: its bounds, and its form in a message.

A bound has `accepts(value)` and `problem(value)`, the text after the name of the field in an error.
`wire/codec.py` reads both. `Parameter` declares a sampling parameter to all that read it.
"""

from __future__ import annotations

import dataclasses
import string
import types
import typing
from collections.abc import Sequence, Sized
from typing import Annotated, Any, Protocol, TypeVar

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
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PRIORITY = 1000
MAX_STOP_TOKENS = 256
MAX_TEMPERATURE = 100.0

_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/")
_MAX_ID = 128
_MAX_ADDRESS = 300

M = TypeVar("M")


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataclass, as its annotation declares it."""

    name: str
    kind: Any
    is_optional: bool
    markers: tuple[Any, ...]
    default: Any

    def marker(self, kind: type[M]) -> M | None:
        """The marker of a class, if the field has one."""
        return next((one for one in self.markers if isinstance(one, kind)), None)

    @property
    def bounds(self) -> list[Bound]:
        return [one for one in self.markers if hasattr(one, "accepts")]


def fields_of(cls: type[Any]) -> list[Field]:
    """The fields of a dataclass, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return [_field(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    markers: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, *found = typing.get_args(hint)
        markers = tuple(found)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if is_union:
        hint = next(one for one in typing.get_args(hint) if one is not types.NoneType)
    return Field(field.name, hint, is_union, markers, field.default)


class Bound(Protocol):
    """What a field may contain."""

    def accepts(self, value: Any) -> bool: ...

    def problem(self, value: Any) -> str: ...


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


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """A sequence of `minimum` to `maximum` elements, each within `each`."""

    minimum: int
    maximum: int
    each: Bound | None = None

    def accepts(self, value: Sequence[Any]) -> bool:
        each = self.each
        return self.minimum <= len(value) <= self.maximum and (
            each is None or all(map(each.accepts, value))
        )

    def problem(self, value: Sequence[Any]) -> str:
        if self.each is not None and self.minimum <= len(value) <= self.maximum:
            return self.each.problem(next(one for one in value if not self.each.accepts(one)))
        return f"must have {self.minimum} to {self.maximum} elements, not {len(value)}"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenIds:
    """`minimum` to `maximum` token ids, each a non-negative int32."""

    minimum: int
    maximum: int

    def accepts(self, value: Sequence[int]) -> bool:
        return self.minimum <= len(value) <= self.maximum and (
            not value or max(value) <= MAX_TOKEN_ID
        )

    def problem(self, value: Sequence[int]) -> str:
        if self.minimum <= len(value) <= self.maximum:
            return f"must be 0 to {MAX_TOKEN_ID}, not {max(value)}"
        return f"must have {self.minimum} to {self.maximum} tokens, not {len(value)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Identifier:
    """An id of the gateway."""

    def accepts(self, value: str) -> bool:
        return 0 < len(value) <= _MAX_ID and _ID_CHARACTERS.issuperset(value)

    def problem(self, _: str) -> str:
        return f"must be 1 to {_MAX_ID} letters, digits or -_.:/"


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """`host:port`."""

    def accepts(self, value: str) -> bool:
        host, _, port = value.rpartition(":")
        return bool(host) and port.isdecimal() and len(value) <= _MAX_ADDRESS

    def problem(self, _: str) -> str:
        return "must read host:port"


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Text of at most `maximum` characters."""

    maximum: int

    def accepts(self, value: Sized) -> bool:
        return len(value) <= self.maximum

    def problem(self, value: Sized) -> str:
        return f"must have at most {self.maximum} characters, not {len(value)}"


class CutText(Text):
    """As Text; a longer text is cut where it is encoded."""


class Bytes:
    """Bytes of one of the `lengths`."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def accepts(self, value: bytes) -> bool:
        return len(value) in self.lengths

    def problem(self, value: bytes) -> str:
        return f"must have {' or '.join(map(str, self.lengths))} bytes, not {len(value)}"


@dataclasses.dataclass(frozen=True, slots=True)
class MaxBytes:
    """At most `maximum` bytes."""

    maximum: int

    def accepts(self, value: bytes) -> bool:
        return len(value) <= self.maximum

    def problem(self, value: bytes) -> str:
        return f"must have at most {self.maximum} bytes, not {len(value)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """A patch grid (time, height, width)."""

    def accepts(self, value: Sequence[int]) -> bool:
        return len(value) == 3 and all(0 < side < 1 << 16 for side in value)

    def problem(self, _: Sequence[int]) -> str:
        return "must be three positive numbers"


@dataclasses.dataclass(frozen=True, slots=True)
class Biases:
    """(token id, bias) pairs."""

    def accepts(self, value: Sequence[tuple[int, float]]) -> bool:
        return len(value) <= MAX_LOGIT_BIASES and all(
            -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS for _, bias in value
        )

    def problem(self, _: Sequence[tuple[int, float]]) -> str:
        return (
            f"must be up to {MAX_LOGIT_BIASES} biases, each "
            f"{-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
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
