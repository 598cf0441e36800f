"""Runs one encoder, prefill or decode process, from opening its ports to its exit.

open ports ─ load the model on a thread ─ work ─ SIGTERM: drain ─ exit 0 as soon as it is empty
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from vlm_worker.attends import Attends
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.core.sources import Sources
from vlm_worker.engine.constraints import Constraints
from vlm_worker.engine.embedding_files import Directory, EmbeddingFiles
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.media.pool import MediaObserver, MediaPool, MediaSettings
from vlm_worker.model.cgroup import num_cpus
from vlm_worker.roles.attempt_registry import Incarnation
from vlm_worker.roles.context import RoleContext
from vlm_worker.roles.registry import build_roles
from vlm_worker.roles.request_memory import RequestMemory
from vlm_worker.serve.budget import MemoryPlan, cold_cache_bytes, embedding_copies, plan_memory
from vlm_worker.serve.loading import Loaded, Progress, load
from vlm_worker.serve.process import (
    StopSignals,
    freeze_gc,
    resident_bytes,
    result_unless,
    return_freed_memory,
)
from vlm_worker.server.components import WorkerComponents
from vlm_worker.server.state import Phase
from vlm_worker.server.worker_server import WorkerServer
from vlm_worker.settings import WorkerSettings
from vlm_worker.settings.options import values_of
from vlm_worker.transfer import nixl, shared_memory
from vlm_worker.transfer.transport import ByteStream, Transport
from vlm_worker.types import Stage
from vlm_worker.wire.buffers import Copier

logger = logging.getLogger(__name__)


async def run_worker(settings: WorkerSettings) -> int:
    """Run one worker until it gets a stop signal; returns the exit code."""
    with StopSignals() as signals:
        stopping = asyncio.create_task(signals.stop.wait())
        async with worker(settings, stopping=stopping, on_loaded=freeze_gc) as server:
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
    gateway_bytes: int = 0,
) -> AsyncIterator[WorkerServer]:
    """A worker that is ready. The end of the context closes it, drained or not.

    A gateway in the same process may use `gateway_bytes`, which are declared with the worker's.

    If `stopping` completes before the model is loaded, the process ends. `on_loaded` is called
    when the model is loaded, before any request arrives.

    Raises:
        OSError: a port is in use.
        WorkerError, ValueError: the model cannot be loaded with these settings.
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
        async with build_components(server, loaded, gateway_bytes=gateway_bytes) as components:
            on_loaded()
            await server.attach(components)
            server.keep(return_freed_memory, name="return freed memory")
            logger.info("ready", extra={**ports, "uptime": round(server.state.uptime_seconds, 2)})
            yield server
            await server.close()
    except BaseException as error:
        server.state.enter(Phase.FAILED, str(error))
        await server.close()
        raise


@contextlib.asynccontextmanager
async def build_components(
    server: WorkerServer, loaded: Loaded, *, gateway_bytes: int = 0
) -> AsyncIterator[WorkerComponents]:
    """Engine, context and roles of the loaded stages; the engine already runs."""
    settings = server.settings
    max_model_len = min(settings.max_model_len, loaded.max_positions)
    files = await asyncio.to_thread(open_embedding_files, settings, loaded)  # reads many files
    engine = _engine(settings, loaded, files, max_model_len=max_model_len)
    server.state.model = loaded.facts
    server.state.verification = loaded.verification
    server.state.device = loaded.device
    if loaded.device == "cpu" and settings.identity.holds_gpus:
        logger.warning(
            "this container holds GPUs and computes on the CPU: use the CUDA image and check the "
            "node's driver",
            extra={"granted_gpus": settings.identity.granted_gpus},
        )
    plan = _memory(settings, loaded, gateway_bytes)
    context = RoleContext(
        engine,
        incarnation=Incarnation(server.state.boot_id, server.state.pod_uid),
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
        copier=Copier(loaded.native_library),
        strict=settings.strict,
        identity=server.identity,
        memory=RequestMemory(plan.requests, max_waiting=settings.queues.max_waiting_images),
    )
    logger.info(
        "request memory",
        extra={"bytes": plan.requests.total, **dataclasses.asdict(plan.requests)},
    )
    declared = {f"{part}_bytes": count for part, count in plan.declared.by_part().items()}
    logger.info("declared memory", extra={"bytes": plan.declared.total, **declared})
    engine.start(asyncio.get_running_loop())
    async with contextlib.AsyncExitStack() as stack:
        media = None
        if Stage.ENCODER in settings.stages:
            pool = _media(loaded, settings, plan.num_decoders, observer=server.meters)
            media = await stack.enter_async_context(pool)
        yield WorkerComponents(
            engine,
            context,
            max_model_len=max_model_len,
            num_embedding_copies=embedding_copies(settings, loaded.device),
            native_kernels=loaded.native_kernels,
            declared=plan.declared,
            resident=resident_bytes,
            roles=build_roles(settings.stages, context, media),
        )


def open_embedding_files(settings: WorkerSettings, loaded: Loaded) -> EmbeddingFiles | None:
    """The directory of the encoder cache's disk tier, locked; None without one.

    Files of another model, version of Triptych, type of weights or device are deleted.

    Raises:
        ModelConfigError: it cannot be used, with the flag and the fix.
    """
    path = settings.encoder_cache.embedding_disk_dir
    if path is None:
        return None
    if Stage.ENCODER not in settings.stages:
        raise ModelConfigError(
            f"--embedding-disk-dir={path}: only a worker with the stage encoder stores embeddings: "
            "remove it, or add encoder to --stages"
        )
    layout = loaded.runner.embed_layout
    # each gives other rows of the same layout; the revision may be a tag that moves
    parts = {
        "revision": layout.model_revision,
        "content": loaded.content_revision(),
        "triptych": _version(),
        "weights": settings.compute.weights,
        **({"activations": loaded.activation_scales} if loaded.activation_scales else {}),
        "device": loaded.device,
    }
    source = " ".join(f"{name}={value}" for name, value in parts.items())
    try:
        directory = Directory(path)
        return EmbeddingFiles(directory, dataclasses.replace(layout, model_revision=source))
    except BlockingIOError as error:
        raise ModelConfigError(
            f"--embedding-disk-dir={path}: another process uses it: give each worker its own"
        ) from error
    except OSError as error:
        raise ModelConfigError(
            f"--embedding-disk-dir={path}: {error.strerror or error}: "
            "name a directory that this user may read and write"
        ) from error


def _version() -> str:
    try:
        return importlib.metadata.version("triptych")
    except importlib.metadata.PackageNotFoundError:  # it runs from its source
        return "source"


def _engine(
    settings: WorkerSettings,
    loaded: Loaded,
    files: EmbeddingFiles | None,
    *,
    max_model_len: int,
) -> Engine:
    if settings.kv_prune_text and (problem := loaded.runner.pruning_problem) is not None:
        raise ModelConfigError(
            f"--kv-prune-text={settings.kv_prune_text}: {problem}: remove the flag"
        )
    cold_bytes = cold_cache_bytes(settings, loaded.device)
    largest = loaded.family.processor.largest.num_tokens
    constraints = None
    if loaded.vocabulary is not None:
        cpus = settings.compute.num_threads or num_cpus()
        constraints = Constraints(loaded.vocabulary, num_cpus=cpus)
    try:
        bounds = EngineSettings(
            max_model_len=max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            max_num_seqs=settings.max_requests,
            max_num_batched_tokens=max(settings.max_batched_tokens, settings.max_requests),
            watermark_percent=settings.kv_reserve_percent,
            kv_visual_percent=settings.kv_visual_percent,
            kv_prune_text=settings.kv_prune_text,
            images_first=settings.max_lent_requests > 0,
            whole_images=loaded.family.spec.attends.keeps_images_whole,
            whole_prompts=loaded.family.spec.attends is Attends.PREFIX,
            strict=settings.strict,
            max_image_tokens=min(largest, max_model_len),
            **values_of(settings.queues),
            **values_of(settings.encoder_cache) | {"embedding_cold_cache_bytes": cold_bytes},
        )
        return Engine(
            loaded.runner,
            settings=bounds,
            positions=loaded.positions,
            files=files,
            constraints=constraints,
        )
    except ValueError as error:
        raise ModelConfigError(
            f"{error} (--max-model-len, --max-batched-tokens, --max-requests, "
            "--kv-memory-bytes, --kv-memory-percent, --embedding-cache-bytes)"
        ) from error


def _memory(settings: WorkerSettings, loaded: Loaded, gateway_bytes: int) -> MemoryPlan:
    resident = resident_bytes()
    try:
        return plan_memory(settings, loaded, resident_bytes=resident, gateway_bytes=gateway_bytes)
    except ValueError as error:
        raise ModelConfigError(str(error)) from error


@contextlib.asynccontextmanager
async def _media(
    loaded: Loaded, settings: WorkerSettings, num_children: int, *, observer: MediaObserver
) -> AsyncIterator[MediaPool]:
    pool = MediaPool(
        loaded.family.processor,
        model_revision=loaded.runner.embed_layout.model_revision,
        settings=MediaSettings(scaled_jpeg=settings.scaled_jpeg, num_children=num_children),
        observer=observer,
        native_library=loaded.native_library,
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def make_transport(settings: WorkerSettings, *, native_library: str | None = None) -> Transport:
    """The transport of a worker; `native_library` is the file of the C++ kernels.

    Raises:
        ValueError: it cannot work here, with the flag and the fix.
    """
    capacity = settings.exposed_memory_bytes
    if settings.transport == shared_memory.NAME:
        directory = settings.shared_memory_dir
        leftover = settings.timers.quarantine
        try:
            return shared_memory.SharedMemory(
                directory,
                capacity_bytes=capacity,
                leftover_seconds=leftover,
                native_library=native_library,
            )
        except OSError as error:
            raise ValueError(
                f"--shared-memory-dir={directory}: {error.strerror or error}"
            ) from error
    if settings.transport == nixl.NAME:
        try:
            return nixl.Nixl(capacity_bytes=capacity)
        except ImportError as error:
            raise ValueError(str(error)) from error
    return ByteStream()
