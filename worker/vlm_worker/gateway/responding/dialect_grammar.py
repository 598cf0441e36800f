"""Writes the rules of JSON values, in a dialect or in standard JSON within tags. Pure.

llguidance compiles JSON schemas to standard JSON only, and its strings may hold the anchor that
ends a tag. So the rules of both are written here, from what `enforceable` reads.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from vlm_worker.annotations import MAX_GRAMMAR_BYTES
from vlm_worker.gateway.responding.enforceable import (
    AnyText,
    AnyValue,
    Array,
    GrammarError,
    Literals,
    Member,
    Node,
    Object,
    Scalar,
    Union,
)
from vlm_worker.gateway.responding.template import JsonCalls

_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?/"
_ANY_DEPTH: Final = 8
"""Levels of a value that may be any. A parser reads at most 64 levels."""
_BARE_KEY: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
_MAX_BARE_KEY: Final = 256
# Lone surrogates are no text.
_STRING: Final = (
    r'/"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u([0-9a-ce-fA-CE-F][0-9a-fA-F]{3}'
    r'|[dD][0-7][0-9a-fA-F]{2})))*"/'
)


class JsonRules(abc.ABC):
    """Appends rules to `rules`. `space` is the rule of white space, if the syntax has some."""

    space = ""

    def __init__(self, rules: list[str]) -> None:
        self._rules = rules
        self._written: set[str] = set()
        self._num_bytes = 0

    def add(self, rule: str) -> None:
        """Append a rule. Shared references are written out, so that their number may explode."""
        self._num_bytes += len(rule.encode())
        if self._num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"its rules have more than {MAX_GRAMMAR_BYTES} bytes")
        self._rules.append(rule)

    def value(self, node: Node, rule: str) -> str:
        """Write the rules of a value; return what stands for it. `rule` begins their names."""
        match node:
            case AnyValue():
                return self._any(0)
            case AnyText():
                return self._text()
            case Literals(values):
                return f"({' | '.join(self._literal(value) for value in values)})"
            case Scalar(_, schema):
                return self._named(rule, f"%json {json.dumps(schema)}")
            case Union(nodes):
                parts = [self.value(one, f"{rule}-{i}") for i, one in enumerate(nodes)]
                return self._named(rule, " | ".join(parts))
            case Array():
                return self._named(rule, self._array(node, rule))
            case Object():
                return self._named(rule, self._object(node, rule))

    @abc.abstractmethod
    def _text(self) -> str:
        """Any string."""

    @abc.abstractmethod
    def _literal(self, value: Any) -> str: ...

    @abc.abstractmethod
    def _key(self, key: str) -> str:
        """A key and its colon."""

    @property
    @abc.abstractmethod
    def _any_key(self) -> str: ...

    def _named(self, rule: str, body: str) -> str:
        self.add(f"{rule}: {body}")
        return rule

    def _once(self, name: str, rule: str) -> str:
        """Write a rule that values share; return its name."""
        if name not in self._written:
            self._written.add(name)
            self.add(rule)
        return name

    def _separated(self, item: str, least: int = 0, most: int | None = None) -> str:
        """Items between commas; white space precedes each."""
        if most == 0:
            return self.space
        last = "" if most is None else str(most - 1)
        repeat = "*" if most is None and least <= 1 else f"{{{max(least - 1, 0)},{last}}}"
        items = f'{self.space} {item} ({self.space} "," {self.space} {item}){repeat} {self.space}'
        return items if least else f"({items} | {self.space or _NOTHING})"

    def _array(self, array: Array, rule: str) -> str:
        item = self.value(array.item, f"{rule}-i")
        return f'"[" {self._separated(item, array.least, array.most)} "]"'

    def _object(self, node: Object, rule: str) -> str:
        if not node.members:
            if node.others is None:
                return f'"{{" {self.space} "}}"'
            value = self.value(node.others, f"{rule}-o")
            return f'"{{" {self._separated(f"{self._any_key} {value}")} "}}"'
        names = []
        for index, member in enumerate(node.members):
            value = self.value(member.value, f"{rule}-p{index}")
            names.append(self._named(f"{rule}-m{index}", f"{self._key(member.key)} {value}"))
        self._members(node.members, names, rule)
        return f'"{{" {self.space} {rule}-a0 {self.space} "}}"'

    def _members(self, members: Sequence[Member], names: Sequence[str], rule: str) -> None:
        """Rules `a`: no member is written yet; rules `b`: some are, so a comma precedes."""
        for state, comma in (("a", ""), ("b", f'{self.space} "," {self.space} ')):
            for index, (member, name) in enumerate(zip(members, names, strict=True)):
                taken = f"{comma}{name} {rule}-b{index + 1}"
                left_out = "" if member.is_required else f" | {rule}-{state}{index + 1}"
                self.add(f"{rule}-{state}{index}: {taken}{left_out}")
            self.add(f"{rule}-{state}{len(members)}: {_NOTHING}")

    def _any(self, level: int) -> str:
        """Any value, with arrays and objects to `_ANY_DEPTH`."""
        name = f"any{level}"
        if name not in self._written:
            self._written.add(name)
            kinds = [self._text(), _NUMBER, '"true"', '"false"', '"null"']
            if level < _ANY_DEPTH:
                inner = self._any(level + 1)
                kinds.append(f'"[" {self._separated(inner)} "]"')
                kinds.append(f'"{{" {self._separated(f"{self._any_key} {inner}")} "}}"')
            self.add(f"{name}: {' | '.join(kinds)}")
        return name


class DialectRules(JsonRules):
    """Keys without quotes, strings between delimiters. `text` writes control tokens by ids."""

    def __init__(self, form: JsonCalls, text: Callable[[str], str], rules: list[str]) -> None:
        super().__init__(rules)
        self._open, self._close = form.delimiters[0]
        self._written_text = text

    def _text(self) -> str:
        opening, closing = self._written_text(self._open), self._written_text(self._close)
        if closing.startswith("<["):
            self._once("DTEXT", f"DTEXT: {without(hexed(self._close))}")
            return self._once("dtext", f"dtext: {opening} DTEXT {closing}")
        self._once("dtexts", f"dtexts[suffix={closing}]: /(?s:.*)/")
        return self._once("dtext", f"dtext: {opening} dtexts")

    def _literal(self, value: Any) -> str:
        if not isinstance(value, str):
            return quoted(json.dumps(value))
        if self._close in value:
            raise GrammarError(f"a value with {self._close!r} is not built for this model's calls")
        parts = (self._written_text(self._open), quoted(value), self._written_text(self._close))
        return " ".join(parts)

    def _key(self, key: str) -> str:
        if not 0 < len(key) <= _MAX_BARE_KEY or set(key) - set(_BARE_KEY):
            raise GrammarError(
                f"the property {key[:64]!r} is not built for this model's calls: a name has "
                "letters, digits, '_' and '-'"
            )
        return quoted(f"{key}:")

    @property
    def _any_key(self) -> str:
        return r"/[a-zA-Z0-9_\p{L}-]{1,64}:/"


class StandardRules(JsonRules):
    """Standard JSON without the texts of the regular expression `barred`, and with white space."""

    def __init__(self, barred: str, space: str, rules: list[str]) -> None:
        super().__init__(rules)
        self.space = space
        self._barred = barred

    def _text(self) -> str:
        return self._once("STRING", f"STRING: {_STRING} & ~/(?s:.*)({self._barred})(?s:.*)/")

    def _literal(self, value: Any) -> str:
        return quoted(json.dumps(value, ensure_ascii=False))

    def _key(self, key: str) -> str:
        return f'{quoted(json.dumps(key, ensure_ascii=False))} {self.space} ":" {self.space}'

    @property
    def _any_key(self) -> str:
        return f'{self._text()} {self.space} ":" {self.space}'


_NOTHING: Final = '""'


def quoted(text: str) -> str:
    """Return a text as grammars write it."""
    return json.dumps(text, ensure_ascii=False)


def hexed(text: str) -> str:
    """Return the regular expression of a text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def without(barred: str) -> str:
    """Return a terminal of any text in which nothing matches the regular expression."""
    return f"/(?s:.*)/ & ~/(?s:.*)({barred})(?s:.*)/"
