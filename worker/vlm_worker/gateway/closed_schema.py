"""Objects of a schema that name properties have no others, unless the schema speaks of others.

JSON Schema allows any further property. A model that writes one token at a time may then add
properties until the answer's limit, and few callers expect them: a function's arguments with a
further name are an error in most languages. vLLM's default grammar allows none either. Each value
that a closed schema accepts is a value of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from vlm_worker.gateway.turns import Steps, at_once

MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value has schemas by a name that is no keyword."""
VALUES: Final = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose value has no schema."""
Where = tuple[str, ...]
_COMBINE: Final = ("allOf", "anyOf", "oneOf", "$ref")
_OTHERS: Final = (
    "additionalProperties", "patternProperties", "unevaluatedProperties", "enum", "const",
)  # fmt: skip


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with `additionalProperties: false` in each object that names its properties.

    The schema stays as it is if parts of it combine for one object: properties that one part names
    would be others of another part. With `oneOf`, a value of one closed part might be a value of
    another part as well, which the schema does not accept.
    """
    return at_once(closing(schema))


def closing(schema: Mapping[str, Any]) -> Steps[Mapping[str, Any]]:
    """The steps of `closed`."""
    for _, part in parts_of(schema):
        if _combines(part):
            return schema
        yield
    found: Mapping[str, Any] = yield from _closing(schema)
    return found


def _closing(value: Any) -> Steps[Any]:
    if not isinstance(value, dict | list):
        return value
    yield
    if isinstance(value, list):
        made = []
        for index, one in enumerate(value):
            if not index % 256:
                yield
            made.append((yield from _closing(one)) if isinstance(one, dict | list) else one)
        return made
    parts: dict[str, Any] = {}
    for name, held in value.items():
        if name in MAPS and isinstance(held, dict):
            schemas = yield from _closing(list(held.values()))
            parts[name] = dict(zip(held, schemas, strict=True))
        else:
            parts[name] = held if name in VALUES else (yield from _closing(held))
    return parts | {"additionalProperties": False} if _closes(value) else parts


def _closes(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return False
    least = schema.get("minProperties", 0)
    return (
        not any(name in schema for name in _OTHERS)
        and all(isinstance(name, str) and name in properties for name in required)
        and isinstance(least, int)
        and least <= len(properties)
    )


def _combines(schema: Mapping[str, Any]) -> bool:
    """Whether more than one part of a schema describes the same value."""
    every = schema.get("allOf")
    beside = ("properties" in schema) + sum(name in schema for name in _COMBINE)
    return "oneOf" in schema or beside > 1 or (isinstance(every, list) and len(every) > 1)


def parts_of(value: Any, path: Where = ()) -> Iterator[tuple[Where, Mapping[str, Any]]]:
    """Each schema in a schema, with its path; names of properties are no keywords.

    Some parts of lists are empty: there a long walk may be interrupted, too.
    """
    if isinstance(value, list):
        for index, one in enumerate(value):
            if not index % 256:
                yield path, {}
            if isinstance(one, dict | list):
                yield from parts_of(one, (*path, str(index)))
    if not isinstance(value, dict):
        return
    yield path, value
    for name, held in value.items():
        if name in MAPS and isinstance(held, dict):
            for key, one in held.items():
                yield from parts_of(one, (*path, name, key))
        elif name not in VALUES:
            yield from parts_of(held, (*path, name))
