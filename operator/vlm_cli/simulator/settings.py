"""Reads hardware from a file with the fields of `hardware.Hardware`; curves are mappings.

encode: {fixed: 0.02, linear: 9.0e-5, square: 4.0e-9}
kv_tokens: 120000
node_types: {encoder: {small: {startup_seconds: 40, nodes: 4}}}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vlm_cli.simulator.hardware import Curve, Hardware, NodeType
from vlm_operator.names import POOL_ROLES, Role

_POSITIVE = {"kv_tokens", "chunk_tokens", "prompts_per_step", "encode_items", "itl_base"}


class HardwareError(ValueError):
    """A field of hardware is wrong; the message names it and the fix."""


def read_hardware(value: Any) -> Hardware:
    """Read hardware; missing fields have the simulator's defaults.

    Raises:
        HardwareError: a field is unknown, or its value is invalid.
    """
    given = _mapping(value, "the hardware")
    plain = {key: item for key, item in given.items() if key not in ("encode", "prefill")}
    types = _mapping(plain.pop("node_types", {}), "node_types")
    curves: dict[str, Any] = {
        key: Curve(**_numbers(_mapping(given[key], key), Curve, f"{key}."))
        for key in ("encode", "prefill")
        if key in given
    }
    return dataclasses.replace(
        Hardware(**_numbers(plain, Hardware, "")),
        **curves,
        node_types={
            _role(role): {
                name: NodeType(**_numbers(_mapping(item, where), NodeType, f"{where}."))
                for name, item in _mapping(kinds, f"node_types.{role}").items()
                for where in (f"node_types.{role}.{name}",)
            }
            for role, kinds in types.items()
        },
    )


def _numbers(given: Mapping[str, Any], kind: type, path: str) -> dict[str, Any]:
    """Check that all fields are known and not negative, and integers if the field is an int."""
    known = {field.name: field.type for field in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in known:
            raise HardwareError(f"{path}{name} is no field: there are {', '.join(known)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise HardwareError(f"{path}{name} must be a number, 0 or more")
        if known[name] == "int" and not float(value).is_integer():
            raise HardwareError(f"{path}{name} must be a whole number")
        if name in _POSITIVE and value == 0:
            raise HardwareError(f"{path}{name} must be more than 0")
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in given
    ]
    if missing:
        raise HardwareError(f"{path}{missing[0]} is missing: write a number")
    return {key: int(item) if known[key] == "int" else item for key, item in given.items()}


def _mapping(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise HardwareError(f"{path} must be a mapping of names")
    return value


def _role(name: str) -> Role:
    if name not in POOL_ROLES:
        raise HardwareError(f"node_types.{name} is no role: there are {', '.join(POOL_ROLES)}")
    return Role(name)
