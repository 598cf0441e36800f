"""The agent as a process: `python -m vlm_local.agent CONFIG.json`."""

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from .agent import Agent, AgentConfig

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class Formatter(logging.Formatter):
    """Time, level, logger, message, the fields of `extra`, and the traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        extra = (f"{name}={value}" for name, value in vars(record).items() if name not in _STANDARD)
        return " ".join([super().formatMessage(record), *extra])


async def run(config: AgentConfig) -> None:
    """Run until SIGTERM or SIGINT."""
    running = asyncio.ensure_future(Agent(config).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    asyncio.run(run(AgentConfig.read(Path(sys.argv[1]))))
