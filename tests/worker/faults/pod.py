"""A real worker or gateway process with marks on its stages, told over stdin what to do with them.

python -m worker.faults.pod encoder --model=... --runner=checksum      flags as of vlm-worker

stdin    {"hold": stage, "nth": n, "request": id}  {"go": true}
         {"scatter": [stages], "seconds": s}  {"pods": [...]}  {"step": seconds}
         {"report": "settled" | "now"}
stdout   {"ready": ports, "data": port, "boot": id}  {"done": result, "order": number}
         {"at": stage, "request": id}  {"cut": stage, "request": id}
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from worker.faults.marks import Marks, mark_gateway, mark_worker

from vlm_worker.gateway.discovery import KnownPod
from vlm_worker.gateway.gateway_server import Gateway, serve_gateway
from vlm_worker.serve.process import StopSignals, log_as_json
from vlm_worker.serve.worker import worker
from vlm_worker.server.metrics import stats_document
from vlm_worker.server.worker_server import WorkerServer
from vlm_worker.settings import GatewaySettings, WorkerSettings, parse


def say(line: dict[str, Any]) -> None:
    """One line to whoever started us."""
    os.write(1, json.dumps(line).encode() + b"\n")


async def orders(take: Any) -> None:
    """Hand over what comes over stdin, line by line."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for raw in reader:
        order = json.loads(raw)
        say({"done": take(order), "order": order.get("order")})


async def run_worker(settings: WorkerSettings) -> int:
    """As `vlm-worker ROLE`, marked."""
    marks = Marks(say)
    with StopSignals() as signals:
        stopping = asyncio.create_task(signals.stop.wait())
        async with worker(settings, stopping=stopping) as server:
            components = server._components
            assert components is not None
            mark_worker(marks, components)
            listening = asyncio.create_task(orders(lambda o: take_worker(marks, server, o)))
            boot = server.state.boot_id.hex()
            say({"ready": server.grpc_port, "data": server.data_port, "boot": boot})
            failing = asyncio.create_task(server.failed())
            await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not signals.stop.is_set():
                return 1
            await server.drain()
            listening.cancel()
    return 0


def take_worker(marks: Marks, server: WorkerServer, order: dict[str, Any]) -> Any:
    """Do what a worker is told."""
    components = server._components
    assert components is not None
    if "report" in order:
        collect(order)
        stats = stats_document(server.state, server._snapshot())
        return {
            **process_report(),
            "inflight": stats["inflight"],
            "kv": stats["kv"],
            "waiting": stats["queue"]["requests"],
            "leases": stats["leases"],
            "calls": components.context.num_inflight,
            "pinned": components.engine.stats().num_pinned_embeddings,
            "held_at_peers": components.context.peers.num_held,
            "computed": sum(marks.computed.values()),
            "computed_twice": [str(k) for k, n in marks.computed.items() if n > 1],
            "phase": stats["phase"],
            "num_requests": stats["counters"]["requests"],
        }
    if "step" in order:
        runner = components.engine._thread.state.sequences._runner
        runner.faults.step_seconds = order["step"]
    return take_marks(marks, order)


async def run_gateway(settings: GatewaySettings) -> int:
    """As `vlm-worker gateway`, marked."""
    marks = Marks(say)
    mark_gateway(marks)
    tasks = set()
    with StopSignals() as signals:

        def on_ready(gateway: Gateway) -> None:
            tasks.add(asyncio.create_task(orders(lambda o: take_gateway(marks, gateway, o))))
            say({"ready": gateway.url, "boot": ""})

        await serve_gateway(settings, stop=signals.stop, on_ready=on_ready)
        for task in tasks:
            task.cancel()
    return 0


def take_gateway(marks: Marks, gateway: Gateway, order: dict[str, Any]) -> Any:
    """Do what a gateway is told."""
    context = gateway.context
    if "pods" in order:
        context.registry.apply([KnownPod(**pod) for pod in order["pods"]])
    if "report" in order:
        collect(order)
        peers = context.registry.peers.values()
        return {
            **process_report(),
            "inflight": context.num_inflight,
            "waiting": context.retry_policy.request_limit.num_waiting,
            "calls": sum(peer.num_inflight for peer in peers) + len(context.registry._background),
            "boots": {c.name: c.boot_id.hex() for c in context.registry.candidates()},
        }
    return take_marks(marks, order)


def take_marks(marks: Marks, order: dict[str, Any]) -> Any:
    """What every pod can be told."""
    if "hold" in order:
        marks.hold(order["hold"], order["nth"], order["request"])
    if "go" in order:
        marks.go()
    if "scatter" in order:
        marks.scatter(order["scatter"], order["seconds"])
    return True


def collect(order: dict[str, Any]) -> None:
    """Garbage holds descriptors and memory; who only samples does not stop the world for it."""
    if order["report"] == "settled":
        gc.collect()


def open_files() -> list[str]:
    """What the descriptors are; of TCP, `tcp OURS>THEIRS` by their ports."""
    found = []
    ports = tcp_ports()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(link.readlink())
            found.append(ports.get(name, name))
    return sorted(found)


def tcp_ports() -> dict[str, str]:
    """Both ports of every connection over IPv4, by what its descriptor is called."""
    found = {}
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ours, theirs = (int(fields[at].rpartition(":")[2], 16) for at in (1, 2))
        found[f"socket:[{fields[9]}]"] = f"tcp {ours}>{theirs}"
    return found


def process_report() -> dict[str, Any]:
    """What any process can lose track of."""
    return {
        "tasks": len(asyncio.all_tasks()),
        "fds": len(files := open_files()),
        "files": files,
        "rss_kib": int(Path("/proc/self/statm").read_text().split()[1])
        * (resource.getpagesize() >> 10),
    }


def main() -> int:
    """Run one pod."""
    # until it listens for itself, as in vlm_worker.__main__
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    settings = parse(sys.argv[1:], {})
    log_as_json()
    if isinstance(settings, GatewaySettings):
        return asyncio.run(run_gateway(settings))
    assert isinstance(settings, WorkerSettings)
    return asyncio.run(run_worker(settings))


if __name__ == "__main__":
    sys.exit(main())
