"""`vlm demo`: the whole line on this machine, from an empty folder to a true answer.

checks ─▶ control plane ─▶ nodes ─▶ model, operator, quickstart ─▶ Ready ─▶ port-forward ─▶ answer
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping

from rich.console import Console, RenderableType

from vlm_operator.local.demo.line import Demo, DemoOptions
from vlm_operator.local.demo.watch import Reporter
from vlm_operator.local.errors import LocalError

__all__ = ["DemoOptions", "main"]
INTERRUPTED = 130
Waterfall = Callable[[Mapping[str, float]], RenderableType]


def main(options: DemoOptions, *, waterfall: Waterfall) -> int:
    """Run the demo and return its exit status: 0 after a right answer.

    Args:
        options: What the user asked for.
        waterfall: Draws milliseconds by stage.
    """
    reporter = Reporter(Console(highlight=False, soft_wrap=True))
    demo = Demo(options, reporter=reporter, waterfall=waterfall)
    try:
        return asyncio.run(_until_signalled(demo))
    except LocalError as error:
        reporter.fail(error)
        return 1
    except KeyboardInterrupt:
        reporter.say("stopped")
        return 0 if demo.answered and not options.once else INTERRUPTED


async def _until_signalled(demo: Demo) -> int:
    """SIGTERM ends the demo as Ctrl-C does: everything that it started goes first."""
    running = asyncio.ensure_future(demo.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
