"""Defines `vlm rollout-plan` and `vlm render`: previews of a rollout and of a service's objects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlm_cli.output import Context, Format, Kubeconfig, Namespace, Output, run

WorkerImage = Annotated[
    str | None,
    typer.Option(metavar="IMAGE", help="The operator's default image; default: its own default."),
]


def rollout(
    name: Annotated[str | None, typer.Argument(help="A VLMService; left out with --from.")] = None,
    old: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="The manifest that runs.")
    ] = None,
    new: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="The manifest to apply.")
    ] = None,
    worker_image: WorkerImage = None,
    namespace: Namespace = None,
    output: Output = Format.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Print the steps from one manifest to another, offline; or where a service's rollout is."""
    if (old is None) != (new is None) or (old is None) == (name is None):
        raise typer.BadParameter("give the NAME of a service, or both --from and --to")
    if old is not None and new is not None:
        from vlm_cli.offline import show_rehearsal

        run(show_rehearsal(old, new, worker_image=worker_image, form=output))
        return
    from vlm_cli.revisions import show_rollout

    assert name is not None
    run(
        show_rollout(name, namespace=namespace, kubeconfig=kubeconfig, context=context, form=output)
    )


def render(
    manifest: Annotated[
        Path,
        typer.Option("-f", "--filename", metavar="PATH", help="A file or folder; - reads stdin."),
    ],
    worker_image: WorkerImage = None,
    namespace: Namespace = None,
) -> None:
    """Print the objects that the operator makes of a manifest, as YAML, without a cluster."""
    from vlm_cli.offline import show_children

    run(show_children(manifest, worker_image=worker_image, namespace=namespace))
