"""The flags that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlm_cli.output import Format

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
ServiceName = Annotated[str | None, typer.Argument(help="A VLMService; without it, all.")]
AllNamespaces = Annotated[
    bool, typer.Option("-A", "--all-namespaces", help="Services of all namespaces.")
]
Output = Annotated[Format, typer.Option("-o", "--output", help="Tables, or data for machines.")]
WorkerImage = Annotated[
    str | None,
    typer.Option(metavar="IMAGE", help="The operator's default image; default: its own default."),
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
