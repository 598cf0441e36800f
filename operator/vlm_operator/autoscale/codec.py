"""Converts frozen values to JSON and back, by their types. Records and memories use it.

dataclass  {"field": …}                               Enum, StrEnum  its value
Mapping    {"key": …}, keys that are tuples "a|b"     tuple          […]
nan, ±inf  "nan", "inf", "-inf": JSON has no such numbers

Floats are written with all digits, so that a round trip is exact.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import math
import types
import typing
from typing import Any

_SPECIAL = ("nan", "inf", "-inf")


def encode(value: Any, *, sparse: bool = False) -> Any:
    """Convert a value for `json.dumps`; with `sparse`, fields with default values are omitted."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {
            item.name: encode(getattr(value, item.name), sparse=sparse)
            for item in dataclasses.fields(value)
            if not (sparse and _is_default(item, getattr(value, item.name)))
        }
    if isinstance(value, collections.abc.Mapping):
        return {_key(key): encode(item, sparse=sparse) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [encode(item, sparse=sparse) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode(kind: Any, data: Any) -> Any:
    """Convert the output of `encode` back to a value of type `kind`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the data is not of that type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin is typing.Annotated:
        return decode(arguments[0], data)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, data)
    if origin is typing.Literal:
        return _one_of(arguments, data)
    if origin is tuple:
        return _decode_tuple(arguments, data)
    if origin in (frozenset, collections.abc.Set):
        return frozenset(decode(arguments[0], item) for item in _list(data))
    if origin in (dict, collections.abc.Mapping):
        return {_unkey(arguments[0], key): decode(arguments[1], item) for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), data)
    return _decode_plain(kind, data)


def _decode_plain(kind: Any, data: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    if kind is float and (data in _SPECIAL or type(data) in (int, float)):
        return float(data)
    if type(data) is kind:
        return data
    raise TypeError(f"{data!r} is no {kind}")


def _decode_union(arguments: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in arguments:
        return None
    for kind in arguments:
        if kind is type(None):
            continue
        try:
            return decode(kind, data)
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
    raise TypeError(f"{data!r} is none of {arguments}")


def _decode_tuple(arguments: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    items = _list(data)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(decode(arguments[0], item) for item in items)
    if len(arguments) != len(items):
        raise TypeError(f"{data!r} has not {len(arguments)} parts")
    return tuple(decode(kind, item) for kind, item in zip(arguments, items, strict=True))


def _decode_dataclass(kind: type, data: Any) -> Any:
    if not isinstance(data, dict):
        raise TypeError(f"{data!r} is no {kind.__name__}")
    hints = _hints(kind)
    unknown = set(data) - set(hints)
    if unknown:
        raise TypeError(f"{kind.__name__} has no {min(unknown)}")
    return kind(**{name: decode(hints[name], item) for name, item in data.items()})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    names = {item.name for item in dataclasses.fields(kind)}
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if name in names}


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(value) is type(field.default) and bool(value == field.default)
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return False


def _one_of(arguments: tuple[Any, ...], data: Any) -> Any:
    if data not in arguments:
        raise ValueError(f"{data!r} is none of {arguments}")
    return data


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"{data!r} is no list")
    return data


def _key(key: Any) -> str:
    if isinstance(key, tuple):
        return "|".join(_key(part) for part in key)
    return str(encode(key))


def _unkey(kind: Any, key: str) -> Any:
    if typing.get_origin(kind) is tuple:
        kinds = typing.get_args(kind)
        parts = key.split("|", len(kinds) - 1)
        return tuple(_unkey(part, text) for part, text in zip(kinds, parts, strict=True))
    if kind in (int, float):
        return kind(key)
    return decode(kind, key)
