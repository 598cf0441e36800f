"""Computes the memory that a worker declares, from settings and model (`core.process_memory`).

Requests may hold --request-memory-bytes, or the sum of these parts:
  uploads      512 MiB
  images       pixels that may wait for the encoder, with their patches
  embeddings   both cache tiers, the copies made for peers, and the buffers of the disk tier
  exposed      memory that peers read, if the transport exposes any
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Final

from vlm_worker.annotations import MAX_IMAGE_BYTES
from vlm_worker.core.families import Family
from vlm_worker.core.process_memory import ProcessMemory
from vlm_worker.core.request_memory import SMALL_SHARE, MemoryBudget, divide
from vlm_worker.engine.embedding_reads import BUFFER_BYTES
from vlm_worker.engine.runner import Runner
from vlm_worker.media.pool import decoders_bytes
from vlm_worker.model.cgroup import num_cpus
from vlm_worker.serve.loading import Loaded
from vlm_worker.serve.process import KEPT_BYTES, MESSAGE_BYTES
from vlm_worker.settings import WorkerSettings
from vlm_worker.transfer.transport import STREAM
from vlm_worker.types import Stage

DEFAULT_UPLOADS: Final = 512 << 20
DEFAULT_COLD_CACHE_BYTES: Final = 1 << 30
MIN_DECODERS: Final = 2
MAX_DECODERS: Final = 16
QUEUED_IMAGES: Final = 8
"""Images of the largest size that the budget should hold. With fewer, images wait for memory while
the encoder is idle, and are encoded one by one. More decode children do not compensate for that."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes that requests may hold, by kind, and the bytes that the whole process declares.

    `num_decoders` images are decoded at a time.
    """

    requests: MemoryBudget
    declared: ProcessMemory
    num_decoders: int


def plan_memory(
    settings: WorkerSettings, loaded: Loaded, *, resident_bytes: int, gateway_bytes: int = 0
) -> MemoryPlan:
    """Divide the memory of a process that has loaded its model and uses `resident_bytes` now.

    A gateway in this process may use `gateway_bytes` of it.

    If no flag gives a size, requests get what remains of the container's limit. If that is less
    than `QUEUED_IMAGES` need, fewer children decode.

    Raises:
        ValueError: the container's limit or a flag is too small; the text gives the minimum.
    """
    max_decoders = num_decoders(settings)
    min_decoders = max_decoders if settings.decode_processes else 1
    if Stage.ENCODER not in settings.stages:
        max_decoders = min_decoders = 0
    plan_for = functools.partial(
        _plan, settings, loaded, resident_bytes=resident_bytes, gateway_bytes=gateway_bytes
    )
    target = min(QUEUED_IMAGES * image_bytes(loaded.family), plan_for(min_decoders).requests.images)
    for count in range(max_decoders, min_decoders - 1, -1):
        plan = plan_for(count)
        fits = loaded.limit_bytes is None or plan.declared.total <= loaded.limit_bytes
        if fits and plan.requests.images >= target:
            break
    plan.declared.check(loaded.limit_bytes)
    return plan


def num_decoders(settings: WorkerSettings) -> int:
    """Maximum number of decode children: the flag's value, else half the number of CPUs.

    `num_threads` is the pod's CPU limit if the operator knows one; else the container's is used.
    """
    if settings.decode_processes:
        return settings.decode_processes
    count = settings.compute.num_threads or num_cpus()
    return max(MIN_DECODERS, min(count // 2, MAX_DECODERS))


def _plan(
    settings: WorkerSettings,
    loaded: Loaded,
    count: int,
    *,
    resident_bytes: int,
    gateway_bytes: int,
) -> MemoryPlan:
    on_host = loaded.device == "cpu"
    weights = loaded.facts.weights_bytes if on_host else 0
    rest = ProcessMemory(
        weights=weights,
        kv=_kv_bytes(settings, loaded.runner) if on_host else 0,
        work=loaded.work_bytes,
        decoders=decoders_bytes(loaded.family.processor, num_children=count) if count else 0,
        gateway=gateway_bytes,
        process=max(resident_bytes - weights, 0),
        kept=KEPT_BYTES + MESSAGE_BYTES,
    )
    available = loaded.available_bytes
    if available is not None:
        not_yet_allocated = rest.total - rest.weights - rest.process
        available = min(available // 2, max(available - not_yet_allocated, 0))
        if loaded.limit_bytes is not None:
            available = min(available, max(loaded.limit_bytes - rest.total, 0))
    requests = request_memory(
        settings, loaded.family, device=loaded.device, available_bytes=available
    )
    declared = dataclasses.replace(rest, requests=requests.total)
    return MemoryPlan(requests, declared, count)


def _kv_bytes(settings: WorkerSettings, runner: Runner) -> int:
    """Bytes of the KV cache, and of the embedding rows of the prompts in it."""
    if runner.kv_layout is None:
        return 0
    rows = runner.embed_layout.row_bytes if Stage.PREFILL in settings.stages else 0
    layout = runner.kv_layout
    num_tokens = runner.num_blocks * layout.block_size * layout.num_parts  # if all were narrow
    return runner.num_blocks * runner.kv_layout.block_bytes + num_tokens * rows


def request_memory(
    settings: WorkerSettings, family: Family, *, device: str, available_bytes: int | None
) -> MemoryBudget:
    """Divide the memory that requests may hold.

    If no flag gives the total, it is the sum of the parts' limits, or `available_bytes` if that is
    known and smaller. The total always suffices for one image.

    Raises:
        ValueError: the flag's value is too small; the text gives the minimum.
    """
    encodes = Stage.ENCODER in settings.stages
    largest, geometry = image_bytes(family), family.processor.largest
    # one eighth of the image memory is reserved for small images
    least_images = math.ceil(largest * SMALL_SHARE / (SMALL_SHARE - 1)) + SMALL_SHARE
    per_pixel = largest / (geometry.height * geometry.width)
    waiting = math.ceil(settings.queues.max_waiting_pixels * per_pixel)
    images = max(math.ceil(waiting * SMALL_SHARE / (SMALL_SHARE - 1)), least_images)
    parts = {
        "uploads": DEFAULT_UPLOADS if encodes else 0,
        "images": images if encodes else 0,
        "embeddings": _embedding_bytes(settings, device),
        "exposed": settings.exposed_memory_bytes if settings.transport != STREAM else 0,
    }
    least = {"least_uploads": MAX_IMAGE_BYTES, "least_images": least_images}
    total = settings.request_memory_bytes
    if total is None and encodes and available_bytes is not None:
        fixed = parts["embeddings"] + parts["exposed"]
        total = max(
            min(sum(parts.values()), available_bytes),
            fixed + least["least_uploads"] + least_images,
        )
    return divide(total, **parts, **least)


def image_bytes(family: Family) -> int:
    """Bytes of the largest image, from decoding until it is encoded: its patches and pixels."""
    geometry = family.processor.largest
    patches = 4 * math.prod(geometry.grid_thw) * family.processor.patch_dim
    # other aspect ratios may have a few more patches than the square
    return math.ceil(1.05 * (patches + 3 * geometry.height * geometry.width))


def _embedding_bytes(settings: WorkerSettings, device: str) -> int:
    """Bytes of both cache tiers and all copies of embeddings; 0 if only decode is loaded."""
    if settings.stages == {Stage.DECODE}:
        return 0
    copies = embedding_copies(settings, device)
    cache = settings.encoder_cache
    # what waits to be written, and one file that is read
    disk = 2 * BUFFER_BYTES if cache.embedding_disk_dir and copies else 0
    return cache.embedding_cache_bytes * (1 + copies) + cold_cache_bytes(settings, device) + disk


def embedding_copies(settings: WorkerSettings, device: str) -> int:
    """Host copies of an embedding that is held for a peer: its frames, and on a GPU its rows."""
    if Stage.ENCODER not in settings.stages:
        return 0
    return 1 if device == "cpu" else 2


def cold_cache_bytes(settings: WorkerSettings, device: str) -> int:
    """Bytes of the cold tier in host memory; 0 on a CPU, where the hot tier is host memory too."""
    if settings.encoder_cache.embedding_cold_cache_bytes is not None:
        return settings.encoder_cache.embedding_cold_cache_bytes
    return 0 if device == "cpu" else DEFAULT_COLD_CACHE_BYTES
