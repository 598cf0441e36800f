"""Random JSON Schemas of bounded values, so that a random model comes to an end."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "name", "kind of", "ü", "x_1", 'a"b')

_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-20, 1000),
        st.integers(0, 5000),
    ),
    st.lists(st.sampled_from(["red", "blue", "true", 1, 2.5, None, "ö\n"]), min_size=1, max_size=4,
             unique_by=repr).map(lambda values: {"enum": values}),
    st.sampled_from([1, "x", [1, "y"], {"k": 0}]).map(lambda value: {"const": value}),
    st.sampled_from(["^[A-Z]{3}$", "^a{0,4}b?$", "^(yes|no)$", "^[0-9]{2}-[0-9]{2}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(
        lambda kind: {"type": "string", "format": kind}
    ),
)  # fmt: skip


def _objects(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from(NAMES), parts, max_size=4)

    def build(properties: dict[str, Any], chosen: list[str]) -> dict[str, Any]:
        required = [name for name in properties if name in chosen]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return st.builds(build, properties, st.lists(st.sampled_from(NAMES), max_size=4))


def _containers(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        _objects(parts),
        st.builds(
            lambda items, low, more: {
                "type": "array", "items": items, "minItems": low, "maxItems": low + more
            },
            parts, st.integers(0, 2), st.integers(0, 2),
        ),
        st.lists(parts, min_size=1, max_size=3).map(lambda choices: {"anyOf": choices}),
    )  # fmt: skip


SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(_LEAVES, _containers, max_leaves=8)
