"""The command `vlm demo`, which entry-point group `vlm.commands` adds to `vlm`."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_cli.output import CliError
from vlm_local.errors import LocalError

if TYPE_CHECKING:
    from vlm_local.demo.line import Demo, DemoOptions

INTERRUPTED = 130


def demo(
    once: Annotated[bool, typer.Option("--once", help="Exit after the answer.")] = False,
    image: Annotated[
        Path | None, typer.Option("--image", metavar="FILE", help="Your own image.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Your own question.")] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A cluster that exists; else one is made.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Of the API on 127.0.0.1; 8000 if it is free, else any."
        ),
    ] = None,
) -> None:
    """Start a cluster on this machine, apply the quickstart and ask about an image."""
    from vlm_local.demo.line import DemoOptions

    options = DemoOptions(
        once=once, image=image, question=question, port=port, kubeconfig=kubeconfig
    )
    raise typer.Exit(_run(options))


def _run(options: DemoOptions) -> int:
    """Run the demo and return its exit status: 0 after a correct answer."""
    from rich.console import Console

    from vlm_local.demo.line import Demo
    from vlm_local.demo.watch import Reporter

    reporter = Reporter(Console(highlight=False, soft_wrap=True))
    demo = Demo(options, reporter=reporter)
    try:
        return asyncio.run(_until_signalled(demo))
    except (LocalError, CliError) as error:
        reporter.fail(error)
        return 1
    except KeyboardInterrupt:
        reporter.say("stopped")
        return 0 if demo.answered and not options.once else INTERRUPTED


async def _until_signalled(demo: Demo) -> int:
    """Run the demo; on SIGTERM, cancel it, which stops the processes that it started."""
    running = asyncio.ensure_future(demo.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
