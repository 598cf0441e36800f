"""The agent as a process: `python -m vlm_operator.local.agent CONFIG.json`."""

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from .agent import Agent, AgentConfig


async def run(config: AgentConfig) -> None:
    """Run until SIGTERM or SIGINT."""
    running = asyncio.ensure_future(Agent(config).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(run(AgentConfig.read(Path(sys.argv[1]))))
