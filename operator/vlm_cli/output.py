"""What all commands share: the error that ends one, tables and data as output."""

from __future__ import annotations

import asyncio
import enum
import json
import sys
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

# Width without a terminal, so that tables are not cut.
PIPE_WIDTH = 400
BAR_WIDTH = 40
# In the order of a request. Unknown stages, from a newer gateway, come after these.
STAGES = (
    "gateway",
    "media",
    "encoder_queue",
    "encode",
    "embed_transfer",
    "decode_reserve",
    "prefill_queue",
    "prefill",
    "other",
)


class Format(enum.StrEnum):
    """Values of `-o`."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class CliError(Exception):
    """Ends a command with status 1.

    Args:
        problem: one sentence that names the object.
        remedy: a command or a sentence; empty if there is none.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a command to its end.

    Raises:
        typer.Exit: status 1 after a printed `CliError`, status 130 after Ctrl-C.
    """
    try:
        asyncio.run(work)
    except CliError as error:
        notes().print(f"error: {error.problem}", markup=False, style="red")
        if error.remedy:
            notes().print(f"  {error.remedy}", markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


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


def ttft_breakdown(stages: Mapping[str, float]) -> Table:
    """Return a table with one row per stage; each bar starts at the end of the one above it.

    Args:
        stages: milliseconds by stage; they add up to the TTFT.
    """
    table = plain_table("STAGE", "MS", "SHARE", "", numbers=("MS", "SHARE"))
    total = sum(stages.values())
    before = 0.0
    for stage in ordered(stages):
        spent = stages[stage]
        if total > 0 and spent > 0:
            start = round(BAR_WIDTH * before / total)
            end = max(start + 1, round(BAR_WIDTH * (before + spent) / total))
            bar = " " * min(start, BAR_WIDTH - 1) + "█" * (end - min(start, BAR_WIDTH - 1))
            table.add_row(stage, f"{spent:.1f}", f"{100 * spent / total:.0f}%", f"[cyan]{bar}[/]")
        before += spent
    table.add_row("TTFT", f"{total:.1f}", "100%" if total > 0 else "", "", style="bold")
    return table


def ordered(stages: Iterable[str]) -> list[str]:
    """Return stage names in the order of a request."""
    found = set(stages)
    return [stage for stage in STAGES if stage in found] + sorted(found - set(STAGES))
