"""What `make demo` shows: a true answer about an image, where its time went, and a clean end."""

import asyncio
import base64
import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import openai
import pytest
from PIL import Image, ImageDraw

from vlm_local.subprocesses import tied

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]
ROOT = Path(__file__).parents[1]
ProcessesOf = Callable[[Path], list[str]]


@contextlib.asynccontextmanager
async def demo(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`vlm demo` with its temporary files under `folder`."""
    main = "from vlm_cli import main; main()"
    process = await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-P", "-c", main, "demo", *arguments]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "160"},  # noqa: TID251
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def read_until(
    process: asyncio.subprocess.Process, pattern: str
) -> tuple[str, re.Match[str]]:
    """All output up to the line that has `pattern`."""
    assert process.stdout is not None
    said = ""
    async for line in process.stdout:
        print(line.decode(), end="")
        said += line.decode()
        if found := re.search(pattern, line.decode()):
            return said, found
    raise AssertionError(f"the demo ended without {pattern!r}:\n{said}")


async def test_the_demo_answers_stays_up_for_more_and_leaves_nothing(
    tmp_path: Path, processes_of: ProcessesOf
):
    async with demo(tmp_path) as process:
        said, found = await read_until(process, r"The API is (http://127.0.0.1:\d+/v1)")
        assert re.search(r"What is to the right of the circle\?\s+blue triangle\n", said)
        assert _stages_add_up(said)
        assert re.search(r"shapes +True +\S+ +1/1 +1/1 +1/1 ", said)
        _, exported = await read_until(process, r"export KUBECONFIG=(\S+)")
        assert exported[1].startswith(str(tmp_path))
        assert await _ask(found[1], "What color is the star?", _star("purple")) == "purple"
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    assert processes_of(tmp_path) == []
    assert not any(tmp_path.iterdir())  # noqa: ASYNC240


async def test_nothing_outlives_a_demo_that_is_killed(tmp_path: Path, processes_of: ProcessesOf):
    async with demo(tmp_path) as process:
        await read_until(process, r"nodes: cpu-large")
        assert len(processes_of(tmp_path)) >= 5
        process.kill()
        await process.wait()
        async with asyncio.timeout(10):
            while processes_of(tmp_path):  # noqa: ASYNC110 - the kernel announces nothing
                await asyncio.sleep(0.05)


def _stages_add_up(said: str) -> bool:
    """The rows between STAGE and TTFT are the TTFT, but for their rounding to 0.1 ms."""
    table = said[said.index("STAGE") :]
    rows = {
        name: float(spent) for name, spent in re.findall(r"^(\w+) +([\d.]+) ", table, re.MULTILINE)
    }
    total = rows.pop("TTFT")
    return {"encode", "prefill"} <= set(rows) and abs(sum(rows.values()) - total) <= 0.05 * 10


def _star(color: str) -> Image.Image:
    """A five-pointed star as a person would draw it."""
    image = Image.new("RGB", (168, 168), "white")
    points = "84,14 101,62 152,62 111,93 126,142 84,112 42,142 57,93 16,62 67,62"
    ImageDraw.Draw(image).polygon(
        [tuple(map(float, point.split(","))) for point in points.split()],
        fill={"purple": (140, 60, 180)}[color],
    )
    return image


async def _ask(base_url: str, question: str, image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        answer = await client.chat.completions.create(
            model="shapes",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": question},
                    ],
                }
            ],
            temperature=0,
            max_tokens=16,
        )
    return (answer.choices[0].message.content or "").strip()
