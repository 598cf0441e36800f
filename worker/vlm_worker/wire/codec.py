"""Compiles converters between values and the messages of worker.proto, from the values' fields.

value ─▶ encode ─▶ message ─▶ decode ─▶ value, or InvalidRequestError that names the field

A value is a frozen dataclass. `Annotated` has the bounds of a field and, if its form in the message
differs, that form (vlm_worker/annotations.py). Python source is generated, as `dataclasses` does:
`Tokens` is on the path of every decode step. An import fails if the fields of a value and of its
message differ.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from google.protobuf import message_factory

from vlm_worker.annotations import (
    Between,
    Bound,
    Choice,
    Column,
    Cut,
    Field,
    Flat,
    Known,
    Named,
    NotSent,
    OffsetByOne,
    OneOf,
    Pairs,
    Ticks,
    Unset,
    each,
    fields_of,
)
from vlm_worker.errors import InvalidRequestError

V = TypeVar("V")


class Codec(Generic[V]):
    """The converters of one class of values.

    `decode` checks the message with `before` and the value with `check`. `events` has the class of
    each field of the message's oneof. `elsewhere` names the fields that an outer value has.
    """

    def __init__(
        self,
        value: type[V],
        message: type[Any],
        *,
        before: Callable[[Any], None] | None = None,
        check: Callable[[V], None] | None = None,
        events: Mapping[str, type[Any]] | None = None,
        elsewhere: Sequence[str] = (),
    ) -> None:
        compiled = _Compiler(value, message, events or {}, elsewhere)
        self.decode: Callable[..., V] = compiled.decode(before, check)
        self.encode: Callable[[V], Any] = compiled.encode()
        _CODECS[value] = self

    @classmethod
    def by_hand(
        cls, value: type[V], *, decode: Callable[[Any, str], V], encode: Callable[[V], Any]
    ) -> Codec[V]:
        """For a value of another form than its message. `decode` gets the path of the message."""
        codec = cls.__new__(cls)
        codec.decode, codec.encode = decode, encode
        _CODECS[value] = codec
        return codec


_CODECS: dict[type[Any], Codec[Any]] = {}


def refuse(path: str, bound: Bound | Between, value: Any) -> None:
    section, _, name = path.rpartition(".")
    param = name if section == "sampling" else None
    raise InvalidRequestError(f"{path} {bound.problem(value)}", param=param)


class _Compiler:
    """Generates the source of `decode(m, path="")` and `encode(v)`."""

    def __init__(
        self,
        value: type[Any],
        message: type[Any],
        events: Mapping[str, type[Any]],
        elsewhere: Sequence[str],
    ) -> None:
        self._value = value
        self._message = message
        self._events = events
        self._names: dict[str, Any] = {"refuse": refuse, "InvalidRequestError": InvalidRequestError}
        self._lines: list[str] = []
        self._wired = set(elsewhere)

    def decode(
        self, before: Callable[[Any], None] | None, check: Callable[[Any], None] | None
    ) -> Callable[..., Any]:
        if before is not None:
            self._line(f"{self._bind(before)}(m)")
        self._line(f"value = {self._construct(self._value)}")
        if check is not None:
            self._line(f"{self._bind(check)}(value)")
        self._line("return value")
        self._compare_fields()
        return self._compile("decode", "m, path=''")

    def encode(self) -> Callable[[Any], Any]:
        self._lines = []
        message = self._bind(self._message)
        args = ", ".join(self._arguments(self._value, "v"))
        for name, kind in self._events.items():
            event = f"{name}={self._encode_of(kind)}(v.event)"
            self._line(f"if type(v.event) is {self._bind(kind)}: return {message}({event}, {args})")
        if self._events:
            self._line("raise TypeError(f'{type(v.event)} is no event of this reply')")
        else:
            self._line(f"m = {message}({args})")
            self._columns("v", self._value)
            self._line("return m")
        return self._compile("encode", "v")

    def _compile(self, name: str, arguments: str) -> Callable[..., Any]:
        source = f"def {name}({arguments}):\n" + "\n".join(f"    {line}" for line in self._lines)
        filename = f"<{name} of {self._value.__qualname__}>"
        exec(compile(source, filename, "exec"), self._names)  # noqa: S102  as `dataclasses` does
        compiled: Callable[..., Any] = self._names[name]
        return compiled

    def _compare_fields(self) -> None:
        fields = {field.name for field in self._message.DESCRIPTOR.fields}
        if fields != self._wired:
            raise TypeError(
                f"{self._value.__qualname__} and {self._message.DESCRIPTOR.full_name} differ in "
                f"{sorted(fields ^ self._wired)}"
            )

    def _line(self, text: str) -> None:
        self._lines.append(text)

    def _bind(self, value: Any) -> str:
        name = f"_{len(self._names)}"
        self._names[name] = value
        return name

    def _decode_of(self, kind: Any) -> str:
        return self._bind(_CODECS[kind].decode)

    def _encode_of(self, kind: Any) -> str:
        return self._bind(_CODECS[kind].encode)

    # ---- decode ----------------------------------------------------------------------------------

    def _construct(self, cls: type[Any]) -> str:
        """The expression of a value; the lines before it read and check its fields."""
        args = []
        for field in fields_of(cls):
            if field.marker(Flat):
                args.append(self._construct(field.kind))
            elif field.marker(NotSent):
                args.append(self._bind(field.default))
            elif field.marker(OneOf):
                args.append(self._event())
            else:
                args.append(self._field(field))
        return f"{self._bind(cls)}({', '.join(args)})"

    def _field(self, field: Field) -> str:
        """Read and check one field; returns the variable with its value."""
        variable = f"x{len(self._lines)}"
        column = field.marker(Column)
        if column is None:
            self._wired.add(_wire_name(field).partition(".")[0])
        where = f"path + {_wire_name(field)!r}"
        if _is_checked_as_sent(field):
            self._line(f"{variable} = m.{_wire_name(field)}")
            self._check(variable, where, field)
            self._line(f"{variable} = {self._read(field, variable, where)}")
        else:
            self._line(f"{variable} = {self._read(field, f'm.{_wire_name(field)}', where)}")
            self._check(variable, where, field)
        return variable

    def _check(self, variable: str, where: str, field: Field) -> None:
        for bound in _bounds(field):
            name = self._bind(bound)
            if isinstance(bound, Between):
                test = f"{bound.minimum!r} <= {variable} <= {bound.maximum!r}"
            else:
                test = f"{name}.accepts({variable})"
            absent = f"{variable} is None or {variable} == '' or " if field.is_optional else ""
            self._line(f"if not ({absent}{test}): refuse({where}, {name}, {variable})")

    def _read(self, field: Field, source: str, where: str) -> str:
        for marker in field.markers:
            match marker:
                case Ticks(_, per_second):
                    return f"{source} / {per_second}"
                case Choice(_, true):
                    return f"{source} == {true!r}"
                case Unset(means):
                    return f"{source} or {means!r}"
                case OffsetByOne():
                    return f"{source} - 1 if {source} else None"
                case Pairs():
                    return f"tuple(sorted({source}.items()))"
                case Column(of, name):
                    one = self._decode_of(_element(field))
                    return f"tuple([{one}(y.{name}, path + '{of}.{name}.') for y in m.{of}])"
        return self._read_by_kind(field, source, where)

    def _read_by_kind(self, field: Field, source: str, where: str) -> str:
        kind, element = field.kind, _element(field)
        container = _container(field)
        if container is not None:
            if dataclasses.is_dataclass(element):
                known = field.marker(Known)
                condition = f" if y.{known.name} in {self._bind(known.values)}" if known else ""
                decode = self._decode_of(element)
                prefix = f"path + '{_wire_name(field)}.'"
                elements = f"[{decode}(y, {prefix}) for y in {source}{condition}]"
                return f"{container.__name__}({elements} if {source} else ())"
            if _is_enum(element):
                return f"{container.__name__}(map({self._bind(element)}, {source}))"
            return f"{container.__name__}({source})"
        if dataclasses.is_dataclass(kind):
            decoded = f"{self._decode_of(kind)}({source}, {where} + '.')"
            present = f"{decoded} if m.HasField({_wire_name(field)!r}) else None"
            return present if field.is_optional else decoded
        if _is_enum(kind):
            member = f"{self._bind(kind)}({source})"
            return f"{member} if {source} else None" if field.is_optional else member
        return source

    def _event(self) -> str:
        self._line("kind = m.WhichOneof('kind')")
        for index, (name, kind) in enumerate(self._events.items()):
            self._wired.add(name)
            decoded = f"{self._decode_of(kind)}(m.{name}, '{name}.')"
            self._line(f"{'elif' if index else 'if'} kind == {name!r}: event = {decoded}")
        problem = f"{self._message.DESCRIPTOR.name} must have one of {', '.join(self._events)}"
        self._line(f"else: raise InvalidRequestError({problem!r})")
        return "event"

    # ---- encode ----------------------------------------------------------------------------------

    def _arguments(self, cls: type[Any], value: str) -> list[str]:
        args: list[str] = []
        nested: dict[str, list[str]] = {}
        for field in fields_of(cls):
            source = f"{value}.{field.name}"
            if field.marker(Flat):
                args += self._arguments(field.kind, source)
            elif field.marker(NotSent):
                default = self._bind(field.default)
                self._line(f"assert {source} == {default}, 'no message has {field.name}'")
            elif not (field.marker(OneOf) or field.marker(Column)):
                outer, _, inner = _wire_name(field).rpartition(".")
                nested.setdefault(outer, []).append(f"{inner}={self._write(field, source)}")
        args += nested.pop("", [])
        for outer, inners in nested.items():
            part = self._message.DESCRIPTOR.fields_by_name[outer].message_type
            message = self._bind(message_factory.GetMessageClass(part))
            args.append(f"{outer}={message}({', '.join(inners)})")
        return args

    def _write(self, field: Field, source: str) -> str:
        for marker in field.markers:
            match marker:
                case Ticks(_, per_second):
                    return f"max(0, round({source} * {per_second}))"
                case Choice(_, true, false):
                    return f"{true!r} if {source} else {false!r}"
                case OffsetByOne():
                    return f"0 if {source} is None else {source} + 1"
                case Pairs():
                    return f"dict({source})"
                case Cut(maximum):
                    return f"{source}[:{maximum}]"
        kind, element = field.kind, _element(field)
        if _container(field) is not None:
            if dataclasses.is_dataclass(element):
                return f"[{self._encode_of(element)}(y) for y in {source}] if {source} else ()"
            written = f"sorted({source})" if _container(field) is frozenset else source
            return f"[y.value for y in {written}]" if _is_enum(element) else written
        if dataclasses.is_dataclass(kind):
            encoded = f"{self._encode_of(kind)}({source})"
            return f"None if {source} is None else {encoded}" if field.is_optional else encoded
        if _is_enum(kind):
            return f"{source}.value if {source} else ''" if field.is_optional else f"{source}.value"
        return source

    def _columns(self, value: str, cls: type[Any]) -> None:
        for field in fields_of(cls):
            if column := field.marker(Column):
                pairs = f"zip(m.{column.of}, {value}.{field.name}, strict=True)"
                encoded = f"{self._encode_of(_element(field))}(y)"
                self._line(f"for x, y in {pairs}: x.{column.name}.CopyFrom({encoded})")


def _wire_name(field: Field) -> str:
    named = field.marker(Named) or field.marker(Ticks) or field.marker(Choice)
    return named.name if named else field.name


def _container(field: Field) -> Any:
    origin = typing.get_origin(field.kind)
    return origin if origin in (tuple, frozenset) else None


def _element(field: Field) -> Any:
    return typing.get_args(field.kind)[0] if _container(field) else None


def _bounds(field: Field) -> list[Bound | Between]:
    """The bounds of a field; the members of an enum are one."""
    if _is_enum(field.kind):
        return [*field.bounds, _member_of(field.kind)]
    element = _element(field)
    return [*field.bounds, each(_member_of(element))] if _is_enum(element) else field.bounds


def _member_of(kind: type[enum.Enum]) -> Bound:
    members = kind._value2member_map_
    return Bound(members.__contains__, f"be one of {', '.join(map(str, members))}")


def _is_checked_as_sent(field: Field) -> bool:
    converted = field.marker(Column) or field.marker(Pairs)
    return _is_enum(field.kind) or (_container(field) is not None and converted is None)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)
