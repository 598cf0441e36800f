"""`vlm-worker serve MODEL`: every role in this process, behind the OpenAI API.

one engine ◀─ encoder, prefill, decode ◀─ gRPC on a free port of the loopback ◀─ gateway ◀─ client
                                  └────── tokens, past gRPC (server/local.py) ──────▲
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys

from vlm_worker.gateway.serve import Gateway, running
from vlm_worker.serve.gateway import with_model_dir
from vlm_worker.serve.memory import keep_what_is_loaded
from vlm_worker.serve.signals import StopSignals
from vlm_worker.serve.sources import fetch_model
from vlm_worker.serve.threads import result_unless
from vlm_worker.serve.worker import worker
from vlm_worker.settings import ModelSource, ServeSettings

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.02


def say(message: str) -> None:
    """One line of progress, for the person who started this."""
    print(f"vlm-worker: {message}", file=sys.stderr, flush=True)  # noqa: T201


def say_metrics(name: str, url: str) -> None:
    """Where one process, or one part of this one, has its metrics."""
    say(f"metrics of the {name}: {url}/metrics")


async def run_local(settings: ServeSettings) -> int:
    """Run until Ctrl-C; returns the exit code."""
    with StopSignals() as signals:
        stopping = asyncio.create_task(signals.stop.wait())
        model_dir = await result_unless(stopping, lambda: fetch_model(settings.worker.model, say))
        source = ModelSource(uri=str(model_dir), revision=settings.worker.model.revision)
        roles = dataclasses.replace(settings.worker, model=source, bind=LOOPBACK)
        async with worker(
            roles, stopping=stopping, progress=say, on_loaded=keep_what_is_loaded
        ) as server:
            address = f"{LOOPBACK}:{server.grpc_port}"
            front = dataclasses.replace(settings.gateway, workers=(address,))
            front = with_model_dir(front, model_dir)
            async with running(front, connect=server.connect) as gateway:
                announcing = asyncio.create_task(_announce(gateway, settings, server.http_port))
                failing = asyncio.create_task(server.failed())
                failing.add_done_callback(lambda _: signals.stop.set())
                await gateway.serve(signals.stop, notice_seconds=0.0)
                has_failed = failing.done()
                announcing.cancel()
                failing.cancel()
            if has_failed:
                say(f"stopped: {server.state.message}")
                return 1
            await server.drain()
        say("stopped")
    return 0


async def _announce(gateway: Gateway, settings: ServeSettings, worker_port: int) -> None:
    """Say where it is, once the gateway knows its worker."""
    while not gateway.service.registry.candidates():  # noqa: ASYNC110  it has no event for this
        await asyncio.sleep(POLL_SECONDS)
    say_metrics("gateway", gateway.admin_url)
    say_metrics("worker", f"http://{LOOPBACK}:{worker_port}")
    name = settings.gateway.served_name
    say(f"{name} is served at {gateway.url}/v1; Ctrl-C stops it")
