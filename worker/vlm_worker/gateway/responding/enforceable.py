"""Reads the JSON schemas that grammars of ours enforce, and refuses all others. Pure.

    JSON schema ─▶ read ─▶ Node ─▶ rules of a dialect (`dialect_grammar`, `tag_grammar`)
                     └─ GrammarError: the keyword, its path, and what to do

llguidance enforces schemas of standard JSON itself. The calls of some models are no JSON, and their
rules are written here. `ENFORCED` is all that these rules enforce.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from vlm_worker.gateway.responding.calls import MAX_REFS

ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
     "$schema", "$comment", "$defs", "definitions"}
)  # fmt: skip
"""Keywords that no value violates."""
ENFORCED: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset(),
    "integer": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""The keywords beside `type`, by type. `enum`, `const`, `anyOf` and `$ref` are enforced, too, each
without other keywords than annotations; `enum` and `const` also with `type`."""
MAX_DEPTH: Final = 16
MAX_ITEMS: Final = 1024
MAX_NODES: Final = 16384
"""Values of a schema whose references are written out; 16 characters of an enum count as one."""
_LEAVE_OUT: Final = "leave it out, or send 'strict': false"
_FIXES: Final = {
    "oneOf": "use 'anyOf'",
    "allOf": "write its schemas as one",
    "nullable": "name the type 'null' in 'type'",
}


class GrammarError(ValueError):
    """No grammar enforces this. The message says what; `where` is its path in the schema."""

    def __init__(self, message: str, where: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.where = where


@contextlib.contextmanager
def located(*where: str) -> Iterator[None]:
    """Put a path before the one of an error."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(str(error), (*where, *error.where)) from error


@dataclasses.dataclass(frozen=True, slots=True)
class AnyValue:
    """Any value."""


@dataclasses.dataclass(frozen=True, slots=True)
class AnyText:
    """Any string."""


@dataclasses.dataclass(frozen=True, slots=True)
class Literals:
    """One of these values."""

    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Scalar:
    """A number, boolean or null; `schema` has its type and bounds, for llguidance."""

    kind: str
    schema: Mapping[str, Any]

    @property
    def is_bounded(self) -> bool:
        return len(self.schema) > 1


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    item: Node
    least: int
    most: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    key: str
    value: Node
    is_required: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    """These members, in this order; without members, any keys with values of `others`.

    None: there are no other keys.
    """

    members: tuple[Member, ...]
    others: Node | None


@dataclasses.dataclass(frozen=True, slots=True)
class Union:
    choices: tuple[Node, ...]


Node = AnyValue | AnyText | Literals | Scalar | Array | Object | Union


def read(schema: Mapping[str, Any]) -> Object:
    """Read the schema of a tool's arguments, which are an object.

    Raises:
        GrammarError: it has a keyword that the rules do not enforce.
    """
    root = {"type": "object", **schema} if not {"$ref", "anyOf", "allOf"} & set(schema) else schema
    try:
        node = _Reader(schema).node(root, ())
    except (AttributeError, TypeError, OverflowError) as error:  # a `$ref` may name anything
        raise GrammarError("is no JSON Schema that can be enforced") from error
    if not isinstance(node, Object):
        raise GrammarError("must be the schema of one object; write it with 'properties'")
    return node


def choices(node: Node) -> Iterator[Node]:
    """Yield the alternatives of a value that are no unions."""
    if isinstance(node, Union):
        for choice in node.choices:
            yield from choices(choice)
    else:
        yield node


class _Reader:
    """Reads one schema and its definitions, each of them once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, tuple[Node, int, int]] = {}  # with depth and number of nodes
        self._open: set[int] = set()
        self._depth = 0  # of the node that was read last
        self._num_nodes = 0  # of all, written out

    def node(self, schema: Any, path: tuple[str, ...]) -> Node:
        self._count(1)
        if schema is True:
            self._depth = 1
            return AnyValue()
        if not isinstance(schema, Mapping):
            raise GrammarError("is no schema of a value; leave the value out", path)
        if id(schema) in self._open:
            raise GrammarError("refers to itself, which is not built", path)
        if id(schema) in self._known:
            node, self._depth, num_nodes = self._known[id(schema)]
            self._count(num_nodes)
        else:
            before = self._num_nodes
            self._open.add(id(schema))
            node = self._new(schema, path)
            self._open.remove(id(schema))
            self._known[id(schema)] = node, self._depth, self._num_nodes - before
        if self._depth > MAX_DEPTH:
            raise GrammarError(f"is nested deeper than {MAX_DEPTH} levels", path)
        return node

    def _count(self, num_nodes: int) -> None:
        """Raise GrammarError if references that are shared make too much of a small schema."""
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            raise GrammarError(f"has more than {MAX_NODES} values, its references written out")

    def _new(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> Node:
        if "$ref" in schema:
            self._only(schema, path, {"$ref"})
            return self._named(schema["$ref"], path)
        if "anyOf" in schema:
            self._only(schema, path, {"anyOf"})
            return self._union(schema["anyOf"], (*path, "anyOf"))
        parts = schema.get("allOf")
        if isinstance(parts, list) and len(parts) == 1 and "type" not in schema:
            self._only(schema, path, {"allOf"})
            return self.node(parts[0], (*path, "allOf", "0"))
        kinds = _kinds(schema, path)
        if "enum" in schema or "const" in schema:
            self._only(schema, path, {"type", "enum", "const"})
            self._depth = 1
            literals = _literals(schema, kinds, path)
            self._count(len(json.dumps(literals.values, ensure_ascii=False)) // 16)
            return literals
        known = {"type"}.union(*(ENFORCED[kind] for kind in kinds))
        self._only(schema, path, known)
        if not kinds:
            self._depth = 1
            return AnyValue()
        return self._joined([self._typed(kind, schema, path) for kind in kinds])

    def _only(self, schema: Mapping[str, Any], path: tuple[str, ...], known: set[str]) -> None:
        unknown = [keyword for keyword in schema if keyword not in known | ANNOTATIONS]
        if unknown:
            fix = _FIXES.get(unknown[0], _LEAVE_OUT)
            raise GrammarError(f"is not enforced in this model's calls: {fix}", (*path, unknown[0]))

    def _named(self, name: Any, path: tuple[str, ...]) -> Node:
        """Read the part of the schema that a `$ref` names, as `calls.resolved` finds it."""
        where = (*path, "$ref")
        steps = name[2:].split("/") if isinstance(name, str) and name.startswith("#/") else []
        part: Any = self._root
        for step in steps:
            part = part.get(step) if isinstance(part, Mapping) else None
        if not steps or part is None or len(self._open) > MAX_REFS * MAX_DEPTH:
            raise GrammarError("must name a part of this schema, as '#/$defs/NAME'", where)
        if id(part) in self._open:
            raise GrammarError("refers to itself, which is not built", where)
        return self.node(part, tuple(steps))

    def _union(self, listed: Any, path: tuple[str, ...]) -> Node:
        if not isinstance(listed, list) or not listed:
            raise GrammarError("must be an array of schemas", path)
        nodes = []
        for index, one in enumerate(listed):
            node = self.node(one, (*path, str(index)))
            nodes.append((node, self._depth))
        return self._joined(nodes)

    def _joined(self, nodes: list[tuple[Node, int]]) -> Node:
        self._depth = max(depth for _, depth in nodes)
        return nodes[0][0] if len(nodes) == 1 else Union(tuple(node for node, _ in nodes))

    def _typed(
        self, kind: str, schema: Mapping[str, Any], path: tuple[str, ...]
    ) -> tuple[Node, int]:
        if kind == "array":
            return self._array(schema, path)
        if kind == "object":
            return self._object(schema, path)
        if kind == "string":
            return AnyText(), 1
        bounds = {name: schema[name] for name in sorted(ENFORCED[kind]) if name in schema}
        for name, bound in bounds.items():
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise GrammarError("must be a number", (*path, name))
        return Scalar(kind, {"type": kind, **bounds}), 1

    def _array(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> tuple[Node, int]:
        item = self.node(schema.get("items", True), (*path, "items"))
        depth = self._depth + 1
        limits: list[int | None] = []
        for name in ("minItems", "maxItems"):
            limit = schema.get(name)
            if limit is not None and (
                isinstance(limit, bool)
                or not isinstance(limit, int)
                or not 0 <= limit <= MAX_ITEMS
                or (limits and limit < (limits[0] or 0))
            ):
                raise GrammarError(
                    f"must be 0 to {MAX_ITEMS}, and 'maxItems' not below 'minItems'", (*path, name)
                )
            limits.append(limit)
        return Array(item, limits[0] or 0, limits[1]), depth

    def _object(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> tuple[Node, int]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        for name in required:
            if name not in properties:
                raise GrammarError("names a property that 'properties' lacks", (*path, "required"))
        members, depth = [], 0
        needed = set(required)
        for key, inner in properties.items():
            value = self.node(inner, (*path, "properties", key))
            members.append(Member(key, value, key in needed))
            depth = max(depth, self._depth)
        others = schema.get("additionalProperties", True)
        node = None
        if others is not False and not members:
            node = self.node(others, (*path, "additionalProperties"))
            depth = max(depth, self._depth)
        return Object(tuple(members), node), depth + 1


def _kinds(schema: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return the types of a schema; none if it takes values of all types."""
    named = schema.get("type")
    kinds = [named] if isinstance(named, str) else list(named or [])
    for kind in kinds:
        if kind not in ENFORCED:
            raise GrammarError(f"is '{kind}', which is no type of JSON Schema", (*path, "type"))
    if "integer" in kinds and "number" in kinds:
        kinds.remove("integer")
    if named is None:  # a value of the one type that its keywords are for keeps the schema
        kinds = [kind for kind in ("object", "array") if ENFORCED[kind] & set(schema)][:1]
    elif not kinds:
        raise GrammarError("has no type", (*path, "type"))
    return kinds


def _literals(schema: Mapping[str, Any], kinds: list[str], path: tuple[str, ...]) -> Literals:
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if "const" in schema:
        values = [value for value in values if _equal(value, schema["const"])]
    if schema.get("type") is not None:
        values = [value for value in values if any(is_of(value, kind) for kind in kinds)]
    if not values:
        keyword = "enum" if "enum" in schema else "const"
        raise GrammarError("has no value that the schema takes", (*path, keyword))
    return Literals(tuple(values))


def _equal(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def is_of(value: Any, kind: str) -> bool:
    """Whether a value has a type of JSON Schema."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    if isinstance(value, str):
        return kind == "string"
    return kind == ("array" if isinstance(value, list) else "object")
