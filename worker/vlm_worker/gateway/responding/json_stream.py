"""Reads JSON, and its dialects, piece by piece; writes standard JSON. Pure.

A dialect has keys without quotes, and strings between delimiters of its own:

    {city:<|"|>Zürich<|"|>,days:3}  ─▶  {"city":"Zürich","days":3}

Standard JSON is copied character by character. What is read and written depends on the text alone,
never on how it is cut.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Callable, Sequence
from typing import Final

MAX_DEPTH: Final = 64
MAX_TOKEN: Final = 256
"""Longest number, word or key without quotes."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
JSON_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALAR_CHARS = re.compile(r"[0-9a-zA-Z+.-]+")
_KEY_CHARS = re.compile(r"[\w-]+")
_SPACE = " \t\n\r"
_End = Callable[[list["Piece"]], None]


class _At(enum.Enum):
    """What is expected next."""

    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()  # a value or "]"
    FIRST_KEY = enum.auto()  # a key or "}"
    KEY = enum.auto()
    COLON = enum.auto()
    COMMA = enum.auto()  # or the end of the array or object
    STRING = enum.auto()
    ESCAPE = enum.auto()
    DELIMITED = enum.auto()
    SCALAR = enum.auto()
    BARE_KEY = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Written JSON of one place.

    `depth` counts the arrays and objects around it; brackets count as outside. If the piece is a
    part of a value of an object at the depth `base` of the stream, `key` is that value's key.
    """

    text: str
    depth: int
    key: str | None = None


class JsonStream:
    """One value. `feed` returns the pieces; after `done` or `failed`, `rest` is not read.

    `feed` also ends after an object at the depth `base`, with `rest` for the next call. `ends` has
    the end of each piece of the last `feed`, in its text: the rest before it, and what was added.

    Args:
        base: the depth of the objects whose keys name the pieces; 1 for an object alone, 2 for
            objects in an array.
        unique: an object at the depth `base` with a key twice is invalid.
    """

    def __init__(
        self,
        *,
        base: int = 1,
        delimiters: Sequence[tuple[str, str]] = (),
        bare_keys: bool = False,
        unique: bool = True,
    ) -> None:
        self._base = base
        self._delimiters = tuple(delimiters)
        self._bare_keys = bare_keys
        self._unique = unique
        self._at = _At.VALUE
        self._stack: list[str] = []
        self._token = ""  # a string, key or scalar that is not complete
        self._is_key = False
        self._close = ""  # the delimiter that ends a string
        self._name = ""  # the last key at the depth `base`
        self._key: str | None = None  # the same, while its value is read
        self._keys: set[str] = set()  # of the object at the depth `base`
        self.rest = ""
        self.ends: list[int] = []

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        return self._at is _At.FAILED

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """Read text; `rest` is what was not read: it needs more text, or follows the value."""
        text = self.rest + text
        self.rest = ""
        pieces: list[Piece] = []
        self.ends = []
        at = 0
        while at < len(text) and self._at not in (_At.DONE, _At.FAILED):
            moved = self._step(text, at, pieces, final=final)
            if moved is None:
                break
            at = moved
            self.ends += [at] * (len(pieces) - len(self.ends))
            if pieces and pieces[-1].text == "}" and pieces[-1].depth == self._base - 1:
                break
        if final and at == len(text) and self._at is _At.SCALAR:
            self._end_scalar(pieces)
        self.ends += [at] * (len(pieces) - len(self.ends))
        self.rest = text[at:]
        return pieces

    def _step(self, text: str, at: int, out: list[Piece], *, final: bool) -> int | None:
        """Read from `at`; return the new place, or None if more text is needed."""
        match self._at:
            case _At.STRING:
                return self._string(text, at, out)
            case _At.ESCAPE:
                return self._escape(text, at, out)
            case _At.DELIMITED:
                return self._delimited(text, at, out, final=final)
            case _At.SCALAR:
                return self._run(text, at, out, _SCALAR_CHARS, self._end_scalar)
            case _At.BARE_KEY:
                return self._run(text, at, out, _KEY_CHARS, self._end_bare_key)
        char = text[at]
        if char in _SPACE:
            if self._stack:
                self._put(out, char)
            return at + 1
        return self._structure(text, at, char, out)

    def _structure(self, text: str, at: int, char: str, out: list[Piece]) -> int | None:
        if self._at is _At.COLON and char == ":":
            self._put(out, char)
            self._at = _At.VALUE
            return at + 1
        if self._at is _At.COMMA and char == ",":
            self._put(out, char)
            self._at = _At.KEY if self._stack[-1] == "{" else _At.VALUE
            return at + 1
        if char in "}]" and self._may_end(char):
            self._stack.pop()
            self._put(out, char)
            self._value_ended()
            return at + 1
        if self._at in (_At.KEY, _At.FIRST_KEY):
            return self._begin_key(text, at, char, out)
        if self._at in (_At.VALUE, _At.FIRST_ITEM):
            return self._begin_value(text, at, char, out)
        return self._fail()

    def _may_end(self, char: str) -> bool:
        if not self._stack or (self._stack[-1] == "{") != (char == "}"):
            return False
        return self._at in (_At.COMMA, _At.FIRST_KEY if char == "}" else _At.FIRST_ITEM)

    def _begin_key(self, text: str, at: int, char: str, out: list[Piece]) -> int | None:
        self._is_key = True
        if char == '"' and not self._delimiters:
            return self._begin_string(at + 1, out)
        begun = self._begin_delimited(text, at, out)
        if begun != at:
            return begun
        if self._bare_keys and _KEY_CHARS.match(char):
            self._token, self._at = "", _At.BARE_KEY
            return at
        return self._begin_string(at + 1, out) if char == '"' else self._fail()

    def _begin_value(self, text: str, at: int, char: str, out: list[Piece]) -> int | None:
        self._is_key = False
        if len(self._stack) == self._base and self._stack[-1] == "{":
            self._key = self._name
        if char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return self._fail()
            self._put(out, char)
            self._stack.append(char)
            if len(self._stack) == self._base:
                self._keys.clear()
            self._at = _At.FIRST_KEY if char == "{" else _At.FIRST_ITEM
            return at + 1
        begun = self._begin_delimited(text, at, out)
        if begun != at:
            return begun
        if char == '"':
            return self._begin_string(at + 1, out)
        if _SCALAR_CHARS.match(char):
            self._token, self._at = "", _At.SCALAR
            return at
        return self._fail()

    def _begin_string(self, at: int, out: list[Piece]) -> int:
        self._put(out, '"')
        self._token, self._at = '"', _At.STRING
        return at

    def _begin_delimited(self, text: str, at: int, out: list[Piece]) -> int | None:
        """Begin a string with a delimiter; `at` if there is none, None if more text decides."""
        for opening, closing in self._delimiters:
            if text.startswith(opening, at):
                self._close = closing
                self._put(out, '"')
                self._token, self._at = '"', _At.DELIMITED
                return at + len(opening)
        if any(opening.startswith(text[at:]) for opening, _ in self._delimiters):
            return None
        return at

    def _string(self, text: str, at: int, out: list[Piece]) -> int | None:
        plain = _PLAIN.match(text, at)
        if plain:
            self._put(out, plain.group())
            return plain.end()
        if text[at] == '"':
            self._put(out, '"')
            self._string_ended()
            return at + 1
        if text[at] == "\\":
            self._at = _At.ESCAPE
            return at
        return self._fail()

    def _escape(self, text: str, at: int, out: list[Piece]) -> int | None:
        """Copy one escape when it is complete."""
        size = 6 if text[at + 1 : at + 2] == "u" else 2
        escape = text[at : at + size]
        wrong = len(escape) > 1 and escape[1] not in '"\\/bfnrtu'
        if wrong or any(c not in "0123456789abcdefABCDEF" for c in escape[2:]):
            return self._fail()
        if len(escape) < size:
            return None
        self._put(out, escape)
        self._at = _At.STRING
        return at + size

    def _delimited(self, text: str, at: int, out: list[Piece], *, final: bool) -> int | None:
        end = text.find(self._close, at)
        if end < 0:
            keep = 0 if final else overlap(text, self._close, at)
            end = len(text) - keep
            if end > at:
                self._put(out, escaped(text[at:end]))
            return end if end > at else None
        self._put(out, escaped(text[at:end]) + '"')
        self._string_ended()
        return end + len(self._close)

    def _run(self, text: str, at: int, out: list[Piece], chars: re.Pattern[str], end: _End) -> int:
        # at most one character too many, wherever the text is cut
        run = chars.match(text, at, at + MAX_TOKEN + 1 - len(self._token))
        if run:
            self._token += run.group()
            if len(self._token) > MAX_TOKEN:
                self._put(out, self._token)
                self._fail()
            return run.end()
        end(out)
        return at

    def _end_scalar(self, out: list[Piece]) -> None:
        valid = self._token in ("true", "false", "null") or JSON_NUMBER.fullmatch(self._token)
        self._put(out, self._token)
        if not valid:
            self._fail()
            return
        self._value_ended()

    def _end_bare_key(self, out: list[Piece]) -> None:
        written = json.dumps(self._token, ensure_ascii=False)
        self._put(out, written)
        self._token = written
        self._string_ended()

    def _string_ended(self) -> None:
        if not self._is_key:
            self._value_ended()
            return
        if len(self._stack) == self._base:
            self._name = json.loads(self._token)
            if self._unique and self._name in self._keys:
                self._fail()
                return
            self._keys.add(self._name)
        self._at = _At.COLON

    def _value_ended(self) -> None:
        if len(self._stack) <= self._base:
            self._key = None
        self._at = _At.COMMA if self._stack else _At.DONE

    def _put(self, out: list[Piece], text: str) -> None:
        """Write `text`. Only keys are kept in `_token`: a value may be long."""
        if self._is_key and self._at in (_At.STRING, _At.DELIMITED, _At.ESCAPE):
            self._token += text
        out.append(Piece(text, len(self._stack), self._key))

    def _fail(self) -> int | None:
        """Take the text as invalid. Returns None: nothing more is read."""
        self._at = _At.FAILED
        return None


def escaped(text: str) -> str:
    """Return text as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def overlap(text: str, delimiter: str, start: int = 0) -> int:
    """Length of the longest end of `text[start:]` that is a proper beginning of `delimiter`."""
    longest = min(len(text) - start, len(delimiter) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(delimiter[:n])), 0)
