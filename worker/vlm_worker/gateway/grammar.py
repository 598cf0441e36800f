"""Grammars of requests: from `response_format`, or a Lark text of the gateway's own.

    response_format ─▶ of_response_format ─┐
    lark text ───────▶ validated ──────────┴▶ Grammar ─▶ GrammarChecks.check ─▶ Sampling.grammar

Both functions are cheap and check the form alone. `grammar_checks` has the library judge the text
in a child process; `error_of` writes the client's error from the library's reason.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from vlm_worker.annotations import MAX_GRAMMAR_BYTES
from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.api.schema import Fields
from vlm_worker.gateway.closed_schema import closed, parts_of

MAX_NAME: Final = 64
MAX_DESCRIPTION: Final = 4096
WHITESPACE: Final = r"[ \t\n\r]{1,64}"
"""White space between tokens of JSON is bounded: a model may not fill its answer with it."""

TOO_COMPLEX: Final = "too complex"
"""The problem of a grammar that exceeds the limits of the child process."""

_OPTIONS: Final = "x-guidance"  # llguidance's own keyword, with its options
_NAME = re.compile(r"[a-zA-Z0-9_-]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be, as a text of llguidance.

    `path` names the part of the request that it comes from, in errors. `schema` is its JSON Schema,
    if it has one, in which an error finds a keyword.
    """

    text: str
    path: str
    schema: Mapping[str, Any] | None = None


def of_response_format(value: Any, path: str = "response_format") -> Grammar | None:
    """The grammar that a `response_format` asks for; None if the answer is free text.

    Raises ApiError (400) that names the invalid part.
    """
    if value is None:
        return None
    fields = Fields(path, value)
    kind = fields.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise fields.missing("type")
    if kind != "json_schema":
        fields.done()
        return None if kind == "text" else of_schema({"type": "object"}, path)
    child = fields.child("json_schema")
    if child is None:
        raise fields.missing("json_schema")
    name = child.required_text("name", max_length=MAX_NAME)
    if not _NAME.fullmatch(name):
        where = child.at("name")
        raise invalid(f"'{where}' may have letters, digits, '_' and '-'.", param=where)
    child.text("description", max_length=MAX_DESCRIPTION)
    child.boolean("strict")  # without it, OpenAI's API may ignore the schema; here it is enforced
    schema = child.take("schema")
    if schema is None:
        raise child.missing("schema")
    child.done()
    fields.done()
    return of_schema(schema, child.at("schema"))


def of_schema(schema: Any, path: str) -> Grammar:
    """The grammar of JSON texts that a JSON Schema accepts. Raises ApiError (400)."""
    if not isinstance(schema, dict):
        raise invalid(f"'{path}' must be an object.", param=path, code="invalid_type")
    if exceeds(schema, MAX_GRAMMAR_BYTES):  # before anything walks through all of it
        raise _invalid(
            path, f"'{path}' has more than the {MAX_GRAMMAR_BYTES} bytes that are allowed."
        )
    options = _find(schema, _OPTIONS)
    if options is not None:
        raise _keyword(path, options, "is not supported")
    own = {_OPTIONS: {"whitespace_pattern": WHITESPACE}}
    grammar = {"grammars": [{"json_schema": {**closed(schema), **own}}]}
    text = json.dumps(grammar, separators=(",", ":"), ensure_ascii=False)
    return validated(text, path, schema=schema)


def exceeds(value: Any, num_bytes: int) -> bool:
    """Whether the JSON text of a value has more bytes; reads at most as many values.

    A character or number counts as one byte. So False bounds the bytes to a multiple.
    """
    values = [value]
    while values and num_bytes >= 0:
        one = values.pop()
        if isinstance(one, str):
            num_bytes -= len(one) + 2
        elif isinstance(one, dict | list):
            num_bytes -= 1 + len(one) * (2 if isinstance(one, dict) else 1)
            if num_bytes >= 0:
                values += one.values() if isinstance(one, dict) else one
                values += one if isinstance(one, dict) else ()
        else:
            num_bytes -= 1
    return num_bytes < 0


def has_options(schema: Mapping[str, Any]) -> bool:
    """Whether a schema has options of the library, which are not a client's to set."""
    return _find(schema, _OPTIONS) is not None


def validated(text: str, path: str, *, schema: Mapping[str, Any] | None = None) -> Grammar:
    """A Lark text, or llguidance's JSON, as a grammar of bounded size; `schema` as in `Grammar`.

    Raises ApiError (400) that names `path`.
    """
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise _invalid(
            path, f"'{path}' has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed."
        )
    return Grammar(text, path, schema)


def error_of(grammar: Grammar, problem: str) -> ApiError:
    """The client's error for the library's reason, which the message does not quote."""
    path = grammar.path
    if problem == TOO_COMPLEX:
        return _invalid(
            path,
            f"'{path}' takes too long to compile: use fewer alternatives, shorter patterns, or "
            "fewer properties.",
        )
    problem = _IN_LARK.sub("", _SOURCE.split(problem)[0])
    for pattern, keyword, reason in _REASONS:
        if found := re.search(pattern, problem):
            groups = found.groupdict()
            where = _find(grammar.schema, groups.get("keyword", keyword), groups.get("value"))
            if where is not None:
                return _keyword(path, where, reason)
    what = "grammar" if grammar.schema is None else "JSON Schema"
    return _invalid(path, f"'{path}' is no {what} that can be enforced.")


_SOURCE: Final = re.compile(r"\n +[0-9]+ \| ")
"""The library quotes the grammar behind its reason. That text may look like a reason."""
_IN_LARK: Final = re.compile(r"^at [0-9]+\([0-9]+\): failed to compile JSON schema: ")
_REASONS: Final = (
    (r"^Unimplemented keys: \[\"(?P<keyword>[^\"]*)\"", "", "is not supported"),
    (r"^oneOf constraints are not supported", "oneOf",
     "is supported only if no value can match two of its schemas; use 'anyOf'"),
    (r"^Unknown format: (?P<value>.*)", "format", "has a format that is not supported"),
    (r"^Invalid type: (?P<value>.*)", "type", "is no type of JSON Schema"),
    (r"^regex parse error", "pattern",
     "has a regular expression that is invalid or not supported (look-around, back-references)"),
    (r"^Resource '(?P<value>.*?)' is not present", "$ref", "may name parts of this schema alone"),
    (r"^Pointer '(?P<value>.*?)' does not exist", "$ref",
     "names a part that the schema does not have"),
    (r"patternProperty regexes", "patternProperties", "has patterns that match the same name"),
    (r"^invalid multiple of", "multipleOf", "must be a number above 0"),
    (r"^Unsatisfiable schema: anyOf is empty", "enum", "has no value"),
    (r"^Unsatisfiable schema: anyOf is empty", "anyOf", "has no schema"),
    (r"^Unsatisfiable schema: required property '", "required",
     "names a property that can have no value"),
    (r"^Unsatisfiable schema: (?P<keyword>min\w+|exclusiveMin\w+) ", "",
     "leaves no value below the maximum"),
    (r"^Unsatisfiable schema: incompatible types", "enum", "has no value of the 'type'"),
    (r"^Unsatisfiable schema: incompatible types", "const", "is not of the 'type'"),
    (r"^Unsatisfiable schema: incompatible types", "allOf", "has schemas of different types"),
    (r"integer interval|float range|integer range", "minimum",
     "and the maximum have a range that is not supported, or without a value"),
    (r"^Expected .* for '(?P<keyword>\w+)'", "", "has a value of the wrong type"),
)  # fmt: skip
"""The library's reason, the keyword if the reason does not name it, and what the client reads."""


def _keyword(path: str, where: tuple[str, ...], reason: str) -> ApiError:
    full = ".".join((path, *where))
    return _invalid(full, f"'{full}' {reason}.")


def _invalid(path: str, message: str) -> ApiError:
    return invalid(message, param=path, code="invalid_json_schema")


def _find(schema: Any, keyword: str, value: str | None = None) -> tuple[str, ...] | None:
    """The path of a keyword in a schema, if one place has `value`, that one; None without it."""
    places = [
        ((*path, keyword), part[keyword]) for path, part in parts_of(schema) if keyword in part
    ]
    for where, held in places:
        if value is not None and isinstance(held, str) and held.lstrip("#") == value.lstrip("#"):
            return where
    return places[0][0] if places else None
