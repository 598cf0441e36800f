"""Writes grammars of JSON in a dialect: keys without quotes, strings between delimiters. Pure.

llguidance compiles JSON schemas to standard JSON only, so the rules of a dialect are written here.
A keyword that they do not enforce is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from vlm_worker.annotations import MAX_GRAMMAR_BYTES
from vlm_worker.gateway.responding.calls import resolved
from vlm_worker.gateway.responding.template import JsonCalls

_KNOWN: Final = frozenset(
    {"description", "title", "default", "examples", "$schema", "$defs", "definitions", "nullable",
     "type", "enum", "const", "properties", "required", "items", "additionalProperties", "anyOf",
     "$ref"}
)  # fmt: skip
_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?/"
_MAX_DEPTH: Final = 16


class GrammarError(ValueError):
    """No grammar enforces this; the message says what."""


class DialectRules:
    """Appends rules to `rules`; `text` writes a text that may have control tokens."""

    def __init__(self, text: Callable[[str], str], rules: list[str]) -> None:
        self._text = text
        self._rules = rules
        self._open = self._close = ""
        self._root: Mapping[str, Any] = {}
        self._done: set[str] = set()
        self._num_bytes = 0

    def _add(self, rule: str) -> None:
        """Append a rule. Shared references are written out, so that their number may explode."""
        self._num_bytes += len(rule.encode())
        if self._num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"its rules have more than {MAX_GRAMMAR_BYTES} bytes")
        self._rules.append(rule)

    def arguments(self, form: JsonCalls, schema: Mapping[str, Any] | None, rule: str) -> str:
        """Write the rules of an object of arguments; return the name of its rule.

        Raises:
            GrammarError: the schema has a keyword that is not enforced.
        """
        self._open, self._close = form.delimiters[0]
        self._root = schema or {}
        return self._value(self._root or {"type": "object"}, f"{rule}-d", depth=0)

    def _value(self, schema: Any, rule: str, *, depth: int) -> str:
        schema = resolved(schema, self._root)
        if depth > _MAX_DEPTH:
            raise GrammarError("a schema that is nested deeper than 16 levels is not built")
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, Mapping):
            raise GrammarError("a value that may not exist is not built for this model's calls")
        if unknown := sorted(set(schema) - _KNOWN):
            raise GrammarError(f"'{unknown[0]}' is not built for this model's calls")
        self._add(f"{rule}: {' | '.join(self._choices(schema, rule, depth=depth))}")
        return rule

    def _choices(self, schema: Mapping[str, Any], rule: str, *, depth: int) -> list[str]:
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return [self._literal(value) for value in values]
        if "anyOf" in schema:
            return [
                self._value(choice, f"{rule}-{index}", depth=depth + 1)
                for index, choice in enumerate(schema["anyOf"])
            ]
        kinds = schema.get("type", "object")
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        if schema.get("nullable") is True:
            kinds.append("null")
        return [self._typed(kind, schema, rule, depth=depth) for kind in kinds]

    def _typed(self, kind: str, schema: Mapping[str, Any], rule: str, *, depth: int) -> str:
        match kind:
            case "string":
                return self._string(rule)
            case "integer":
                return r"/-?(0|[1-9][0-9]{0,18})/"
            case "number":
                return _NUMBER
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array":
                item = self._value(schema.get("items", {}), f"{rule}-i", depth=depth + 1)
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object":
                return self._object(schema, rule, depth=depth)
        raise GrammarError(f"the type '{kind}' is not built for this model's calls")

    def _any(self) -> str:
        """Write the rule of any value once; return its name."""
        if "any" not in self._done:
            self._done.add("any")
            listed = '"[" (any ("," any)*)? "]"'
            written = self._string("any")
            self._add(
                f'any: {written} | {_NUMBER} | "true" | "false" | "null" | {listed} | '
                f"{self._any_object()}"
            )
        return "any"

    def _any_object(self) -> str:
        self._any()
        return '"{" (/[\\w-]{1,64}:/ any ("," /[\\w-]{1,64}:/ any)*)? "}"'

    def _string(self, rule: str) -> str:
        opening, closing = self._text(self._open), self._text(self._close)
        if closing.startswith("<["):
            return f"{opening} /(?s:.*)/ {closing}"
        self._add(f"{rule}-s[suffix={closing}]: /(?s:.*)/")
        return f"{opening} {rule}-s"

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._text(self._open)} {self._text(value)} {self._text(self._close)}".strip()
        return json.dumps(json.dumps(value))

    def _object(self, schema: Mapping[str, Any], rule: str, *, depth: int) -> str:
        properties = schema.get("properties") or {}
        if not properties and schema.get("additionalProperties") is not False:
            return self._any_object()
        required = schema.get("required") or []
        members: list[tuple[str, bool]] = []
        for index, (key, inner) in enumerate(properties.items()):
            value = self._value(inner, f"{rule}-p{index}", depth=depth + 1)
            member = f"{rule}-m{index}"
            self._add(f"{member}: {self._text(key + ':')} {value}")
            members.append((member, key in required))
        self._members(members, rule)
        return f'"{{" {rule}-a0 "}}"'

    def _members(self, members: Sequence[tuple[str, bool]], rule: str) -> None:
        """Rules `a`: no member is written yet; rules `b`: some are, so a comma precedes."""
        for state, comma in (("a", ""), ("b", '"," ')):
            for index, (member, is_required) in enumerate(members):
                taken = f"{comma}{member} {rule}-b{index + 1}"
                left_out = "" if is_required else f" | {rule}-{state}{index + 1}"
                self._add(f"{rule}-{state}{index}: {taken}{left_out}")
            self._add(f'{rule}-{state}{len(members)}: ""')
