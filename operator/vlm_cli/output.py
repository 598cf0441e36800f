"""Prints results of commands: tables for users, JSON and YAML for programs."""

from __future__ import annotations

import enum
import json
import sys
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table


class Format(enum.StrEnum):
    """Values of `-o`."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


# Width without a terminal, so that tables are not cut.
PIPE_WIDTH = 400


def console() -> Console:
    """Return a console on standard output."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, soft_wrap=True, width=width)


def notes() -> Console:
    """Return a console on standard error, for progress and warnings."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def emit(value: Any, form: Format) -> None:
    """Write a value to standard output as JSON, or as YAML if `form` is YAML."""
    if form is Format.YAML:
        sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))
    else:
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def plain_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table in kubectl's style; the columns in `numbers` are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table
