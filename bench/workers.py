"""Starts workers as pods do: one process each, ready when its log says so."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def worker(
    model_dir: Path, stages: str, *flags: str, under: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A starting worker process and its address; it ends with the context.

    Args:
        model_dir: what it serves, as `m`.
        stages: with commas between; the last one is its role.
        flags: further ones.
        under: a command that the worker's is given to, as `taskset` takes it.
    """
    port = free_port()
    command = [
        *under, sys.executable, "-m", "vlm_worker", stages.rpartition(",")[2],
        f"--model={model_dir}", "--served-name=m", f"--stages={stages}", "--bind=127.0.0.1",
        f"--grpc-port={port}", f"--http-port={free_port()}", "--block-size=64", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT / "worker", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process, f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


@contextlib.contextmanager
def running(model_dir: Path, stages: str, *flags: str, under: Sequence[str] = ()) -> Iterator[str]:
    """The address of a worker that is ready; arguments as of `worker`."""
    with worker(model_dir, stages, *flags, under=under) as (process, address):
        assert process.stdout is not None
        if not any(message_of(line) == "ready" for line in process.stdout):
            raise SystemExit(f"the worker of {stages} ended with {process.wait()}")
        yield address


def message_of(line: str) -> str | None:
    """The message of a log line."""
    return json.loads(line).get("message") if line.startswith("{") else None


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
