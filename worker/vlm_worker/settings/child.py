"""Settings -> argv of the child processes of `serve --split`: the inverse of `parse`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.settings.values import GatewaySettings, WorkerSettings
from vlm_worker.types import Role


def worker_argv(settings: WorkerSettings, role: Role, *, bind: str, parent: int) -> list[str]:
    """Arguments of one role with its own stage, on free ports, that ends with its parent."""
    optional = {
        "--kv-memory-bytes": settings.kv_memory_bytes,
        "--kv-memory-percent": settings.kv_memory_percent,
        "--embedding-cold-cache-bytes": settings.embedding_cold_cache_bytes,
        "--request-memory-bytes": settings.request_memory_bytes,
    }
    return [
        role.value,
        *_common(settings, parent=parent),
        f"--bind={bind}",
        "--grpc-port=0",
        "--http-port=0",
        "--data-port=0",
        f"--dtype={settings.dtype}",
        f"--kv-dtype={settings.kv_dtype}",
        f"--device={settings.device}",
        f"--packed-weights={'auto' if settings.packed_weights else 'off'}",
        f"--weights={settings.weights}",
        f"--compile={'auto' if settings.compile else 'off'}",
        f"--jpeg-scaling={'dct' if settings.scaled_jpeg else 'exact'}",
        f"--kv-reserve-percent={settings.kv_reserve_percent}",
        f"--max-requests={settings.max_requests}",
        f"--max-batched-tokens={settings.max_batched_tokens}",
        *(
            f"--{name.replace('_', '-')}={value}"
            for name, value in dataclasses.asdict(settings.queues).items()
        ),
        f"--embedding-cache-bytes={settings.embedding_cache_bytes}",
        f"--embedding-ttl-seconds={settings.embedding_ttl_seconds}",
        f"--decode-processes={settings.decode_processes}",
        f"--threads={settings.num_threads}",
        f"--runner={settings.runner}",
        f"--transport={settings.transport}",
        f"--shared-memory-dir={settings.shared_memory_dir}",
        f"--exposed-memory-bytes={settings.exposed_memory_bytes}",
        *(["--strict"] if settings.strict else []),
        *(f"{flag}={value}" for flag, value in optional.items() if value is not None),
    ]


def gateway_argv(settings: GatewaySettings, *, workers: Iterable[str], parent: int) -> list[str]:
    """Arguments of the gateway of those workers, that ends with its parent."""
    return [
        Role.GATEWAY.value,
        *_common(settings, parent=parent),
        f"--bind={settings.bind}",
        f"--http-port={settings.http_port}",
        f"--admin-port={settings.admin_port}",
        f"--patience-seconds={settings.patience_seconds:g}",
        f"--max-waiting={settings.max_waiting}",
        f"--gateway-memory-bytes={settings.memory_bytes}",
        f"--max-connections={settings.max_connections}",
        f"--images-per-request={settings.images_per_request}",
        f"--client-priority={'any' if settings.any_priority else 'later'}",
        *(f"--worker={address}" for address in workers),
    ]


def _common(settings: WorkerSettings | GatewaySettings, *, parent: int) -> list[str]:
    model = settings.model
    cache = [f"--model-cache={model.cache}"] if model.cache is not None else []
    return [
        f"--model={model.uri}",
        f"--served-name={settings.served_name}",
        f"--model-revision={model.revision}",
        *cache,
        f"--block-size={settings.block_size}",
        f"--max-model-len={settings.max_model_len}",
        f"--drain-timeout-seconds={settings.drain_timeout_seconds}",
        f"--compat={settings.compat}",
        f"--exit-with={parent}",
        f"--timer-scale={settings.timers.lease / PRODUCTION.lease:g}",
        *(
            f"--inject-delay-ms={stage}={round(1000 * seconds)}"
            for stage, seconds in settings.delays.items()
        ),
    ]
