"""One encoder, prefill or decode process, from its first port to its last word.

open ports ─ load the model on a thread ─ work ─ SIGTERM: drain ─ exit 0 as soon as it is empty
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from vlm_worker.core.memory import MemoryBudget
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.core.sources import Sources
from vlm_worker.core.waves import AdmissionPolicy, AdmissionRules
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.media.pool import MediaObserver, MediaPool, MediaSettings
from vlm_worker.model.container import num_cpus
from vlm_worker.roles.decode import DecodeRole
from vlm_worker.roles.encoder import EncoderRole
from vlm_worker.roles.host import Host
from vlm_worker.roles.memory import RequestMemory
from vlm_worker.roles.offers import Life
from vlm_worker.roles.prefill import PrefillRole
from vlm_worker.serve.budget import (
    LARGE_SIDE,
    cold_cache_bytes,
    embedding_copies,
    request_memory,
)
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

MIN_DECODERS: Final = 2
MAX_DECODERS: Final = 16


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
    server.state.device = loaded.device
    if loaded.device == "cpu" and settings.identity.holds_gpus:
        logger.warning(
            "this container holds GPUs and computes on the CPU: use the CUDA image and check the "
            "node's driver",
            extra={"granted_gpus": settings.identity.granted_gpus},
        )
    budget = _budget(settings, loaded)
    host = Host(
        engine,
        life=Life(server.state.boot_id, server.state.pod_uid),
        embed_layout=loaded.runner.embed_layout,
        kv_layout=loaded.runner.kv_layout,
        sources=Sources(
            served_name=settings.served_name,
            compat=settings.compat,
            pod_ip=settings.identity.pod_ip,
            grpc_port=settings.grpc_port,
        ),
        delays=settings.delays,
        on_transfer=server.meters.observe,
        timers=settings.timers,
        transport=make_transport(settings, native_library=loaded.native_library),
        copier=copier_of(loaded.native_library),
        strict=settings.strict,
        memory=RequestMemory(budget, max_waiting=settings.queues.max_waiting_images),
    )
    logger.info("request memory", extra={"bytes": budget.total, **dataclasses.asdict(budget)})
    engine.start(asyncio.get_running_loop())
    async with contextlib.AsyncExitStack() as stack:
        encoder = None
        if Stage.ENCODER in settings.stages:
            pool = _media(loaded, settings, observer=server.meters)
            media = await stack.enter_async_context(pool)
            encoder = EncoderRole(host, media)
        yield Parts(
            engine,
            host,
            loaded.revision,
            max_model_len=max_model_len,
            num_embedding_copies=embedding_copies(settings, loaded.device),
            native_kernels=loaded.native_kernels,
            encoder=encoder,
            prefill=PrefillRole(host) if Stage.PREFILL in settings.stages else None,
            decode=DecodeRole(host) if Stage.DECODE in settings.stages else None,
        )


def _engine(settings: WorkerSettings, loaded: Loaded, *, max_model_len: int) -> Engine:
    queues = settings.queues
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
            embedding_cold_cache_bytes=cold_cache_bytes(settings, loaded.device),
            embedding_ttl_seconds=settings.embedding_ttl_seconds,
        )
        return Engine(loaded.runner, settings=bounds, positions=loaded.positions)
    except ValueError as error:
        raise ModelConfigError(
            f"{error} (--max-model-len, --max-batched-tokens, --max-requests, "
            "--kv-memory-bytes, --kv-memory-percent, --embedding-cache-bytes)"
        ) from error


def num_decoders(settings: WorkerSettings) -> int:
    """Decode children: as the flag says, else half as many as CPUs.

    `num_threads` is the pod's CPU limit if the operator knows one, else the container says it.
    """
    if settings.decode_processes:
        return settings.decode_processes
    count = settings.num_threads or num_cpus()
    return max(MIN_DECODERS, min(count // 2, MAX_DECODERS))


def _budget(settings: WorkerSettings, loaded: Loaded) -> MemoryBudget:
    try:
        return request_memory(
            settings,
            loaded.family,
            device=loaded.device,
            available_bytes=loaded.available_bytes,
        )
    except ValueError as error:
        raise ModelConfigError(f"--request-memory-bytes: {error}") from error


@contextlib.asynccontextmanager
async def _media(
    loaded: Loaded, settings: WorkerSettings, *, observer: MediaObserver
) -> AsyncIterator[MediaPool]:
    pool = MediaPool(
        loaded.family.processor,
        model_revision=loaded.revision,
        settings=MediaSettings(
            scaled_jpeg=settings.scaled_jpeg, num_children=num_decoders(settings)
        ),
        observer=observer,
        native_library=loaded.native_library,
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
