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
"""If the only pod of a pool is killed and its model is small, it is back after 11 to 12 s. A
client's own timeout is 60 s or more."""
MAX_IMAGES: Final = 64
"""Of a request: as many as a worker takes in one call."""
LEAST_MEMORY_BYTES: Final = 128 << 20
"""For two bodies of the largest size, of two tenants, each with a copy."""
DEFAULT_SHARED_MEMORY_DIR = Path("/dev/shm")  # noqa: S108  files in it have random names


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is in its cluster, from the downward API; empty strings outside of one.

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
        """The container was given GPUs."""
        return self.granted_gpus not in ("", "none", "void")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model comes from.

    Attributes:
        uri: a directory, or `hf://org/name`.
        revision: commit of an `hf://` model; of a directory, what its publisher calls it.
        cache: directory that `hf://` models are downloaded into; None is huggingface_hub's own.
    """

    uri: str
    revision: str = ""
    cache: Path | None = None

    @property
    def repository(self) -> str | None:
        """`org/name` of an `hf://` source, None of a directory."""
        return self.uri.removeprefix(HF_PREFIX) if self.uri.startswith(HF_PREFIX) else None


@dataclasses.dataclass(frozen=True, slots=True)
class QueueSettings:
    """How a worker orders and bounds what waits: a flag of the same name for each field.

    Attributes:
        admission_policy: `fcfs` or `dual_queue` (docs/decisions/0009-first-come-first-served.md).
        max_wave_text, max_wave_vision: sequences that one step of `dual_queue` admits of each lane.
        ageing_seconds: who has waited for so long goes before everybody who has not.
        max_waiting, max_waiting_tokens: bounds of the queue for prefill.
        max_waiting_images, max_waiting_pixels: bounds of the queue for the encoder.
        long_prefill_tokens: tokens of one prompt in a step while others can use the rest.
        target_step_ms: how many run at once follows from this; 0 is as many as fit.
    """

    admission_policy: str = "fcfs"
    max_wave_text: int = 32
    max_wave_vision: int = 8
    ageing_seconds: float = 3.0
    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 20
    max_waiting_images: int = 256
    max_waiting_pixels: int = 1 << 26
    long_prefill_tokens: int = 1024
    target_step_ms: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One encoder, prefill or decode process. A port of 0 is any free one.

    Consumers reach `data_port` at `announced_data_port`, where that is another.
    `kv_memory_bytes` goes before `kv_memory_percent`; with neither, the runner chooses. `runner`
    `checksum` replaces the model by arithmetic, for fault tests. With `compile`, layers that torch
    computes on a GPU are compiled at start. With `scaled_jpeg`, a JPEG is decoded no larger than
    the model needs it: the same for all workers of a service. `delays` holds seconds by stage.
    `request_memory_bytes` is what requests may hold beside weights and KV (None: the sum of its
    parts' own bounds). `decode_processes` decode images; 0 follows the number of CPUs.
    `embedding_cache_bytes` are on the device, `embedding_cold_cache_bytes` behind them on the host
    (None: it depends on the device). `transport` is how bytes go between workers that both have it,
    by memory in `shared_memory_dir` for one; they expose at most `exposed_memory_bytes` at a time.
    With `strict`, a broken promise of the books ends the process instead of being counted. `timers`
    are all waits on peers, `drain_timeout_seconds` apart. `parent` is the process that this one
    ends with, where it was started by `serve --split`.
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

    It finds its workers at the static addresses `workers`, or, where these are empty, by watching
    the pods of `service` in `namespace`. `config` is the mounted gateway.json; `api_keys_dir` a
    mounted Secret with one bearer key per file, whose name is the tenant; None is open.
    `api_server` is the cluster's, as https://host:port; empty outside of one. A request waits
    `patience_seconds` for a pod after its pool has lost the last one; at most `max_waiting` wait
    for room at once. Requests hold at most `memory_bytes` together, and there are at most
    `max_connections` connections; `images_per_request` holds where `config` does not say. With
    `any_priority`, a client may put its requests before those of others.
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
    """Every role on this machine, behind one port.

    `worker` and `gateway` are the settings that the parts start from; with `split`, each role is a
    child process.
    """

    host: str
    port: int
    split: bool
    worker: WorkerSettings
    gateway: GatewaySettings


Settings = WorkerSettings | GatewaySettings | ServeSettings
