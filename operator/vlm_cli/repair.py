"""Defines `vlm doctor` and `vlm release-finalizers`, which diagnose and repair a cluster."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from vlm_cli.output import Context, Format, Kubeconfig, Namespace, Output, run


def doctor(
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", metavar="NS", help="Services of one; default: all."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also fetch the metrics of one gateway.")
    ] = False,
    output: Output = Format.TABLE,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Say what is missing in this cluster, and what to do; status 1 where something fails."""
    from vlm_cli.doctor.command import examine_cluster

    run(
        examine_cluster(
            namespace=namespace,
            kubeconfig=kubeconfig,
            context=context,
            form=output,
            now=datetime.datetime.now(datetime.UTC).timestamp(),
            probe=probe,
        )
    )


def release_finalizers(
    name: Annotated[str | None, typer.Argument(help="A VLMService; without it, all.")] = None,
    namespace: Namespace = None,
    everywhere: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="Services of all namespaces.")
    ] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Let deleted services go when the operator is gone: without it nobody ends their drain."""
    from vlm_cli.release import release

    run(
        release(
            name,
            namespace=namespace,
            everywhere=everywhere,
            kubeconfig=kubeconfig,
            context=context,
        )
    )
