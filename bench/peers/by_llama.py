"""llama.cpp: `llama-server` with a slot for each request, asked over HTTP."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import serving

SLOTS, CONTEXT = 16, 1024
START_SECONDS = 60


class Server:
    """The process and its address."""

    def __init__(self, model_dir: Path) -> None:
        port, threads = _free_port(), str(os.cpu_count() or 1)
        self.url = f"http://127.0.0.1:{port}"
        command = [
            str(model_dir / "llama-server"), "-m", str(model_dir / "text.gguf"),
            "--mmproj", str(model_dir / "mmproj.gguf"), "-t", threads, "-tb", threads,
            "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-b", "2048",
            "-ub", str(serving.options()["ubatch_size"]), "-fa", "on",
            "--no-cache-prompt", "-cb", "--no-slots", "--no-webui",
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit("llama-server did not start")
            time.sleep(0.2)  # noqa: TID251  another process is polled
        self._marker = self._get("/props").get("media_marker", "<__media__>")
        self._pool = ThreadPoolExecutor(32)

    def run(self, calls: Sequence[dict[str, Any]]) -> int:
        """All at once; the number of tokens answered."""
        return sum(self._pool.map(self._answer, calls))

    def _answer(self, call: dict[str, Any]) -> int:
        prompt: Any = serving.prompt(call, self._marker)
        if call["image"]:
            data = base64.b64encode(Path(call["image"]).read_bytes()).decode()
            prompt = {"prompt_string": prompt, "multimodal_data": [data]}
        body = {
            "prompt": prompt,
            "n_predict": call["num_output"],
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"{self.url}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return int(json.load(reply)["tokens_predicted"])

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return dict(json.load(reply))

    def _is_healthy(self) -> bool:
        try:
            return bool(self._get("/health"))
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    server = Server(Path(sys.argv[1]))
    try:
        serving.serve(server.run)
    finally:
        server.process.terminate()
        server.process.wait(60)
