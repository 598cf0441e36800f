"""Flags that several commands share, and `run`, which runs a command."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from vlm_cli.errors import CliError
from vlm_cli.output import Format, notes

Kubeconfig = Annotated[
    str | None,
    typer.Option(envvar="KUBECONFIG", metavar="FILE", help="Default: ~/.kube/config."),
]
Context = Annotated[
    str | None, typer.Option(metavar="NAME", help="Default: the kubeconfig's current one.")
]
Namespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", metavar="NS", help="Default: the kubeconfig's."),
]
Output = Annotated[Format, typer.Option("-o", "--output", help="Tables, or data for machines.")]
Url = Annotated[
    str | None,
    typer.Option(metavar="URL", help="An OpenAI API to ask, instead of a service's gateway."),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="VLM_API_KEY", metavar="KEY", help="Bearer key.")
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Default: the served name.")]
Images = Annotated[
    list[Path] | None, typer.Option("--image", metavar="FILE", help="An image; repeatable.")
]


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
