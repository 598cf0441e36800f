"""How results leave a command: tables for people, JSON and YAML for machines."""

from __future__ import annotations

import enum
import json
import sys
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table


class Format(enum.StrEnum):
    """What `-o` takes."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


# Where no terminal sets the width, a table keeps all of its text.
PIPE_WIDTH = 400


def console() -> Console:
    """Standard output, for people."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, soft_wrap=True, width=width)


def notes() -> Console:
    """Standard error: progress and warnings, so that output stays clean for machines."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def emit(value: Any, form: Format) -> None:
    """Write a value for machines."""
    if form is Format.YAML:
        sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))
    else:
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def plain_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table as kubectl prints them; the columns in `numbers` are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table
