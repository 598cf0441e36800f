"""The host memory that one process declares, by part. Pure.

    weights      the model's weights on the host
    kv           the KV cache on the host, and embedding rows in prompts: both grow with use
    requests     `core.request_memory.MemoryBudget`, both tiers of the encoder cache included
    work         temporary memory of one step and of one encoder call
    decoders     the child processes that decode images
    gateway      requests and connections of a gateway that runs in a worker's process, and what it
                 knows of the caches of its pods
    connections  buffers and request objects of a gateway's clients
    process      interpreter, libraries and model code, measured after loading
    kept         freed memory that malloc keeps, and messages in flight; of a gateway also what it
                 knows of the caches of its pods, and its child that checks grammars

A separate gateway process has only `requests`, `connections`, `process` and `kept`.

The container's memory limit must be at least the sum.
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

from vlm_worker.metrics import GAUGE, Metric


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of host memory by part; the module docstring defines the parts.

    The fields are the labels of `triptych_memory_declared_bytes`.
    """

    weights: int = 0
    kv: int = 0
    requests: int = 0
    work: int = 0
    decoders: int = 0
    gateway: int = 0
    connections: int = 0
    process: int = 0
    kept: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_part().values())

    def by_part(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    def check(self, limit: int | None) -> None:
        """Raise ValueError if the sum exceeds the container's memory limit in bytes, if any."""
        if limit is None or self.total <= limit:
            return
        parts = ", ".join(f"{part} {num_bytes}" for part, num_bytes in self.by_part().items())
        raise ValueError(
            f"this worker may take {self.total} bytes ({parts}), and the container's memory limit "
            f"is {limit}: raise the limit by {self.total - limit}, or lower --kv-memory-bytes, "
            "--embedding-cache-bytes, --request-memory-bytes or --decode-processes"
        )


class HostMemory(NamedTuple):
    """The host memory that a process may use, and the bytes that it uses now."""

    declared: ProcessMemory
    resident: int


NO_HOST_MEMORY: Final = HostMemory(ProcessMemory(), 0)

HOST_MEMORY_METRICS: tuple[Metric[HostMemory], ...] = (
    Metric("triptych_memory_declared_bytes", GAUGE,
           "Host memory that this process may use, by purpose.",
           lambda memory: memory.declared.by_part(), label="part"),
    Metric("triptych_memory_declared_total_bytes", GAUGE, "Sum of the parts.",
           lambda memory: memory.declared.total),
    Metric("triptych_memory_resident_bytes", GAUGE, "Resident host memory.",
           lambda memory: memory.resident),
)  # fmt: skip
