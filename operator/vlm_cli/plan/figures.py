"""A number with its unit and formula, and the sections of a report. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

_BINARY = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
        unit: `B`, `s`, `tokens`, `%` and so on; "" only for ratios.
        formula: how it is computed, with its inputs; "" for an input.
    """

    value: float
    unit: str = ""
    formula: str = ""

    def to_dict(self, *, explain: bool) -> dict[str, Any]:
        value = self.value if math.isfinite(self.value) else None
        found: dict[str, Any] = {"value": value, "unit": self.unit}
        if explain:
            found["formula"] = self.formula or "input"
        return found

    def text(self, column: str) -> str:
        """Return the value for a column; the unit is left out if the column's name has it."""
        if self.unit in column.split():
            return str(dataclasses.replace(self, unit=""))
        return str(self)

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return "-"
        if self.unit == "B":
            return _bytes(self.value)
        if self.unit == "s":
            return f"{self.value * 1000:.3g} ms" if self.value < 10 else f"{self.value:.1f} s"
        if self.unit == "per hour":
            return f"{self.value:.2f} per hour"
        if self.unit == "%":
            return f"{self.value:.0f} %"
        text = f"{self.value:,.0f}" if float(self.value).is_integer() else f"{self.value:,.3g}"
        return f"{text} {self.unit}".rstrip()


@dataclasses.dataclass(frozen=True)
class FactSection:
    """Figures by name."""

    key: str
    title: str
    rows: Mapping[str, Figure | str]


@dataclasses.dataclass(frozen=True)
class TableSection:
    """Rows with the same columns; the figures of a column have one formula."""

    key: str
    title: str
    rows: Sequence[Mapping[str, Figure | str]]


@dataclasses.dataclass(frozen=True)
class NoteSection:
    """Sentences."""

    key: str
    title: str
    rows: Sequence[str]


Section = FactSection | TableSection | NoteSection


def to_data(sections: Sequence[Section], *, explain: bool) -> dict[str, Any]:
    """Return a report as JSON values; names of figures are keys."""

    def cell(value: Figure | str) -> Any:
        return value.to_dict(explain=explain) if isinstance(value, Figure) else value

    def row(values: Mapping[str, Figure | str]) -> dict[str, Any]:
        return {_camel(name): cell(value) for name, value in values.items()}

    found: dict[str, Any] = {}
    for section in sections:
        if isinstance(section, FactSection):
            found[section.key] = row(section.rows)
        elif isinstance(section, TableSection):
            found[section.key] = [row(values) for values in section.rows]
        else:
            found[section.key] = list(section.rows)
    return found


def _camel(name: str) -> str:
    words = name.replace("→", " to ").replace("/", " per ").split()
    return words[0].lower() + "".join(word[0].upper() + word[1:].lower() for word in words[1:])


def _bytes(value: float) -> str:
    for unit, size in _BINARY:
        if value >= size:
            return (
                f"{value / size:.3g} {unit}"
                if value < 1000 * size
                else f"{value / size:.0f} {unit}"
            )
    return f"{value:.0f} B"
