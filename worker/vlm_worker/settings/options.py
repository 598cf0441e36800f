"""Declares the options of a command line as fields of frozen dataclasses.

    num_threads: int = option("--threads", at_least(0), 0, "of the CPU; 0 is all of them")
    queues: QueueSettings = group(QueueSettings)        options of the same command

`add_options` declares them to argparse, `read` makes the value, `to_argv` is the inverse. A flag
that is absent leaves the field's default.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")
N = TypeVar("N", int, float)
REQUIRED: Final = dataclasses.MISSING
_OPTION: Final = "option"
_GROUP: Final = "group"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """How a value is written on a command line; `write` is the inverse of `read`.

    Attributes:
        read: raises ArgumentTypeError, whose text says what to write.
        write: the text that `read` turns into the value.
        choices: the only texts, if they are few.
        collect: makes the field's value of a flag that may be repeated; None if it may not.
    """

    read: Callable[[str], T]
    write: Callable[[T], str] = str
    choices: tuple[str, ...] | None = None
    collect: Callable[[Iterable[Any]], Any] | None = None


class Option(NamedTuple):
    """One flag. `text` None hides it from help. Flags of one `exclusive` set exclude each other."""

    flag: str
    kind: Kind[Any]
    text: str | None
    metavar: str | None
    exclusive: str | None

    @property
    def dest(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")


def option(
    flag: str,
    kind: Kind[Any],
    default: Any,
    text: str | None = "",
    *,
    metavar: str | None = None,
    exclusive: str | None = None,
) -> Any:
    """A field of a dataclass that a flag sets. The flag is required if its default is REQUIRED."""
    declared = Option(flag, kind, text, metavar, exclusive)
    if isinstance(default, Mapping):
        return dataclasses.field(default_factory=lambda: default, metadata={_OPTION: declared})
    return dataclasses.field(default=default, metadata={_OPTION: declared})


def group(cls: type[Any]) -> Any:
    """A field whose value is a dataclass with options of its own."""
    return dataclasses.field(default_factory=cls, metadata={_GROUP: cls})


def number(convert: Callable[[str], N], least: float, most: float, text: str) -> Kind[N]:
    """A number from `least` to `most`; `text` completes "must be"."""

    def read(given: str) -> N:
        try:
            value = convert(given)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{given!r} must be {text}")
        return value

    return Kind(read)


def at_least(least: int) -> Kind[int]:
    """A whole number with a minimum."""
    return number(int, least, float("inf"), f"a whole number of at least {least}")


def one_of(values: Iterable[str] | Mapping[str, T]) -> Kind[Any]:
    """One of few texts, or of the values that they name."""
    named = values if isinstance(values, Mapping) else {str(value): value for value in values}
    texts: dict[Any, str] = {value: text for text, value in named.items()}
    return Kind(named.__getitem__, texts.__getitem__, tuple(named))


TEXT: Final = Kind(str)
PATH: Final = Kind(Path)
FLAG: Final = Kind(bool)
"""A flag without a value: present is True."""
MAX_PORT: Final = 65535
PORT: Final = number(int, 0, MAX_PORT, f"a port, 0 to {MAX_PORT} (0: any free one)")
PERCENT: Final = number(int, 0, 95, "a whole percentage from 0 to 95")
SHARE: Final = number(int, 0, 100, "a whole percentage from 0 to 100")
PERMILLE: Final = number(int, 0, 1000, "a whole number from 0 to 1000")
SECONDS: Final = number(float, 0, 86400, "seconds, 0 to 86400")


def options_of(cls: type[Any]) -> Iterator[tuple[Option, bool]]:
    """All options of a class and its groups, and whether a value is required."""
    for field in dataclasses.fields(cls):
        if declared := field.metadata.get(_OPTION):
            no_factory = field.default_factory is dataclasses.MISSING
            yield declared, field.default is dataclasses.MISSING and no_factory
        elif nested := field.metadata.get(_GROUP):
            yield from options_of(nested)


def add_options(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    *,
    without: Collection[str] = (),
    optional: Collection[str] = (),
) -> None:
    """Declare the options of `cls` except those that `parser` has already.

    The command sets those in `without` itself. Those in `optional` are not required.
    """
    sets: dict[str, Any] = {}
    for declared, required in options_of(cls):
        flag, kind = declared.flag, declared.kind
        if flag in without or flag in parser._option_string_actions:
            continue
        target: Any = parser
        if declared.exclusive:
            target = sets.get(declared.exclusive) or parser.add_mutually_exclusive_group()
            sets[declared.exclusive] = target
        text = argparse.SUPPRESS if declared.text is None else declared.text or None
        common = {"dest": declared.dest, "default": argparse.SUPPRESS, "help": text}
        if kind is FLAG:
            target.add_argument(flag, action="store_true", **common)
            continue
        target.add_argument(
            flag,
            required=required and flag not in optional,
            metavar=declared.metavar,
            action="append" if kind.collect else "store",
            **({"choices": kind.choices} if kind.choices else {"type": kind.read}),
            **common,
        )


def read(cls: type[T], args: argparse.Namespace, **given: Any) -> T:
    """The value of `cls`: `given` by the command itself, from flags, or by default."""
    values = dict(given)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in values:
            continue
        if nested := field.metadata.get(_GROUP):
            values[field.name] = read(nested, args)
        elif (declared := field.metadata.get(_OPTION)) and hasattr(args, declared.dest):
            value, kind = getattr(args, declared.dest), declared.kind
            if kind.collect:
                value = kind.collect(value)
            values[field.name] = kind.read(value) if kind.choices else value
    return cls(**values)


def values_of(value: Any) -> dict[str, Any]:
    """The fields of a group, for the constructor of a class that adds fields to it."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def to_argv(value: Any) -> list[str]:
    """The flags from which `read` makes an equal value; None has no flag."""
    argv: list[str] = []
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if field.metadata.get(_GROUP):
            argv += to_argv(item)
        elif declared := field.metadata.get(_OPTION):
            kind = declared.kind
            if kind is FLAG:
                argv += [declared.flag] if item else []
            elif kind.collect:
                items = item.items() if isinstance(item, Mapping) else item
                argv += [f"{declared.flag}={kind.write(each)}" for each in items]
            elif item is not None:
                argv.append(f"{declared.flag}={kind.write(item)}")
    return argv
