"""Prints how many modules of vlm_worker run for one image request until its first token.

A gateway and an encoder, a prefill and a decode worker run in this process with the model `shapes`
(tests/worker/gateway/stack.py). The first request warms them up. The second request, with another
image, is traced in all threads from the call of the client to the first event with text. A module
counts if a line of it runs in that time. Background tasks (heartbeats, polls of load) count too;
the processes that decode images do not. `--list` prints the modules.
"""

import asyncio
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PRODUCT = str(ROOT / "worker" / "vlm_worker") + "/"
sys.path.insert(0, str(ROOT / "tests"))


class Recorder:
    """A trace function for all threads that collects the product's files while `recording`."""

    def __init__(self) -> None:
        self.recording = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, *_: object) -> Any:
        """Trace the lines of product code and of nothing else."""
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        if self.recording:
            self.files.add(frame.f_code.co_filename)
        return self


async def ask(url: str, image: bytes) -> None:
    """Ask about an image; returns when the first text has come."""
    import httpx
    from worker.gateway.image_files import ask as message

    body = {"model": "shapes", "messages": [message(image, "What is this?")], "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, timeout=300) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if '"content":"' in line.replace(" ", ""):
                return
        raise RuntimeError("the answer ended without text")


async def traced_files(recorder: Recorder) -> set[str]:
    """The product's files that the traced request ran."""
    from worker.gateway.image_files import png
    from worker.gateway.stack import EPD, stack

    async with stack(*EPD, runner="model") as served:
        await ask(served.url, png((200, 30, 30)))
        await served.until_idle()
        recorder.recording = True
        await ask(served.url, png((30, 30, 200)))
        recorder.recording = False
        return recorder.files


def main() -> int:
    """Print the counts; returns the exit status."""
    recorder = Recorder()
    threading.settrace(recorder)
    sys.settrace(recorder)
    files = sorted(name.removeprefix(PRODUCT) for name in asyncio.run(traced_files(recorder)))
    sys.settrace(None)
    files = [name for name in files if not name.startswith("pb/")]
    packages = Counter(name.split("/")[0] if "/" in name else "(root)" for name in files)
    for package, count in sorted(packages.items()):
        print(f"{count:4d} {package}")
    print(f"{len(files):4d} modules of vlm_worker run for one image request until its first token")
    if "--list" in sys.argv:
        print("\n".join(files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
