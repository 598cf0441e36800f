"""The flags that several commands have."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Annotated, Any

import typer

from vlm_cli.output import Format


def complete_service(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of services that begin with `incomplete`, for a shell's completion."""
    from vlm_cli.access import service_names  # its client is slow to import

    flags = (ctx.params.get(name) for name in ("kubeconfig", "namespace", "context"))
    with contextlib.redirect_stderr(io.StringIO()):  # a warning would appear in the command line
        found = asyncio.run(service_names(*flags))
    return [name for name in found if name.startswith(incomplete)]


def service_argument(text: str) -> Any:
    """Return an argument with the name of a VLMService; `text` is its help."""
    return typer.Argument(help=text, autocompletion=complete_service)


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
Service = Annotated[str, service_argument("A VLMService.")]
ServiceName = Annotated[str | None, service_argument("A VLMService; without it, all.")]
AllNamespaces = Annotated[
    bool, typer.Option("-A", "--all-namespaces", help="Services of all namespaces.")
]
Output = Annotated[Format, typer.Option("-o", "--output", help="Tables, or data for machines.")]
WorkerImage = Annotated[
    str | None,
    typer.Option(metavar="IMAGE", help="The operator's default image; default: its own default."),
]
GatewayImage = Annotated[
    str | None,
    typer.Option(
        metavar="IMAGE", help="The operator's image of gateways; default: --worker-image."
    ),
]
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
