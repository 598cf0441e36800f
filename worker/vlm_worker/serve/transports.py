"""Which way bytes go between workers, as the settings say."""

from __future__ import annotations

from vlm_worker.settings import WorkerSettings
from vlm_worker.transfer import nixl, shared_memory
from vlm_worker.transfer.transport import ByteStream, Transport


def make_transport(settings: WorkerSettings, *, native_library: str | None = None) -> Transport:
    """The transport of a worker; `native_library` is the file of the kernels in C++.

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
