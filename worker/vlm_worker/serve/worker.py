"""One encoder, prefill or decode process, from its first port to its last word.

open ports ─ load the model on a thread ─ work ─ SIGTERM: drain ─ exit 0 as soon as it is empty
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.core.waves import AdmissionPolicy, AdmissionRules
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.media.pool import MediaObserver, MediaPool, MediaSettings
from vlm_worker.roles.decode import DecodeRole
from vlm_worker.roles.encoder import EncoderRole
from vlm_worker.roles.host import Host
from vlm_worker.roles.offers import Life
from vlm_worker.roles.prefill import PrefillRole
from vlm_worker.serve.loading import Loaded, Progress, load
from vlm_worker.serve.memory import keep_what_is_loaded
from vlm_worker.serve.signals import StopSignals
from vlm_worker.serve.threads import result_unless
from vlm_worker.serve.transports import make_transport
from vlm_worker.server.parts import Parts
from vlm_worker.server.state import Phase
from vlm_worker.server.worker import WorkerServer
from vlm_worker.settings import WorkerSettings
from vlm_worker.types import Stage
from vlm_worker.wire.copying import copier_of

logger = logging.getLogger(__name__)

COLD_CACHE_BYTES: Final = 1 << 30
"""Of the host, for embeddings that a GPU has no room for, where nobody says how many."""

LARGE_SIDE: Final = 1 << 14
"""Pixels: no picture has more visual tokens than a square one of this size."""


async def run_worker(settings: WorkerSettings) -> int:
    """Run one worker until it is told to stop; returns the exit code."""
    with StopSignals() as signals:
        stopping = asyncio.create_task(signals.stop.wait())
        async with worker(settings, stopping=stopping, on_loaded=keep_what_is_loaded) as server:
            failing = asyncio.create_task(server.failed())
            await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
            failing.cancel()
            if not signals.stop.is_set():
                return 1
            await server.drain()
    logger.info("stopped")
    return 0


@contextlib.asynccontextmanager
async def worker(
    settings: WorkerSettings,
    *,
    stopping: asyncio.Future[Any],
    progress: Progress = lambda _: None,
    on_loaded: Callable[[], None] = lambda: None,
) -> AsyncIterator[WorkerServer]:
    """A worker that is ready; it is closed at the end, drained or not.

    Where `stopping` is done before the model is loaded, the process ends here. `on_loaded` is
    called when it is, before anything is asked.

    Raises:
        OSError: a port is taken.
        WorkerError, ValueError: the model cannot be loaded under these settings.
    """
    server = WorkerServer(settings)
    try:
        await server.open()
        ports = {
            "grpc_port": server.grpc_port,
            "http_port": server.http_port,
            "data_port": server.data_port,
        }
        logger.info("listening", extra=ports)

        def report(message: str) -> None:
            server.state.message = message
            progress(message)

        loaded = await result_unless(stopping, lambda: load(settings, report))
        async with assembled(server, loaded) as parts:
            on_loaded()
            await server.attach(parts)
            logger.info("ready", extra={**ports, "uptime": round(server.state.uptime_seconds, 2)})
            yield server
            await server.close()
    except BaseException as error:
        server.state.enter(Phase.FAILED, str(error))
        await server.close()
        raise


@contextlib.asynccontextmanager
async def assembled(server: WorkerServer, loaded: Loaded) -> AsyncIterator[Parts]:
    """Engine, host and roles of the stages that are loaded; the engine runs already."""
    settings = server.settings
    max_model_len = min(settings.max_model_len, loaded.max_positions)
    engine = _engine(settings, loaded, max_model_len=max_model_len)
    server.state.model = loaded.facts
    host = Host(
        engine,
        life=Life(server.state.boot_id, server.state.pod_uid),
        embed_layout=loaded.runner.embed_layout,
        kv_layout=loaded.runner.kv_layout,
        delays=settings.delays,
        on_transfer=server.meters.observe,
        timers=settings.timers,
        transport=make_transport(settings, native_library=loaded.native_library),
        copier=copier_of(loaded.native_library),
        strict=settings.strict,
    )
    engine.start(asyncio.get_running_loop())
    async with contextlib.AsyncExitStack() as stack:
        encoder = None
        if Stage.ENCODER in settings.stages:
            pool = _media(loaded, scaled_jpeg=settings.scaled_jpeg, observer=server.meters)
            media = await stack.enter_async_context(pool)
            encoder = EncoderRole(host, media)
        yield Parts(
            engine,
            host,
            loaded.revision,
            max_model_len=max_model_len,
            encoder=encoder,
            prefill=PrefillRole(host) if Stage.PREFILL in settings.stages else None,
            decode=DecodeRole(host) if Stage.DECODE in settings.stages else None,
        )


def _engine(settings: WorkerSettings, loaded: Loaded, *, max_model_len: int) -> Engine:
    queues = settings.queues
    cold_bytes = settings.embedding_cold_cache_bytes
    if cold_bytes is None:
        cold_bytes = 0 if loaded.device == "cpu" else COLD_CACHE_BYTES
    largest = loaded.family.geometry(LARGE_SIDE, LARGE_SIDE).num_tokens
    try:
        bounds = EngineSettings(
            max_model_len=max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            max_num_seqs=settings.max_requests,
            max_num_batched_tokens=max(settings.max_batched_tokens, settings.max_requests),
            watermark_percent=settings.kv_reserve_percent,
            whole_images=loaded.family.spec.bidirectional_spans,
            strict=settings.strict,
            max_waiting=queues.max_waiting,
            max_waiting_tokens=queues.max_waiting_tokens,
            max_waiting_images=queues.max_waiting_images,
            max_waiting_pixels=queues.max_waiting_pixels,
            admission=AdmissionRules(
                policy=AdmissionPolicy(queues.admission_policy),
                max_text=queues.max_wave_text,
                max_vision=queues.max_wave_vision,
                ageing_seconds=queues.ageing_seconds,
            ),
            long_prefill_tokens=queues.long_prefill_tokens,
            target_step_seconds=queues.target_step_ms / 1000 or None,
            max_image_tokens=min(largest, max_model_len),
            embedding_cache_bytes=settings.embedding_cache_bytes,
            embedding_cold_cache_bytes=cold_bytes,
            embedding_ttl_seconds=settings.embedding_ttl_seconds,
        )
        return Engine(loaded.runner, settings=bounds, positions=loaded.positions)
    except ValueError as error:
        raise ModelConfigError(
            f"{error} (--max-model-len, --max-batched-tokens, --max-requests, "
            "--kv-memory-bytes, --kv-memory-percent, --embedding-cache-bytes)"
        ) from error


@contextlib.asynccontextmanager
async def _media(
    loaded: Loaded, *, scaled_jpeg: bool, observer: MediaObserver
) -> AsyncIterator[MediaPool]:
    pool = MediaPool(
        loaded.family.processor,
        model_revision=loaded.revision,
        settings=MediaSettings(scaled_jpeg=scaled_jpeg),
        observer=observer,
        native_library=loaded.native_library,
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
