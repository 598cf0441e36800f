"""The gateway's process: the model's small files first, then the gateway itself."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path

from vlm_worker.gateway.serve import serve_gateway
from vlm_worker.serve.memory import keep_what_is_loaded
from vlm_worker.serve.signals import StopSignals
from vlm_worker.serve.sources import GATEWAY_PATTERNS, fetch_model
from vlm_worker.serve.threads import result_unless
from vlm_worker.settings import GatewaySettings, ModelSource

logger = logging.getLogger(__name__)


async def run_gateway(settings: GatewaySettings) -> int:
    """Run one gateway until it is told to stop; returns the exit code."""
    with StopSignals() as signals:
        stopping = asyncio.create_task(signals.stop.wait())
        model_dir = await result_unless(
            stopping, lambda: fetch_model(settings.model, _log, patterns=GATEWAY_PATTERNS)
        )
        await serve_gateway(
            with_model_dir(settings, model_dir),
            stop=signals.stop,
            on_ready=lambda _: keep_what_is_loaded(),
        )
        stopping.cancel()
    return 0


def with_model_dir(settings: GatewaySettings, model_dir: Path) -> GatewaySettings:
    """The settings with the model where its files are now."""
    model = ModelSource(uri=str(model_dir), revision=settings.model.revision)
    return dataclasses.replace(settings, model=model)


def _log(message: str) -> None:
    logger.info(message)
