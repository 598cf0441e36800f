"""Runs the gateway process: fetches the model's small files, then starts the gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging

from vlm_worker.gateway.gateway_server import Gateway, most_connections, serve_gateway
from vlm_worker.gateway.grammar_process import CHILD_BYTES
from vlm_worker.gateway.memory import declare
from vlm_worker.gateway.pod_caches import CACHES_BYTES
from vlm_worker.model.cgroup import memory_limit_bytes
from vlm_worker.serve.process import (
    KEPT_BYTES,
    MESSAGE_BYTES,
    StopSignals,
    freeze_gc,
    resident_bytes,
    result_unless,
    return_freed_memory,
)
from vlm_worker.serve.sources import GATEWAY_PATTERNS, fetch_model
from vlm_worker.settings import GatewaySettings, ModelSource
from vlm_worker.supervision import AtEnd

logger = logging.getLogger(__name__)


async def run_gateway(settings: GatewaySettings) -> int:
    """Run one gateway until it gets a stop signal; returns the exit code."""
    with StopSignals() as signals:
        stopping = asyncio.create_task(signals.stop.wait())
        model_dir = await result_unless(
            stopping, lambda: fetch_model(settings.model, logger.info, patterns=GATEWAY_PATTERNS)
        )
        model = ModelSource(uri=str(model_dir), revision=settings.model.revision)
        await serve_gateway(
            dataclasses.replace(settings, model=model), stop=signals.stop, on_ready=_declare_memory
        )
        stopping.cancel()
    return 0


def _declare_memory(gateway: Gateway) -> None:
    """Declare the process's memory after loading, and return freed memory from then on."""
    freeze_gc()
    context = gateway.context
    limit = memory_limit_bytes()
    declared = declare(
        context.settings.memory_bytes,
        most_connections(context.settings),
        tls=context.settings.tls_dir is not None,
        resident_bytes=resident_bytes(),
        kept_bytes=KEPT_BYTES + MESSAGE_BYTES + CACHES_BYTES + CHILD_BYTES,
        limit_bytes=limit,
    )
    context.declare(declared, resident_bytes)
    # rarely: streams wait while malloc trims
    return_memory = functools.partial(return_freed_memory, KEPT_BYTES)
    context.tasks.start(return_memory, name="freed memory", at_end=AtEnd.RETURN)
    parts = {f"{part}_bytes": count for part, count in declared.by_part().items() if count}
    logger.info("declared memory", extra={"bytes": declared.total, **parts})
    if limit is not None and declared.total > limit:
        logger.warning(
            "this gateway may take more than the container's memory limit: raise the limit, or "
            "lower --max-connections",
            extra={"bytes": declared.total, "limit_bytes": limit},
        )
