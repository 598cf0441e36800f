"""Start a command and tell which of its ports answer: run beside it, in its network namespace.

stdin: {"argv", "env", "ready", "probes": [[kind, host, port], …]}     stdout: {probe: answer}
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

READY_SECONDS = 60
PROBE_SECONDS = 30


def main() -> None:
    asked = json.load(sys.stdin)
    process = subprocess.Popen(
        asked["argv"], env=asked["env"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _await(process, asked["ready"])
        answers = {f"{kind} {host} {port}": _probe(kind, host, port)
                   for kind, host, port in asked["probes"]}  # fmt: skip
        print(json.dumps({"uid": os.getuid(), "answers": answers}))
    finally:
        process.kill()
        process.wait()


def _await(process: subprocess.Popen[bytes], message: str) -> None:
    assert process.stderr is not None
    said, deadline = b"", time.monotonic() + READY_SECONDS
    while select.select([process.stderr], [], [], max(0, deadline - time.monotonic()))[0]:
        chunk = os.read(process.stderr.fileno(), 1 << 16)
        said += chunk
        if f'"message": "{message}"'.encode() in said:
            return
        if not chunk:
            break
    sys.exit(f"it did not say {message!r}: {said.decode()}")


def _probe(kind: str, host: str, port: int) -> Any:
    named = f"[{host}]" if ":" in host else host
    try:
        if kind == "grpc":
            with grpc.insecure_channel(f"{named}:{port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
            return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        if kind == "tcp":
            socket.create_connection((host, port), PROBE_SECONDS).close()
            return "accepted"
        with urllib.request.urlopen(f"http://{named}:{port}{kind}", timeout=PROBE_SECONDS) as reply:
            return reply.status
    except (OSError, grpc.RpcError) as error:
        return str(error)


if __name__ == "__main__":
    main()
