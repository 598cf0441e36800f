"""One JSON object, taken apart field by field; what is left at the end was unknown.

Every refusal names the part by its path, says the rule, and is a 400.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported

# As alike as names are that differ by a letter or two; others mean something else.
_TYPO = 0.85


class Fields:
    """Typed access to one object; `path` is what errors call it, "" for the body itself.

    A field that is null counts as absent, as OpenAI's own client sends it.
    """

    def __init__(self, path: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise invalid(f"'{path}' must be an object.", param=path, code="invalid_type")
        self.path = path
        self._left: dict[str, Any] = dict(value)
        self._known: set[str] = set()

    def at(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str) -> Any:
        """The raw value, or None."""
        self._known.add(name)
        return self._left.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._left.get(name) is not None

    def names(self) -> Iterator[str]:
        """Fields not taken yet."""
        yield from self._left

    def text(self, name: str, *, max_length: int, min_length: int = 0) -> str | None:
        """A string of `min_length` to `max_length` characters."""
        value = self.take(name)
        return (
            None
            if value is None
            else check_text(value, self.at(name), max_length=max_length, min_length=min_length)
        )

    def required_text(self, name: str, *, max_length: int, min_length: int = 1) -> str:
        """The same; its absence is an error."""
        value = self.text(name, max_length=max_length, min_length=min_length)
        return self._required(name, value)

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        """One of a few strings."""
        value = self.take(name)
        if value is None or (isinstance(value, str) and value in choices):
            return value
        listed = ", ".join(f"'{choice}'" for choice in choices)
        raise invalid(
            f"'{self.at(name)}' must be one of {listed}.", param=self.at(name), code="invalid_value"
        )

    def integer(self, name: str, *, minimum: int, maximum: int) -> int | None:
        """An integer in `[minimum, maximum]`; 4.0 is not one, nor is true."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._type(name, "an integer")
        return int(self._bounded(name, value, minimum, maximum))

    def number(self, name: str, *, minimum: float, maximum: float) -> float | None:
        """A number in `[minimum, maximum]`."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._type(name, "a number")
        return float(self._bounded(name, value, minimum, maximum))

    def boolean(self, name: str) -> bool | None:
        """True or false."""
        value = self.take(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._type(name, "a boolean")

    def child(self, name: str) -> Fields | None:
        """An object."""
        value = self.take(name)
        return None if value is None else Fields(self.at(name), value)

    def array(self, name: str, *, max_length: int, min_length: int = 0) -> list[Any] | None:
        """An array of `min_length` to `max_length` items."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self._type(name, "an array")
        if not min_length <= len(value) <= max_length:
            raise invalid(
                f"'{self.at(name)}' must have {min_length} to {max_length} items, "
                f"it has {len(value)}.",
                param=self.at(name),
                code="invalid_value",
            )
        return value

    def only(self, name: str, neutral: Sequence[Any], message: str) -> None:
        """Refuse the field unless it asks for what happens anyway."""
        value = self.take(name)
        if value is None or any(_same(value, allowed) for allowed in neutral):
            return
        raise unsupported(self.at(name), f"'{self.at(name)}' is not supported: {message}")

    def done(self) -> Self:
        """Refuse what nobody took."""
        for name in self._left:
            where = self.at(name if len(name) <= 64 and name.isprintable() else "?")
            meant = difflib.get_close_matches(name[:64], sorted(self._known), 1, _TYPO)
            hint = f": is '{self.at(meant[0])}' meant?" if meant else "."
            raise invalid(
                f"'{where}' is not a known parameter{hint}", param=where, code="unknown_parameter"
            )
        return self

    def missing(self, name: str) -> ApiError:
        """The error of a field that must be there."""
        return invalid(
            f"'{self.at(name)}' is required.",
            param=self.at(name),
            code="missing_required_parameter",
        )

    def _required(self, name: str, value: str | None) -> str:
        if value is None:
            raise self.missing(name)
        return value

    def _type(self, name: str, wanted: str) -> ApiError:
        return invalid(
            f"'{self.at(name)}' must be {wanted}.", param=self.at(name), code="invalid_type"
        )

    def _bounded(self, name: str, value: float, minimum: float, maximum: float) -> float:
        if math.isfinite(value) and minimum <= value <= maximum:
            return value
        raise invalid(
            f"'{self.at(name)}' must be between {minimum} and {maximum}.",
            param=self.at(name),
            code="invalid_value",
        )


def check_text(value: Any, path: str, *, max_length: int, min_length: int = 0) -> str:
    """A string within bounds, or the error that says so."""
    if not isinstance(value, str):
        raise invalid(f"'{path}' must be a string.", param=path, code="invalid_type")
    if not min_length <= len(value) <= max_length:
        raise invalid(
            f"'{path}' must have {min_length} to {max_length} characters, it has {len(value)}.",
            param=path,
            code="invalid_value",
        )
    return value


def _same(value: Any, allowed: Any) -> bool:
    """Equal, where true is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)
