"""A container's process is held until the agent has a handle, however soon it ends."""

import asyncio
from pathlib import Path

import pytest

from vlm_local.agent.logs import ContainerLog
from vlm_local.agent.process import Process, ProcessSpec, StartFailedError

AT_ONCE = 16  # enough starts at once that most of them wait for the agent


def spec(folder: Path, *argv: str) -> ProcessSpec:
    return ProcessSpec(argv, {"PATH": "/usr/bin:/bin"}, "/", folder / "stage")


async def lived(folder: Path, *argv: str) -> tuple[int, str]:
    """Start a program and await its end; return its exit code and output."""
    log = ContainerLog(folder / "log")
    process = await Process.start(spec(folder, *argv), log)
    try:
        return await process.wait(), log.last_lines(10)
    finally:
        process.close()


async def test_programs_that_end_before_the_agent_looks_are_awaited_like_others(tmp_path: Path):
    ended = await asyncio.gather(
        *(lived(tmp_path / str(number), "sh", "-c", "echo x; exit 3") for number in range(AT_ONCE))
    )
    assert ended == [(3, "x\n")] * AT_ONCE


async def test_a_program_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(StartFailedError, match="No such file"):
        await lived(tmp_path, "no-such-program")
