"""`vlm-worker serve MODEL`: every role in this process, and a gateway.

one engine ◀─ encoder, prefill, decode ◀─ gRPC on a free loopback port ◀─ gateway ◀─ client
                                  └────── tokens, not over gRPC (`LocalClient`) ────────▲
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys

from vlm_worker.gateway.gateway_server import Gateway, most_connections, running
from vlm_worker.gateway.grammar_process import CHILD_BYTES
from vlm_worker.gateway.memory import connection_bytes
from vlm_worker.gateway.pod_caches import CACHES_BYTES
from vlm_worker.serve.process import StopSignals, freeze_gc, result_unless
from vlm_worker.serve.sources import fetch_model
from vlm_worker.serve.worker import worker
from vlm_worker.server.worker_server import WorkerServer
from vlm_worker.settings import GatewaySettings, ModelSource, ServeSettings

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.02


def say(message: str) -> None:
    print(f"vlm-worker: {message}", file=sys.stderr, flush=True)  # noqa: T201


def say_metrics(name: str, url: str) -> None:
    """Print the address of the metrics of a process, or of a part of this one."""
    say(f"metrics of the {name}: {url}/metrics")


async def run_local(settings: ServeSettings) -> int:
    """Run until Ctrl-C; returns the exit code."""
    with StopSignals() as signals:
        stopping = asyncio.create_task(signals.stop.wait())
        model_dir = await result_unless(stopping, lambda: fetch_model(settings.worker.model, say))
        source = ModelSource(uri=str(model_dir), revision=settings.worker.model.revision)
        roles = dataclasses.replace(settings.worker, model=source, bind=LOOPBACK)
        async with worker(
            roles,
            stopping=stopping,
            progress=say,
            on_loaded=freeze_gc,
            gateway_bytes=gateway_bytes(settings.gateway),
        ) as server:
            workers = (f"{LOOPBACK}:{server.grpc_port}",)
            front = dataclasses.replace(
                settings.gateway,
                model=source,
                workers=workers,
                mark_history=settings.gateway.mark_history or settings.worker.kv_prune_text > 0,
            )
            async with running(front, connect=server.connect) as gateway:
                announcing = asyncio.create_task(_announce(gateway, settings, server.http_port))
                failing = asyncio.create_task(_failed(server, gateway, signals.stop))
                await gateway.serve(signals.stop, notice_seconds=0.0)
                announcing.cancel()
                failing.cancel()
            if (reason := gateway.context.failed) is not None:
                say(f"stopped: {reason}")
                return 1
            await server.drain()
        say("stopped")
    return 0


def gateway_bytes(settings: GatewaySettings) -> int:
    """Bytes that a gateway uses in a worker's process."""
    connections = connection_bytes(most_connections(settings), tls=settings.tls_dir is not None)
    return settings.memory_bytes + connections + CACHES_BYTES + CHILD_BYTES


async def _failed(server: WorkerServer, gateway: Gateway, stop: asyncio.Event) -> None:
    """If the worker fails, mark its gateway as failed too, and stop the process."""
    await server.failed()
    gateway.context.fail(server.state.message)
    stop.set()


async def _announce(gateway: Gateway, settings: ServeSettings, worker_port: int) -> None:
    """Print the address of the API once the gateway knows its worker."""
    while not gateway.context.registry.candidates():  # noqa: ASYNC110  it has no event to await
        await asyncio.sleep(POLL_SECONDS)
    say_metrics("gateway", gateway.admin_url)
    say_metrics("worker", f"http://{LOOPBACK}:{worker_port}")
    name = settings.gateway.served_name
    say(f"{name} is served at {gateway.url}/v1; Ctrl-C stops it")
