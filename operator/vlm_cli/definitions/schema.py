"""Converts pydantic's JSON schema to the structural schema of a CustomResourceDefinition.

    pydantic                          Kubernetes
    $ref into $defs                   the definition itself; the field's description has precedence
    anyOf [T, null]                   T: a field is absent, never null
    default, example, restarts        sentences in the description, which `kubectl explain` shows
    pattern that a rule contains      only the rule, because its message has the fix
    title, propertyNames, x-triptych  dropped

Defaults are never schema defaults. So an absent field stays absent in the stored object, and does
not conflict with Git or an autoscaler.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel

from vlm_operator.api.base import KEY_RESTARTS, KEY_UNSET

_RESTARTS = {"pods": "Restarts: pods.", "gateway": "Restarts: the gateway.", "none": ""}
_DROPPED = frozenset(
    {"title", "default", "example", "propertyNames", "$defs", KEY_RESTARTS, KEY_UNSET}
)


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """Return the structural schema of one model."""
    schema = model.model_json_schema(by_alias=True)
    result: dict[str, Any] = _convert(schema, schema.get("$defs", {}))
    return result


def sentences(node: dict[str, Any]) -> str:
    """Return a field's text: its description, default, example and what a change restarts."""
    default = node.get(KEY_UNSET) or _in_words(node.get("default"))
    if isinstance(node.get("default"), dict):
        default = ""  # the fields of the object have their own defaults
    parts = [
        node.get("description", ""),
        f"Default: {default}." if default else "",
        f"E.g. {_as_typed(node['example'])}." if "example" in node else "",
        _RESTARTS.get(node.get(KEY_RESTARTS, "none"), ""),
    ]
    return " ".join(part for part in parts if part)


def flatten(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a node without $ref and without null; the field's keys override its type's keys."""
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[1]]
        siblings = {key: value for key, value in node.items() if key != "$ref"}
        return flatten({**target, **siblings}, definitions)
    branches = [branch for branch in node.get("anyOf", []) if branch != {"type": "null"}]
    if len(branches) == 1:
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        return flatten({**branches[0], **rest}, definitions)
    return node


def _convert(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = flatten(node, definitions)
    result = {key: value for key, value in node.items() if key not in _DROPPED}
    if description := sentences(node):
        result["description"] = description
    rules = result.get("x-kubernetes-validations", [])
    if any("pattern" in result and result["pattern"] in rule["rule"] for rule in rules):
        del result["pattern"]  # the rule checks the same and has a message
    if result.get("additionalProperties") is False:
        del result["additionalProperties"]
    for key in ("items", "additionalProperties"):
        if isinstance(result.get(key), dict):
            # kubectl explain prints the description of the list or map, not of its items.
            result[key] = _convert(result[key], definitions)
            result[key].pop("description", None)
    if "properties" in result:
        result["properties"] = {
            name: _convert(child, definitions) for name, child in result["properties"].items()
        }
    return result


def _as_typed(example: Any) -> str:
    """Write an example as YAML; a quantity with a fraction is quoted, or YAML reads a float."""
    quoted = isinstance(example, str) and re.fullmatch(r"\d+\.\d+", example)
    return f'"{example}"' if quoted else _in_words(example)


def _in_words(value: Any) -> str:
    """Write a default or an example as YAML's flow style would."""
    if value is None or value in ([], {}):
        return ""
    return value if isinstance(value, str) else json.dumps(value)
