"""`vlm-worker serve`: a true answer about an image from one command, and nothing left after it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from PIL import Image, ImageDraw

from vlm_local.subprocesses import tied

MODEL = Path(__file__).parents[3] / "examples/shapes/model"
START_SECONDS = 60.0
STOP_SECONDS = 30.0


@contextlib.asynccontextmanager
async def served(*flags: str, model: Path = MODEL) -> AsyncIterator[tuple[Process, str, list[str]]]:
    """The process, the API's URL, and what it told the person who started it."""
    command = (
        sys.executable, "-m", "vlm_worker", "serve", str(model), "--served-name=shapes",
        "--port=0", "--max-model-len=512", *flags,
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(*tied(command), stderr=PIPE)
    told: list[str] = []
    try:
        async with asyncio.timeout(START_SECONDS):
            url = await _url(process, told)
        yield process, url, told
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]


async def _url(process: Process, told: list[str]) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        told.append(line.decode().strip())
        if found := re.search(r"is served at (\S+);", told[-1]):
            return found[1]
    raise AssertionError(f"it ended without a URL: {told}")


async def metrics_of(told: list[str]) -> dict[str, str]:
    """The metrics behind every address that the start named, by what they are of."""
    named = re.findall(r"metrics of the (\w+): (\S+)", "\n".join(told))
    async with httpx.AsyncClient(timeout=30) as client:
        return {name: (await client.get(url)).text for name, url in named}


async def ask_about_a_red_circle(url: str) -> str | None:
    image = Image.new("RGB", (112, 112), "white")
    ImageDraw.Draw(image).ellipse((30, 30, 82, 82), fill="red")
    out = io.BytesIO()
    image.save(out, "PNG")
    data = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="shapes",
            temperature=0,
            max_tokens=8,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": data}},
                        {"type": "text", "text": "What color is the circle?"},
                    ],
                }
            ],
        )
    return answer.choices[0].message.content


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return set()
    return {int(c) for c in children}.union(*(descendants(int(c)) for c in children))


async def until_gone(pids: set[int]) -> None:
    async with asyncio.timeout(STOP_SECONDS):
        while any(_runs(pid) for pid in pids):  # noqa: ASYNC110  they are not ours to wait for
            await asyncio.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize("flags", [(), ("--split",)], ids=["one process", "a process per role"])
async def test_it_answers_about_an_image_and_ctrl_c_leaves_nothing(flags: tuple[str, ...]) -> None:
    async with served(*flags) as (process, url, told):
        assert await ask_about_a_red_circle(url) == "red"
        metrics = await metrics_of(told)
        assert "triptych_ttft_seconds_count" in metrics.pop("gateway")
        assert metrics.keys() == ({"encoder", "prefill", "decode"} if flags else {"worker"})
        assert all("triptych_heartbeat_timestamp_seconds" in text for text in metrics.values())
        below = descendants(process.pid)
        assert below, "the media pool at least has processes of its own"
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(STOP_SECONDS):
            assert await process.wait() == 0
        await until_gone(below)
        assert any("loading" in line or "starting" in line for line in told), told


async def test_children_end_with_a_parent_that_is_killed() -> None:
    async with served("--split") as (process, _, _):
        below = descendants(process.pid)
        assert len(below) >= 4
        process.kill()
        await process.wait()
        await until_gone(below)
