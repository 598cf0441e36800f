"""Runs the checks of `vlm doctor` and prints one line per finding."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vlm_cli import flags
from vlm_cli.access import open_cluster
from vlm_cli.doctor import installed, nodes, rights, services
from vlm_cli.doctor.facts import Facts, Finding, Level
from vlm_cli.doctor.gather import gather
from vlm_cli.output import CliError, Format, console, emit

Check = Callable[[Facts], Iterator[Finding]]
_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


async def doctor(
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", metavar="NS", help="Services of one; default: all."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also fetch the metrics of one gateway.")
    ] = False,
    output: flags.Output = Format.TABLE,
    kubeconfig: flags.Kubeconfig = None,
    context: flags.Context = None,
) -> None:
    """Say what is missing in this cluster, and what to do; status 1 where something fails.

    Raises:
        typer.Exit: status 1, if a finding has level `fail`.
    """
    now = datetime.datetime.now(datetime.UTC).timestamp()
    try:
        async with open_cluster(kubeconfig, namespace, context) as access:
            found = examine(await gather(access, namespace, now=now, probe=probe))
    except CliError as error:
        found = [Finding("api", Level.FAIL, error.problem, error.remedy)]
    if output is Format.TABLE:
        print_findings(found, console())
    else:
        emit([dataclasses.asdict(item) for item in found], output)
    if any(item.level is Level.FAIL for item in found):
        raise typer.Exit(1)


def print_findings(found: Sequence[Finding], out: Console) -> None:
    """Print each finding with its remedy below it, then the counts by level."""
    wide = max((len(item.check) for item in found), default=0)
    for item in found:
        colour = _COLOURS[item.level]
        out.print(f"[{colour}]{item.level.value:4}[/]  {item.check:{wide}}  {escape(item.message)}")
        if item.remedy:
            out.print(f"{'':4}  {'':{wide}}  → {escape(item.remedy)}")
    counts = {level: sum(item.level is level for item in found) for level in Level}
    out.print("\n" + ", ".join(f"{count} {level.value}" for level, count in counts.items()))


def unreadable(facts: Facts) -> Iterator[Finding]:
    """Report kinds that could not be read, and so are not checked."""
    for kind, reason in facts.unreadable.items():
        message = f"{kind.plural} cannot be checked: {reason}"
        yield Finding("access", Level.WARN, message, "run it as an administrator, or with -n")


def gateway(facts: Facts) -> Iterator[Finding]:
    """Report the fetch of one gateway's metrics, if --probe was given."""
    if facts.gateway is not None:
        yield facts.gateway


# In the order of output: prerequisites come first.
CHECKS: tuple[Check, ...] = (
    installed.version,
    unreadable,
    installed.definitions,
    rights.own,
    installed.operator,
    installed.exclusive,
    rights.operators,
    installed.gateway_role,
    installed.gateway_network,
    nodes.ready,
    nodes.classes,
    nodes.variants,
    services.watched,
    services.security,
    services.claims,
    services.conditions,
    services.paused,
    services.gateways,
    services.pods,
    services.owners,
    services.writers,
    gateway,
)


def examine(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]
