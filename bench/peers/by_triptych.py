"""Ours, as a user runs it: `vlm-worker serve`, asked over HTTP."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import serving

MODEL = "peer"
SERVED = re.compile(r" is served at (\S+);")
"""The last line before it answers; lines before it name URLs of metrics."""


class Server:
    """The process and its address."""

    def __init__(self, model_dir: str) -> None:
        command = [
            str(Path(sys.executable).with_name("vlm-worker")), "serve", model_dir,
            "--served-name", MODEL, "--port", "0",
            "--dtype", "bfloat16", "--max-model-len", "2048",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        served = (SERVED.search(line) for line in self.process.stderr)
        self.url = next(found[1] for found in served if found)
        self._pool = ThreadPoolExecutor(32)

    def run(self, calls: Sequence[dict[str, Any]]) -> int:
        """All at once; the number of tokens answered."""
        return sum(self._pool.map(self._answer, calls))

    def _answer(self, call: dict[str, Any]) -> int:
        content: list[dict[str, Any]] = [{"type": "text", "text": call["text"]}]
        if call["image"]:
            data = base64.b64encode(Path(call["image"]).read_bytes()).decode()
            url = {"url": f"data:image/png;base64,{data}"}
            content.insert(0, {"type": "image_url", "image_url": url})
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": call["num_output"],
            "ignore_eos": True,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self.url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return int(json.load(reply)["usage"]["completion_tokens"])


if __name__ == "__main__":
    server = Server(sys.argv[1])
    try:
        serving.serve(server.run)
    finally:
        server.process.terminate()
        server.process.wait(60)
