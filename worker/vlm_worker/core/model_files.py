"""A model's JSON files, read strictly: an error names the file, the field and what it must be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from vlm_worker.errors import WorkerError


class ModelConfigError(WorkerError):
    """The worker cannot serve the model with these files or settings; the deployer must act."""


class ModelUnavailableError(ModelConfigError):
    """The model cannot be had now; another attempt may succeed."""


LFS_POINTER: Final = b"version "
"""The first bytes of a Git LFS pointer; no JSON or safetensors file begins with them."""


def check_no_pointer(path: Path, beginning: bytes) -> None:
    """Raise ModelConfigError if `beginning`, the file's first bytes, is of a Git LFS pointer."""
    if beginning.startswith(LFS_POINTER):
        raise ModelConfigError(
            f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull` where the "
            "model was cloned, and copy it again"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; raises ModelConfigError if there is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ModelConfigError(f"{path}: cannot be read: {reason}") from error
    check_no_pointer(path, data[: len(LFS_POINTER)])
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path}: holds no JSON object")
    return value


class ConfigFields:
    """Typed access to the fields of one JSON object; errors call the object `where`.

    All methods that read a field raise ModelConfigError if its value has the wrong type.
    """

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self._where = where
        self._values = values

    def child(self, name: str) -> ConfigFields:
        """The object under `name`; empty if it is absent or null."""
        value = self._values.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.error(name, "must be an object")
        return ConfigFields(f"{self._where}: {name}", value)

    def __contains__(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        """The names of the fields."""
        return iter(self._values)

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required if there is no default."""
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {value!r}")
        return value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`; required if there is no default."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"must be an integer of at least {least}, not {value!r}")
        return value

    def counts(self, name: str, *, least: int = 1) -> tuple[int, ...]:
        """An integer of at least `least`, or a list of them; required."""
        value = self._values.get(name)
        counts = value if isinstance(value, list) else [value]
        if any(isinstance(x, bool) or not isinstance(x, int) or x < least for x in counts):
            raise self.error(
                name, f"must be an integer of at least {least} or a list of them, not {value!r}"
            )
        return tuple(counts)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty if it is absent or null."""
        value = self._values.get(name) or []
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            raise self.error(name, f"must be a list of strings, not {value!r}")
        return tuple(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; required if there is no default."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, f"must be a positive number, not {value!r}")
        return float(value)

    def channels(
        self, name: str, default: tuple[float, float, float]
    ) -> tuple[float, float, float]:
        """Three numbers, one per colour channel."""
        value = self._values.get(name, default)
        if (
            not isinstance(value, list | tuple)
            or len(value) != 3
            or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in value)
        ):
            raise self.error(name, f"must be three numbers, not {value!r}")
        return float(value[0]), float(value[1]), float(value[2])

    def must_be(self, name: str, *built: object) -> None:
        """Raise ModelConfigError unless the field is absent or has a supported value."""
        if name in self._values and self._values[name] not in built:
            supported = " or ".join("null" if value is None else repr(value) for value in built)
            raise self.error(name, f"is {self._values[name]!r}; only {supported} is built")

    def error(self, name: str, problem: str) -> ModelConfigError:
        """Make an error about one field."""
        return ModelConfigError(f"{self._where}: {name} {problem}")
