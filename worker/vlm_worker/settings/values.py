"""The settings of each command, as frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.types import Role, Stage

HF_PREFIX = "hf://"
MAX_PORT: Final = 65535
DEFAULT_PATIENCE_SECONDS: Final = 20.0
"""If the only pod of a pool is killed and its model is small, a new pod is ready after 11 to 12 s.
Client timeouts are usually 60 s or more."""
MAX_IMAGES: Final = 64
"""Maximum images of a request: as many as a worker accepts in one call."""
LEAST_MEMORY_BYTES: Final = 128 << 20
"""Minimum memory of a gateway: two bodies of the largest size, of two tenants, each with a copy."""
DEFAULT_SHARED_MEMORY_DIR = Path("/dev/shm")  # noqa: S108  files in it have random names


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """The identity of this process in its cluster, from the downward API; empty outside of one.

    `granted_gpus` is what the device plugin gave the container (NVIDIA_VISIBLE_DEVICES).
    """

    pod_name: str = ""
    pod_uid: str = ""
    pod_ip: str = ""
    namespace: str = ""
    node_name: str = ""
    service: str = ""
    variant: str = ""
    revision: str = ""
    granted_gpus: str = ""

    @property
    def holds_gpus(self) -> bool:
        """Whether the container was given GPUs."""
        return self.granted_gpus not in ("", "none", "void")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """The location of the model.

    Attributes:
        uri: a directory, or `hf://org/name`.
        revision: commit of an `hf://` model; for a directory, the publisher's name for it.
        cache: directory into which `hf://` models are downloaded; None is huggingface_hub's own.
    """

    uri: str
    revision: str = ""
    cache: Path | None = None

    @property
    def repository(self) -> str | None:
        """`org/name` of an `hf://` source; None for a directory."""
        return self.uri.removeprefix(HF_PREFIX) if self.uri.startswith(HF_PREFIX) else None


@dataclasses.dataclass(frozen=True, slots=True)
class QueueSettings:
    """How a worker orders and limits its queues; each field has a flag of the same name.

    Attributes:
        admission_policy: `fcfs` or `dual_queue` (docs/decisions/0009-first-come-first-served.md).
        max_round_text, max_round_vision: sequences of a lane that one step of `dual_queue` admits.
        ageing_seconds: waiting time after which a sequence goes before all that waited less.
        max_waiting, max_waiting_tokens: limits of the prefill queue.
        max_waiting_images, max_waiting_pixels: limits of the encoder queue.
        long_prefill_tokens: tokens of one prompt in a step while others can use the rest.
        target_step_ms: target step time, from which the number of running sequences follows; 0
            sets no limit.
    """

    admission_policy: str = "fcfs"
    max_round_text: int = 32
    max_round_vision: int = 8
    ageing_seconds: float = 3.0
    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 20
    max_waiting_images: int = 256
    max_waiting_pixels: int = 1 << 26
    long_prefill_tokens: int = 1024
    target_step_ms: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One encoder, prefill or decode process. A port of 0 selects any free one.

    If `announced_data_port` is set, consumers reach `data_port` there.
    `kv_memory_bytes` overrides `kv_memory_percent`; with neither, the runner chooses. `runner`
    `checksum` replaces the model by arithmetic, for fault tests. With `compile`, layers that torch
    computes on a GPU are compiled at start. With `scaled_jpeg`, a JPEG is decoded no larger than
    the model needs it; all workers of a service must agree. `delays` holds seconds by stage.
    `request_memory_bytes` limits what requests hold besides weights and KV (None: the sum of the
    parts' limits). `decode_processes` decode images; 0 derives the number from the CPUs.
    `embedding_cache_bytes` is the hot tier on the device, `embedding_cold_cache_bytes` the cold
    tier on the host (None: it depends on the device). `transport` moves bytes between workers that
    both have it; `shared_memory_dir` is its directory for shared memory. Workers expose at most
    `exposed_memory_bytes` at a time. With `strict`, an accounting mismatch ends the process instead
    of being counted. `timers` has all waits for peers except `drain_timeout_seconds`. The process
    ends with the process `parent`, if `serve --split` started it.
    """

    role: Role
    stages: frozenset[Stage]
    model: ModelSource
    served_name: str
    bind: str = "::"
    grpc_port: int = 9000
    http_port: int = 9001
    data_port: int = 9002
    announced_data_port: int | None = None
    block_size: int = 64
    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    packed_weights: bool = True
    weights: str = "auto"
    compile: bool = True
    scaled_jpeg: bool = False
    kv_memory_bytes: int | None = None
    kv_memory_percent: int | None = None
    kv_reserve_percent: int = 5
    max_model_len: int = 4096
    max_requests: int = 256
    max_batched_tokens: int = 2048
    queues: QueueSettings = dataclasses.field(default_factory=QueueSettings)
    request_memory_bytes: int | None = None
    decode_processes: int = 0
    embedding_cache_bytes: int = 256 << 20
    embedding_cold_cache_bytes: int | None = None
    embedding_ttl_seconds: float = 600.0
    num_threads: int = 0
    drain_timeout_seconds: float = 600.0
    compat: str = ""
    delays: Mapping[str, float] = dataclasses.field(default_factory=dict)
    runner: str = "model"
    transport: str = "stream"
    shared_memory_dir: Path = DEFAULT_SHARED_MEMORY_DIR
    exposed_memory_bytes: int = 256 << 20
    strict: bool = False
    timers: Timers = PRODUCTION
    identity: Identity = dataclasses.field(default_factory=Identity)
    parent: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GatewaySettings:
    """One gateway process.

    It finds its workers at the static addresses `workers`. If these are empty, it watches the pods
    of `service` in `namespace`. `config` is the mounted gateway.json. `api_keys_dir` is a mounted
    Secret with one bearer key per file, whose name is the tenant; None disables authentication.
    `api_server` is the cluster's API server, as https://host:port; empty outside of a cluster. If a
    pool has lost its last pod, a request waits `patience_seconds` for a new one. At most
    `max_waiting` requests wait for capacity. Requests hold at most `memory_bytes` together, and at
    most `max_connections` connections are open. `images_per_request` applies if `config` sets no
    limit. With `any_priority`, a client may raise its requests above those of others.
    """

    model: ModelSource
    served_name: str
    bind: str = "::"
    http_port: int = 8000
    admin_port: int = 9001
    namespace: str = ""
    service: str = ""
    workers: tuple[str, ...] = ()
    api_server: str = ""
    config: Path | None = None
    api_keys_dir: Path | None = None
    block_size: int = 64
    max_model_len: int = 4096
    drain_timeout_seconds: float = 600.0
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS
    max_waiting: int = 512
    memory_bytes: int = 512 << 20
    max_connections: int = 1024
    images_per_request: int = 4
    any_priority: bool = False
    compat: str = ""
    delays: Mapping[str, float] = dataclasses.field(default_factory=dict)
    timers: Timers = PRODUCTION
    identity: Identity = dataclasses.field(default_factory=Identity)
    parent: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ServeSettings:
    """All roles on this machine, behind one port.

    The parts start from `worker` and `gateway`; with `split`, each role is a child process.
    """

    host: str
    port: int
    split: bool
    worker: WorkerSettings
    gateway: GatewaySettings


Settings = WorkerSettings | GatewaySettings | ServeSettings
