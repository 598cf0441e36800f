"""Reads the calls of one region, piece by piece. Pure.

    text of a region ─▶ reader ─▶ CallBegins, CallArguments, CallEnds

A call begins when its name is known, is a tool of the request, and its arguments begin as an
object. Before this the reader may fail: the text is then no call. After it the arguments are what
the model writes, also if they end early or are no JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from vlm_worker.gateway.responding.json_stream import JSON_NUMBER, JsonStream, Piece, escaped
from vlm_worker.gateway.responding.patterns import Match, Pattern, Pending
from vlm_worker.gateway.responding.template import JsonCalls, TagCalls


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegins:
    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallEnds:
    index: int


CallEvent = CallBegins | CallArguments | CallEnds

MAX_REFS: Final = 8
MAX_TYPES: Final = 16

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""


class Reader(Protocol):
    """One region. After `done` or `failed`, `rest` is not read.

    If it `failed`, no call began since the one that ended before `said`, the text that it read
    without a call.
    """

    done: bool
    failed: bool
    said: str
    rest: str

    def feed(self, text: str, *, final: bool) -> Iterator[CallEvent]:
        """Read text. If `final`, none follows."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The first of several patterns in a text, or that none is decided before `hold`."""

    which: int
    match: Match | None
    hold: int


def first_of(patterns: Sequence[Pattern | None], text: str, *, final: bool) -> Found:
    """Find the pattern that begins first; of those that begin together, the longest match."""
    hold, best = len(text), Found(0, None, 0)
    key: tuple[int, int] | None = None
    for which, pattern in enumerate(patterns):
        found = None if pattern is None else pattern.search(text, 0, final=final)
        if isinstance(found, Pending):
            hold = min(hold, found.start)
        elif isinstance(found, Match) and (key is None or (found.start, -found.end) < key):
            key, best = (found.start, -found.end), Found(which, found, 0)
    if best.match is not None and best.match.start < hold:
        return best
    return Found(0, None, hold)


class JsonReader:
    """Calls in JSON. `name` is the region's, if the JSON has none."""

    def __init__(
        self, form: JsonCalls, end: Pattern | None, *, name: str, tools: Tools, index: int
    ) -> None:
        self._form = form
        self._end = end
        self._tools = tools
        self._index = index
        self._given = name
        self._base = 2 if form.is_list else 1
        self._stream = JsonStream(
            base=self._base,
            delimiters=form.delimiters,
            bare_keys=form.bare_keys,
            unique=form.name is not None,
        )
        self._raw: list[str] = []  # fed since the last call ended, until the next begins
        self._broken = False  # a call began, and its JSON is invalid
        self._num_ended = 0
        self._new_call()
        self.done = False
        self.failed = form.name is None and name not in tools
        self.said = self.rest = ""

    def feed(self, text: str, *, final: bool) -> Iterator[CallEvent]:
        if self.failed:
            self.rest = text
            return
        if not self._begun:
            self._raw.append(text)
        if self._broken:
            yield from self._until_end(text, final=final)
            return
        unread = self._stream.rest + text
        pieces = self._stream.feed(text, final=final)
        while True:
            for piece, end in zip(pieces, self._stream.ends, strict=True):
                yield from self._read(piece)
                if self.failed:
                    self._fail(unread[end:])
                    return
            if self._stream.done or self._stream.failed:
                break
            if len(self._stream.rest) == len(unread) or not self._stream.rest:
                break
            if not self._begun and pieces and self._ended(pieces[-1]):
                self._raw = [self._stream.rest]
            unread = self._stream.rest
            pieces = self._stream.feed("", final=final)
        yield from self._after(final=final)

    def _fail(self, rest: str) -> None:
        """Take the text before `rest` as no call. It is not read again, which bounds the work."""
        raw = "".join(self._raw)
        self.failed, self.said, self.rest = True, raw[: len(raw) - len(rest)], rest

    def _after(self, *, final: bool) -> Iterator[CallEvent]:
        if self._stream.done and self._num_ended:
            self.done, self.rest = True, self._stream.rest
        elif self._stream.failed and self._begun:
            self._broken = True
            rest, self._stream.rest = self._stream.rest, ""
            yield from self._until_end(rest, final=final)
        elif final and not self._begun and self._num_ended and not self._stream.failed:
            self.done = True
        elif self._stream.done or self._stream.failed:
            self._fail(self._stream.rest)
        elif final and not self._begun:
            self._fail("")

    def _new_call(self) -> None:
        self._begun = False
        self._name = ""
        self._arguments: list[str] = []  # those that are before the name

    def _ended(self, piece: Piece) -> bool:
        return piece.text == "}" and piece.depth == self._base - 1

    def _read(self, piece: Piece) -> Iterator[CallEvent]:
        if self._form.name is None:
            yield from self._whole(piece)
        elif piece.key is None and piece.depth < self._base:
            if self._ended(piece):
                yield from self._call_ended()
            elif not self._is_frame(piece):
                self.failed = True
        elif piece.key == self._form.name:
            self._name += piece.text
        elif piece.key == self._form.arguments:
            yield from self._argument(piece.text)
        elif piece.key is None and self._name and not self._begun:
            yield from self._try_begin()

    def _is_frame(self, piece: Piece) -> bool:
        """Whether the piece belongs to the object of a call, or to the array around calls."""
        if piece.depth < self._base - 1:
            return piece.text in "[]"
        return piece.text in "{," or not piece.text.strip()

    def _whole(self, piece: Piece) -> Iterator[CallEvent]:
        if not self._begun:
            if piece.text != "{":
                self.failed = True
                return
            yield from self._begin(self._given)
        yield CallArguments(self._index, piece.text)
        if self._stream_ended(piece):
            yield from self._end_call()

    def _stream_ended(self, piece: Piece) -> bool:
        return piece.depth == 0 and piece.text == "}"

    def _argument(self, text: str) -> Iterator[CallEvent]:
        if self._begun:
            yield CallArguments(self._index, text)
            return
        self._arguments.append(text)
        yield from self._try_begin()

    def _try_begin(self) -> Iterator[CallEvent]:
        """Begin the call if its name is known and its arguments are an object."""
        name = self._known_name()
        if name is None:
            return
        if name not in self._tools:
            self.failed = True
        elif self._arguments and self._arguments[0] == "{":
            yield from self._begin(name)
            yield CallArguments(self._index, "".join(self._arguments))

    def _known_name(self) -> str | None:
        """Return the name once its string is complete. A name that is no string is no tool's."""
        if len(self._name) < 2:
            return None
        try:
            name = json.loads(self._name)
        except ValueError:
            return None
        return name if isinstance(name, str) else ""

    def _begin(self, name: str) -> Iterator[CallEvent]:
        self._begun, self._raw = True, []
        yield CallBegins(self._index, name)

    def _call_ended(self) -> Iterator[CallEvent]:
        if not self._begun:
            name, arguments = self._known_name(), object_text("".join(self._arguments) or "{}")
            if name is None or name not in self._tools or arguments is None:
                self.failed = True
                return
            yield from self._begin(name)
            yield CallArguments(self._index, arguments)
        yield from self._end_call()
        self._new_call()

    def _end_call(self) -> Iterator[CallEvent]:
        yield CallEnds(self._index)
        self._index += 1
        self._num_ended += 1

    def _until_end(self, text: str, *, final: bool) -> Iterator[CallEvent]:
        """Pass invalid JSON on as it is, up to the end of the region."""
        text, self.rest = self.rest + text, ""
        found = first_of([self._end], text, final=final)
        end = found.hold if found.match is None else found.match.start
        if end:
            yield CallArguments(self._index, text[:end])
        self.rest = text[end:]
        if found.match is not None or final:
            yield CallEnds(self._index)
            self.done = True


def object_text(arguments: str) -> str | None:
    """Return arguments as the text of an object; None if they are none.

    Some models write the object within a string, or null for no arguments.
    """
    value = json.loads(arguments)
    if value is None:
        return "{}"
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(inner, dict) else None
    return arguments if isinstance(value, dict) else None


class TagReader:
    """A call of tags. Strings are passed on piece by piece, other values when they end."""

    def __init__(
        self, form: TagCalls, end: Pattern | None, *, name: str, tools: Tools, index: int
    ) -> None:
        self._form = form
        self._end = end
        self._index = index
        self._name = name
        self._types = {key: types for key, (_, types) in properties_of(tools.get(name)).items()}
        self._key: str | None = None  # of the value that is read
        self._value = ""
        self._begun = False
        self._num_arguments = 0
        self.done = False
        self.failed = name not in tools
        self.said = self.rest = ""

    def feed(self, text: str, *, final: bool) -> Iterator[CallEvent]:
        text, self.rest = self.rest + text, ""
        if self.failed:
            self.rest = text
            return
        if not self._begun:
            self._begun = True
            yield CallBegins(self._index, self._name)
        while not self.done:
            watched = self._form.begin if self._key is None else self._form.end
            found = first_of([self._end, watched], text, final=final)
            end = found.hold if found.match is None else found.match.start
            yield from self._pass_on(text[:end])
            if found.match is None:
                self.rest = text[end:]
                return
            if self._key is not None:
                yield from self._value_ended()
            elif found.which == 1:
                yield from self._value_begins(found.match.groups["key"])
            if found.which == 0:
                yield from self._call_ended()
            text = text[found.match.start if found.which == 0 else found.match.end :]
        self.rest = text

    def _value_begins(self, key: str) -> Iterator[CallEvent]:
        self._key, self._value = key, ""
        lead = "{" if self._num_arguments == 0 else ", "
        self._num_arguments += 1
        quote = '"' if self._is_text else ""
        yield CallArguments(self._index, f'{lead}"{escaped(key)}": {quote}')

    @property
    def _is_text(self) -> bool:
        """Whether the value is a string for certain, so that its beginning can be passed on."""
        types = self._types.get(self._key or "", ())
        return types == ("string",) or (not types and not self._form.is_json)

    def _pass_on(self, text: str) -> Iterator[CallEvent]:
        if self._key is None or not text:
            return  # white space between tags
        if self._is_text:
            yield CallArguments(self._index, escaped(text))
        else:
            self._value += text

    def _value_ended(self) -> Iterator[CallEvent]:
        if self._is_text:
            written = '"'
        else:
            types = self._types.get(self._key or "", ())
            written = written_value(self._value, types, is_json=self._form.is_json)
        yield CallArguments(self._index, written)
        self._key = None

    def _call_ended(self) -> Iterator[CallEvent]:
        yield CallArguments(self._index, "}" if self._num_arguments else "{}")
        yield CallEnds(self._index)
        self.done = True


def properties_of(
    schema: Mapping[str, Any] | None,
) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return the schema and the types of each property."""
    schema = schema or {}
    root, schema = schema, resolved(schema, schema)
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    named = properties.items() if isinstance(properties, Mapping) else ()
    known: dict[int, tuple[str, ...]] = {}
    return {key: (inner, types_of(inner, root, known)) for key, inner in named}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a local `$ref` names, or the one part of an `allOf`; others stay."""
    for _ in range(MAX_REFS):
        if not isinstance(schema, Mapping):
            break
        parts = schema.get("allOf")
        if isinstance(parts, list) and len(parts) == 1 and "type" not in schema:
            schema = parts[0]
            continue
        path = schema.get("$ref")
        if not isinstance(path, str) or not path.startswith("#/"):
            break
        schema = root
        for step in path[2:].split("/"):
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema


def types_of(
    schema: Any,
    root: Mapping[str, Any],
    known: dict[int, tuple[str, ...]] | None = None,
    depth: int = 0,
) -> tuple[str, ...]:
    """Return the types that a JSON schema names, in order; none if it names none.

    `known` has those of the schemas that were read, by their ids: each is read once.
    """
    known = {} if known is None else known
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_REFS:
        return ()
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = ()  # a schema that refers to itself adds nothing
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [name for name in declared if isinstance(name, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types += types_of(choice, root, known, depth + 1)
    if schema.get("nullable") is True:
        types.append("null")
    known[id(schema)] = tuple(dict.fromkeys(types))[:MAX_TYPES]
    return known[id(schema)]


def escaped_value(text: str) -> str:
    """Return the JSON of a tag's text that is a string."""
    return f'"{escaped(text)}"'


def written_value(text: str, types: Sequence[str], *, is_json: bool) -> str:
    """Return the JSON of a tag's text: by the first type that it has, else as a string.

    JSON of one of the types is returned as it is: a number may be too large for Python.
    """
    if _is_json_of(text.strip(), types):
        return text.strip()
    for name in types:
        value = _as_type(text.strip(), name)
        if value is not None:
            return json.dumps(value.value, ensure_ascii=False)
    if is_json and not types:
        value = _decoded(text)
        if value is not None:
            return json.dumps(value.value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _is_json_of(text: str, types: Sequence[str]) -> bool:
    """Whether a text is the JSON of a value that has one of the types, strings excepted."""
    if JSON_NUMBER.fullmatch(text):
        is_integer = "." not in text and "e" not in text.lower()
        return "number" in types or (is_integer and "integer" in types)
    kind = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}.get(text[:1])
    return kind in types and _decoded(text) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    value: Any


_WORDS: Final = {"true": True, "1": True, "false": False, "0": False}


def _as_type(text: str, name: str) -> _Value | None:
    if name == "boolean":
        return _Value(_WORDS[text.lower()]) if text.lower() in _WORDS else None
    if name == "null":
        return _Value(None) if text in ("null", "None") else None
    if name not in ("integer", "number", "object", "array"):
        return None
    decoded = _decoded(text)
    if decoded is None:
        return None
    value = decoded.value
    if name in ("object", "array"):
        return decoded if isinstance(value, dict if name == "object" else list) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if name == "integer" and isinstance(value, float):
        return _Value(int(value)) if value.is_integer() else None
    return decoded


def _decoded(text: str) -> _Value | None:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return _Value(value)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
