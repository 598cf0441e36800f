"""Reads JSON objects strictly; an error names file and field. Pure but for `read_json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class PlanError(Exception):
    """The input cannot be planned; the message names file or flag, field and fix."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        PlanError: the file cannot be read, or has no JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PlanError(f"{path}: has no JSON object")
    return value


class Fields:
    """Typed access to one JSON object.

    A field that is null is absent. A method without a default requires its field. All methods that
    read a field raise PlanError if it has another type.
    """

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where = where
        self._values = values

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def child(self, name: str) -> Fields:
        """Return the object `name`; an empty one if it is absent."""
        value = self._values.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.error(name, "must be an object")
        return Fields(f"{self._where}: {name}", value)

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer of at least `least`."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"must be an integer of at least {least}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number that is not negative."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise self.error(name, f"must be a number of at least 0, not {value!r}")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._given(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {value!r}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def items(self, name: str) -> list[Any]:
        """Return a list; an empty one if it is absent."""
        value = self._given(name, [])
        if not isinstance(value, list):
            raise self.error(name, f"must be a list, not {value!r}")
        return value

    def error(self, name: str, problem: str) -> PlanError:
        """Return an error about one field."""
        return PlanError(f"{self._where}: {name} {problem}")

    def _given(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        return value
