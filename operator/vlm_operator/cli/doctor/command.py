"""`vlm doctor`: one line a check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.markup import escape

from vlm_operator.cli.access import open_cluster
from vlm_operator.cli.doctor.checks import examine
from vlm_operator.cli.doctor.facts import Finding, Level
from vlm_operator.cli.doctor.gather import gather
from vlm_operator.cli.errors import CliError
from vlm_operator.cli.output import Format, console, emit

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


async def examine_cluster(
    *,
    namespace: str | None,
    kubeconfig: str | None,
    context: str | None,
    form: Format,
    now: float,
    probe: bool,
) -> None:
    """Examine a cluster and print what was found; ends with status 1 where something failed."""
    try:
        async with open_cluster(kubeconfig, namespace, context) as access:
            found = examine(await gather(access, namespace, now=now, probe=probe))
    except CliError as error:
        found = [Finding("api", Level.FAIL, error.problem, error.remedy)]
    if form is Format.TABLE:
        print_findings(found, console())
    else:
        emit([dataclasses.asdict(item) for item in found], form)
    if any(item.level is Level.FAIL for item in found):
        raise typer.Exit(1)


def print_findings(found: Sequence[Finding], out: Console) -> None:
    """A line for each, what to do below it, and a sum."""
    wide = max((len(item.check) for item in found), default=0)
    for item in found:
        colour = _COLOURS[item.level]
        out.print(f"[{colour}]{item.level.value:4}[/]  {item.check:{wide}}  {escape(item.message)}")
        if item.remedy:
            out.print(f"{'':4}  {'':{wide}}  → {escape(item.remedy)}")
    counts = {level: sum(item.level is level for item in found) for level in Level}
    out.print("\n" + ", ".join(f"{count} {level.value}" for level, count in counts.items()))
