"""The settings of the encoder cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from vlm_worker.settings.options import PATH, SECONDS, at_least, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderCacheSettings:
    """Sizes of the encoder cache.

    Attributes:
        embedding_cache_bytes: budget of the tier on the runner's device. It also limits the
            embeddings that are queued or held for peers; beyond it, a call gets an OverloadedError.
        embedding_cold_cache_bytes: budget of the tier in host memory. None depends on the device: 0
            on a CPU, where the hot tier is host memory too.
        embedding_ttl_seconds: an embedding that was unused for this time is not served from memory
            again.
        embedding_disk_dir: if set, embeddings that leave memory are written there, and read again.
            Only a worker with the stage encoder has this tier. No other process uses the directory.
        session_pin_seconds: an image of a request with `prompt_cache_key` is evicted after images
            without for so long after its last use, within half of the bytes of memory and disk.
    """

    embedding_cache_bytes: int = option(
        "--embedding-cache-bytes", at_least(0), 256 << 20, "of device memory"
    )
    embedding_cold_cache_bytes: int | None = option(
        "--embedding-cold-cache-bytes",
        at_least(0),
        None,
        "of host memory, the second tier; a copy between the two delays a step "
        "(1 GiB, and 0 on a CPU: there both are host memory)",
    )
    embedding_ttl_seconds: float = option(
        "--embedding-ttl-seconds", SECONDS, 600.0, "of one that is not used"
    )
    embedding_disk_dir: Path | None = option(
        "--embedding-disk-dir", PATH, None, "of this worker alone, for embeddings that leave memory"
    )
    embedding_disk_bytes: int = option(
        "--embedding-disk-bytes", at_least(1), 8 << 30, "of its files"
    )
    embedding_disk_age_seconds: int = option(
        "--embedding-disk-age-seconds", at_least(1), 86400, "after which a file is deleted"
    )
    session_pin_seconds: int = option(
        "--session-pin-seconds",
        at_least(0),
        0,
        "for which the images of a conversation are evicted after others; 0: never",
    )

    def __post_init__(self) -> None:
        problem = session_pin_problem(self.session_pin_seconds, self.embedding_ttl_seconds)
        if problem is not None:
            raise ValueError(problem)


def session_pin_problem(pin_seconds: float, ttl_seconds: float) -> str | None:
    """Why an embedding cannot have a session pin for so long; None if it can."""
    if pin_seconds <= ttl_seconds:
        return None
    return (
        f"--session-pin-seconds: {pin_seconds} is more than --embedding-ttl-seconds "
        f"({ttl_seconds:g}), after which an embedding leaves memory: raise the latter, or lower "
        "the former"
    )
