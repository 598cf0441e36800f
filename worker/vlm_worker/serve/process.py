"""Setup of a worker process: logs, signals, loading thread, malloc, garbage collector, compiler.

A memory page that the process has is faster to write than a new one, so malloc keeps freed memory.
Each thread that allocates has its own malloc arena, which keeps what was freed there. Therefore the
number of arenas is small, and a process that has grown returns free memory to the system.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from vlm_worker.telemetry import REQUEST_ID

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, request id, then the extra fields and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            fields["request_id"] = request_id
        fields |= {k: v for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(fields, default=str)


def log_as_text() -> None:
    """Set up the root logger for a terminal: warnings and errors only."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", force=True)
    logging.captureWarnings(capture=True)


def log_as_json(level: int = logging.INFO) -> None:
    """Set up the root logger; messages of libraries below WARNING are dropped."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for ours in ("vlm_worker", "vlm_kernels"):
        logging.getLogger(ours).setLevel(level)
    logging.captureWarnings(capture=True)


logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Handles signals inside the context. The first sets `stop`; the second ends the process."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(self, *exc: object) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _received(self, number: int) -> None:
        if self.stop.is_set():
            exit_process(128 + number)
        self.stop.set()


def exit_process(code: int) -> None:
    """End the process now, without waiting for threads that load or compute."""
    logging.shutdown()
    os._exit(code)


T = TypeVar("T")


async def result_unless(stopping: asyncio.Future[Any], work: Callable[[], T]) -> T:
    """The result of `work`. A signal before it ends the process, which has no requests yet."""
    loading = asyncio.wrap_future(_in_thread(work))
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        logger.info("stopped while loading")
        exit_process(0)
    return loading.result()


def _in_thread(work: Callable[[], T]) -> concurrent.futures.Future[T]:
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return future


_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> None:
    """Get SIGTERM when the parent ends; exit now if it has already ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


MAPPED_FROM_BYTES: Final = 32 << 20
"""An allocation of this size is mapped, and returns to the system when it is freed. glibc's dynamic
threshold starts at 128 KiB and also ends here, after such an allocation was freed."""
KEPT_BYTES: Final = 128 << 20
"""Maximum free bytes that malloc keeps at the end of an arena."""
MESSAGE_BYTES: Final = 64 << 20
"""Bytes of messages in transit in gRPC and data connections."""
ARENAS: Final = 4
"""Arenas for all threads together; malloc's default is eight per core."""
GROWTH_BYTES: Final = 64 << 20
"""If a process has grown by this much, it returns free memory to the system. Each returned page is
allocated again at most once."""
TRIM_SECONDS: Final = 1.0

# from malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def set_malloc_thresholds(environ: Mapping[str, str]) -> bool:
    """Let malloc reuse the memory of a transfer's frame for the next one.

    Returns False if nothing was set: the environment sets malloc's thresholds, or it is not glibc.
    """
    if any(name.startswith("MALLOC_") for name in environ) or "GLIBC_TUNABLES" in environ:
        return False
    process = ctypes.CDLL(None)
    if not hasattr(process, "mallopt"):
        return False
    thresholds = {
        _M_MMAP_THRESHOLD: MAPPED_FROM_BYTES,
        _M_TRIM_THRESHOLD: KEPT_BYTES,
        _M_ARENA_MAX: ARENAS,
    }
    return all(process.mallopt(which, num_bytes) for which, num_bytes in thresholds.items())


def freeze_gc() -> None:
    """Exclude all objects that exist now from cyclic garbage collection, for good.

    Modules and weights are about a million objects. A full collection visits them in a quarter of
    a second, with every thread stopped, and requests trigger it repeatedly.
    """
    gc.collect()
    gc.freeze()


class Growth:
    """Decides when a process has grown enough to make malloc return free memory. Pure."""

    def __init__(self, num_bytes: int = GROWTH_BYTES) -> None:
        self._num_bytes = num_bytes
        self._smallest: int | None = None

    def is_due(self, resident: int) -> bool:
        """Record the resident bytes; True if they grew enough since the last time."""
        if self._smallest is None or resident < self._smallest:
            self._smallest = resident
        if resident - self._smallest < self._num_bytes:
            return False
        self._smallest = None
        return True


async def return_freed_memory(growth_bytes: int = GROWTH_BYTES) -> None:
    """Check every second; if the process has grown by `growth_bytes`, return free memory.

    malloc is locked meanwhile, for 10 to 50 ms per 100 MB of free memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    growth = Growth(growth_bytes)
    while trim is not None:
        await asyncio.sleep(TRIM_SECONDS)
        if growth.is_due(resident_bytes()):
            await asyncio.to_thread(trim, 0)


def resident_bytes() -> int:
    """Resident bytes of this process, mapped files included; 0 if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def only_tls_13(environ: MutableMapping[str, str]) -> None:
    """Let gRPC refuse TLS 1.2; set before gRPC is imported.

    gRPC's Python API sets no version. The variable lists the ciphers of TLS 1.2 only, and this one
    needs a shared key, which no gRPC process has. So TLS 1.2 has no usable cipher.
    """
    environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-CHACHA20-POLY1305"


def keep_compiled(environ: MutableMapping[str, str]) -> None:
    """Set torch's compile cache and threads before torch is imported, unless they are set already.

    Torch's default directory is in /tmp, which is empty in a new container of a pod. `~/.cache`
    persists if it is on a volume. By default torch starts a compile process per CPU and keeps them.
    """
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/")) / ".cache"
    environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(home) / "triptych" / "compiled"))
    environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
