"""The settings of each command, as frozen values; each option is declared once, by its field."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vlm_worker.settings.encoder_cache import EncoderCacheSettings
from vlm_worker.settings.identity import Identity
from vlm_worker.settings.kinds import (
    ADDRESSES,
    DELAY_BY_STAGE,
    IMAGES,
    MAX_IMAGES,
    SCALED_TIMERS,
    SHA256,
    STAGE_LIST,
    WEIGHTS,
)
from vlm_worker.settings.options import (
    FLAG,
    PATH,
    PERCENT,
    PERMILLE,
    PORT,
    REQUIRED,
    SECONDS,
    SHARE,
    TEXT,
    at_least,
    group,
    one_of,
    option,
)
from vlm_worker.settings.source import CalibrateSettings, FetchSettings, ModelSource
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.types import Role, Stage

MAX_LENT_KV_PERCENT: Final = 30
"""Maximum share for the KV of an encoder that lends: images keep the rest (decision 0038)."""
MIN_MEMORY_BYTES: Final = 128 << 20
"""Minimum memory of a gateway: two bodies of the largest size, of two tenants, each with a copy."""
SHARED_MEMORY_DIR: Final = Path("/dev/shm")  # noqa: S108  files in it have random names
SERVE_DRAIN_SECONDS: Final = 5.0
CHOSEN_BY_SERVE: Final = frozenset({
    "--model", "--bind", "--grpc-port", "--data-port", "--announced-data-port", "--http-port",
    "--stages", "--namespace", "--service", "--worker", "--config", "--api-keys-dir",
    "--patience-seconds", "--identity-dir", "--max-lent-requests",
})  # fmt: skip

NARROW_KV: Final = ("vision=int8", "text=int8", "vision=kivi4")
"""Values of `--kv-dtype` for few bits of one modality."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSettings:
    """What gateway and workers share.

    `delays` holds seconds by stage. `trace_ratio` is the share of the requests whose spans are
    exported; 0 without a collector in the environment. `timers` has all waits for peers except
    `drain_timeout_seconds`. The process ends with the process `parent`, if `serve --split` started
    it.
    """

    model: ModelSource = group(ModelSource)
    served_name: str = option("--served-name", TEXT, REQUIRED, "name in the API")
    block_size: int = option("--block-size", at_least(1), 64, "tokens of a KV block")
    max_model_len: int = option("--max-model-len", at_least(64), 4096, "tokens")
    drain_timeout_seconds: float = option("--drain-timeout-seconds", SECONDS, 600.0)
    compat: str = option("--compat", TEXT, "", "hash of what workers must agree on")
    parent: int | None = option("--exit-with", at_least(2), None, None)
    timers: Timers = option(
        "--timer-scale", SCALED_TIMERS, PRODUCTION, "factor of every timer; for tests"
    )
    delays: Mapping[str, float] = option(
        "--inject-delay-ms", DELAY_BY_STAGE, {}, "delay one hop; for tests", metavar="STAGE=MS"
    )
    identity: Identity = dataclasses.field(default_factory=Identity)
    trace_ratio: float = 0.0
    bind: str = option("--bind", TEXT, "::", "address that every server listens on")
    identity_dir: Path | None = option(
        "--identity-dir", PATH, None, "ca.crt, tls.crt and tls.key for mutual TLS between pods"
    )


class AdmissionPolicy(enum.StrEnum):
    """The order of waiting sequences: by priority and arrival, or by quotas of the two lanes."""

    FCFS = "fcfs"
    DUAL_QUEUE = "dual_queue"


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """How the next sequence is chosen (docs/decisions/0009-first-come-first-served.md)."""

    policy: AdmissionPolicy = option(
        "--admission-policy",
        one_of(AdmissionPolicy),
        AdmissionPolicy.FCFS,
        "order of waiting sequences",
    )
    max_text: int = option(
        "--max-round-text", at_least(1), 32, "of the text lane admitted by one step of dual_queue"
    )
    max_vision: int = option(
        "--max-round-vision",
        at_least(1),
        8,
        "of the vision lane admitted by one step of dual_queue",
    )
    ageing_seconds: float = option(
        "--ageing-seconds", SECONDS, 3.0, "a sequence that waited this long goes first"
    )

    def __post_init__(self) -> None:
        if self.max_text < 1 or self.max_vision < 1:
            raise ValueError(
                f"max_text ({self.max_text}) and max_vision ({self.max_vision}) must be at least 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """How a worker orders and limits its queues. Beyond a limit, a request gets an OverloadedError.

    Waiting tokens include visual tokens; pixels are counted after resizing. An empty queue accepts
    any one request, and the images of any one call.
    """

    admission: AdmissionSettings = group(AdmissionSettings)
    max_waiting: int = option("--max-waiting", at_least(1), 256, "sequences waiting for prefill")
    max_waiting_tokens: int = option("--max-waiting-tokens", at_least(1), 1 << 20, "their tokens")
    max_waiting_images: int = option(
        "--max-waiting-images", at_least(1), 256, "images waiting for the encoder"
    )
    max_waiting_pixels: int = option("--max-waiting-pixels", at_least(1), 1 << 26, "their pixels")
    long_prefill_tokens: int = option(
        "--long-prefill-tokens",
        at_least(16),
        1024,
        "of one prompt in a step while others can use more",
    )
    target_step_ms: float = option(
        "--target-step-ms",
        at_least(0),
        0,
        "adapt the number of running sequences to it; 0: as many as fit",
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSettings:
    """How a model computes, and the size of its KV cache.

    Attributes:
        dtype: of weights and activations; `auto` is the checkpoint's.
        kv_dtype: of the KV cache; `auto` is `dtype`, `int8` and `fp8` have a scale per token and
            head; `fp8` is for GPUs. `vision=int8` is on CPUs, and leaves text as `auto`, as does
            `vision=kivi4`, in 4 bits.
        device: `auto` (a GPU if there is one), `cpu` or `cuda[:N]`.
        packed_weights: pack linear layers if device and dtype benefit.
        weights: `auto` (the `dtype`), `int8`, or on a GPU `int4`, for the linear layers in
            `FamilySpec.int8`; or types by part (`vlm_worker.weights`).
        activation_scales: file with the scales of the inputs of int8 layers, on a CPU; None takes
            them from each row.
        activation_scales_hash: that the file must have; empty for any.
        compile: on a GPU, compile at start the layers that torch computes.
        kv_memory_bytes: size of the KV cache. With neither size, the runner chooses.
        kv_memory_percent: its size as a share of the memory left after loading.
        num_threads: CPU threads; 0 is torch's default (`OMP_NUM_THREADS`, else all cores), at most
            the container's CPUs.
        window_cache_bytes: of states of windows on the device (`core.window_cache`); 0 is none.
    """

    dtype: str = option("--dtype", one_of(("auto", "bfloat16", "float16", "float32")), "auto")
    kv_dtype: str = option(
        "--kv-dtype",
        one_of(("auto", "bfloat16", "float32", "int8", "fp8", *NARROW_KV)),
        "auto",
    )
    device: str = option("--device", one_of(("auto", "cpu", "cuda")), "auto")
    packed_weights: bool = option(
        "--packed-weights",
        one_of({"auto": True, "off": False}),
        True,
        "linear layers in the order that a CPU multiplies fastest, where it gains by it",
    )
    weights: str = option(
        "--weights",
        WEIGHTS,
        "auto",
        "auto, int8 or int4, or by part: encoder=int8,merger=auto,layers=int8,head=auto. Linear "
        "layers rounded: faster, less exact; int8 on a CPU also what they multiply, int4 on a GPU "
        "alone",
        metavar="TYPES",
    )
    activation_scales: Path | None = option(
        "--activation-scales",
        PATH,
        None,
        "file of vlm-worker calibrate: scales of what int8 layers multiply, on a CPU",
        metavar="FILE",
    )
    activation_scales_hash: str = option(
        "--activation-scales-hash", SHA256, "", "that its field sha256 must have", metavar="HEX"
    )
    compile: bool = option(
        "--compile",
        one_of({"auto": True, "off": False}),
        True,
        "layers that torch computes on a GPU are compiled at start: seconds there, and less "
        "time for each image",
    )
    kv_memory_bytes: int | None = option(
        "--kv-memory-bytes", at_least(1), None, exclusive="KV memory"
    )
    kv_memory_percent: int | None = option(
        "--kv-memory-percent", PERCENT, None, exclusive="KV memory"
    )
    num_threads: int = option("--threads", at_least(0), 0, "of the CPU; 0 is all of them")
    window_cache_bytes: int = option("--window-cache-bytes", at_least(0), 0, "for Qwen2.5-VL")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings(ProcessSettings):
    """One encoder, prefill or decode process. A port of 0 selects any free one.

    Attributes:
        announced_data_port: if set, consumers reach `data_port` there.
        scaled_jpeg: all workers of a service must agree on it.
        kv_reserve_percent: share of the KV blocks that admission leaves free for growth.
        max_lent_requests: replaces `max_requests` if it is not 0, and bounds the default KV memory
            to `MAX_LENT_KV_PERCENT`.
        runner: `checksum` replaces the model by arithmetic, for fault tests.
        transport: used between workers that both have it.
        exposed_memory_bytes: maximum memory that peers may read at a time.
        strict: an accounting mismatch ends the process instead of being counted.
    """

    role: Role
    grpc_port: int = option("--grpc-port", PORT, 9000)
    data_port: int = option(
        "--data-port", PORT, 9002, "of KV and embeddings (two above --grpc-port)"
    )
    announced_data_port: int | None = option("--announced-data-port", PORT, None, None)
    http_port: int = option("--http-port", PORT, 9001)
    compute: ComputeSettings = group(ComputeSettings)
    scaled_jpeg: bool = option(
        "--jpeg-scaling",
        one_of({"exact": False, "dct": True}),
        False,
        "dct decodes a JPEG no larger than the model needs it: faster, less exact",
    )
    kv_reserve_percent: int = option("--kv-reserve-percent", PERCENT, 5)
    kv_visual_percent: int = option(
        "--kv-visual-percent",
        SHARE,
        100,
        "of the cached KV blocks; if images and the text behind them have more, theirs are evicted "
        "first",
    )
    kv_prune_text: int = option(
        "--kv-prune-text",
        PERMILLE,
        0,
        "of the text of a conversation's earlier turns, that keeps its KV; 0: nothing is dropped",
    )
    max_requests: int = option("--max-requests", at_least(1), 256, "running at once")
    max_lent_requests: int = option(
        "--max-lent-requests",
        at_least(0),
        0,
        "text-only ones that an encoder with all stages answers at once, after its images",
    )
    max_batched_tokens: int = option("--max-batched-tokens", at_least(16), 2048, "of a step")
    queues: QueueSettings = group(QueueSettings)
    request_memory_bytes: int | None = option(
        "--request-memory-bytes",
        at_least(1),
        None,
        "that requests may hold beside weights and KV: files, decoded images, embeddings "
        "(the sum of these parts' own bounds, at most half of the memory that is left)",
    )
    decode_processes: int = option(
        "--decode-processes", at_least(0), 0, "that decode images; 0: half as many as CPUs, 2 to 16"
    )
    encoder_cache: EncoderCacheSettings = group(EncoderCacheSettings)
    transport: str = option(
        "--transport", one_of(("stream", "shared-memory", "nixl")), "stream", "of KV and embeddings"
    )
    shared_memory_dir: Path = option(
        "--shared-memory-dir", PATH, SHARED_MEMORY_DIR, "in memory, of all workers that share it"
    )
    exposed_memory_bytes: int = option(
        "--exposed-memory-bytes", at_least(1), 256 << 20, "at a time"
    )
    strict: bool = option("--strict", FLAG, False, None)
    runner: str = option("--runner", one_of(("model", "checksum")), "model", None)
    stages: frozenset[Stage] = option(
        "--stages", STAGE_LIST, frozenset(), "what is loaded: encoder,prefill,decode (own stage)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings(ProcessSettings):
    """One gateway process.

    It finds its workers at the static addresses `workers`. If these are empty, it watches the pods
    of `service` in `namespace`.

    Attributes:
        api_keys_dir: a mounted Secret with the bearer keys of a tenant per file, named after it;
            None disables authentication.
        tls_dir: a mounted Secret of type kubernetes.io/tls; None serves the API without TLS.
        api_server: the cluster's API server, as https://host:port; empty outside of a cluster.
        patience_seconds: if a pool has lost its last pod, a request waits this long for a new one.
            If the model is small, a new pod is ready after 11 to 12 s; client timeouts are usually
            60 s or more.
        max_waiting: maximum requests that wait for capacity.
    """

    http_port: int = option("--http-port", PORT, 8000)
    admin_port: int = option("--admin-port", PORT, 9001, "/stats and /metrics")
    namespace: str = option("--namespace", TEXT, "", "where the service's pods are")
    service: str = option("--service", TEXT, "", "the VLMService whose pods are watched")
    workers: tuple[str, ...] = option("--worker", ADDRESSES, (), "HOST:PORT, repeatable")
    api_server: str = ""
    config: Path | None = option("--config", PATH, None, "gateway.json, re-read every second")
    api_keys_dir: Path | None = option(
        "--api-keys-dir", PATH, None, "a tenant's bearer keys per file"
    )
    tls_dir: Path | None = option("--tls-dir", PATH, None, "tls.crt and tls.key: serve HTTPS")
    patience_seconds: float = option("--patience-seconds", SECONDS, 20.0, "for a pool without pods")
    max_waiting: int = option("--max-waiting", at_least(0), 512, "requests that wait for capacity")
    memory_bytes: int = option(
        "--gateway-memory-bytes",
        at_least(MIN_MEMORY_BYTES),
        512 << 20,
        "that requests may hold in the gateway: twice each body, then its images and texts",
    )
    max_connections: int = option(
        "--max-connections", at_least(1), 1024, "of clients to the gateway"
    )
    images_per_request: int = option(
        "--images-per-request",
        IMAGES,
        4,
        f"0 to {MAX_IMAGES}; gateway.json (--config) overrides it",
    )
    mark_history: bool = option(
        "--mark-history",
        FLAG,
        False,
        "tell workers where the last user turn begins, for their --kv-prune-text",
    )
    any_priority: bool = option(
        "--client-priority",
        one_of({"later": False, "any": True}),
        False,
        "whether a client may only let others go first, or go first itself",
    )
    session_prefetch: bool = option(
        "--session-prefetch",
        FLAG,
        False,
        "prefetch the next turn of a conversation on the idle pod that computed its prompt",
    )
    client_embeddings: bool = option(
        "--client-embeddings",
        FLAG,
        False,
        "let clients send embeddings (image_embeds) in place of images",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ServeSettings:
    """All roles on this machine, behind one port.

    The parts start from `worker` and `gateway`; with `split`, each role is a child process.
    """

    worker: WorkerSettings
    gateway: GatewaySettings
    host: str = option("--host", TEXT, "127.0.0.1")
    port: int = option("--port", PORT, 8000)
    split: bool = option("--split", FLAG, False, "one process per role")
    admin_port: int = option(
        "--admin-port",
        PORT,
        0,
        "the gateway's /stats and /metrics (any free one; it is printed at the start)",
    )


Settings = WorkerSettings | GatewaySettings | ServeSettings | FetchSettings | CalibrateSettings
