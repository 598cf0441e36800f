"""Reports of `vlm plan` and `vlm advise`: numbers with unit and formula, as text or as data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_cli.output import console, plain_table

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


def show(sections: Sequence[Section], *, explain: bool) -> None:
    """Print a report; with `explain`, with the formula of each figure."""
    screen = console()
    for number, section in enumerate(sections):
        if number:
            screen.print()
        screen.print(section.title, style="bold", markup=False)
        if isinstance(section, FactSection):
            _print_facts(section, explain=explain)
        elif isinstance(section, TableSection):
            _print_table(section, explain=explain)
        else:
            for sentence in section.rows:
                screen.print(f"  {sentence}", markup=False)


def _print_facts(section: FactSection, *, explain: bool) -> None:
    table = plain_table("", "", "")
    table.show_header = False
    for name, value in section.rows.items():
        formula = value.formula if explain and isinstance(value, Figure) else ""
        table.add_row(f"  {name}", str(value), f"= {formula}" if formula else "")
    console().print(table, markup=False)


def _print_table(section: TableSection, *, explain: bool) -> None:
    columns = [name for name in section.rows[0] if any(str(row[name]) for row in section.rows)]
    table = plain_table(*(f"  {columns[0].upper()}", *(name.upper() for name in columns[1:])))
    for row in section.rows:
        cells = [_cell(row[name], name) for name in columns]
        table.add_row(f"  {cells[0]}", *cells[1:])
    console().print(table, markup=False)
    if explain:
        for name in columns:
            cells_of = [row[name] for row in section.rows]
            formulas = [cell.formula for cell in cells_of if isinstance(cell, Figure)]
            if formulas and formulas[0]:
                console().print(f"  {name.upper()} = {formulas[0]}", markup=False)


def _cell(value: Figure | str, column: str) -> str:
    return value.text(column) if isinstance(value, Figure) else value


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
