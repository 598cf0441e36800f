"""The process that decodes untrusted files, one image after another. A file may crash it.

Started as `python -P -S -m vlm_worker.media.decode_child CONFIG`, a socket as its standard input.
It holds no secret. The kernel limits its system calls, its address space, and its CPU time per
image. It exits at the end of its input, so it never outlives its worker.
"""

from __future__ import annotations

import hashlib
import math
import os
import resource
import socket
import sys
import time
from pathlib import Path

import numpy as np

from vlm_worker.errors import InvalidRequestError
from vlm_worker.media.decode_channel import (
    READY,
    READY_UNFILTERED,
    REQUEST_BYTES,
    ChildConfig,
    DecodeRequest,
    DecodeResult,
    receive,
)
from vlm_worker.media.patches import image_key, model_pixels
from vlm_worker.media.pixels import Canvas, UndecodableError, decode_rgb
from vlm_worker.media.resize import Resizer
from vlm_worker.media.system_calls import allow_only_what_decoding_needs, set_no_new_privileges

NO_MEMORY = "decoding the image needs more memory than one image may take; send it smaller"


MAX_FILES = 3
"""Open descriptors: standard input, which is the channel, standard output and standard error."""


def main() -> None:
    """Run requests from standard input until it is closed."""
    config = ChildConfig.from_json(sys.argv[1])
    resizer, canvas = Resizer(config.native_library), Canvas()  # reused for every image
    _bound_memory(config.memory_bytes)
    with socket.socket(fileno=0) as channel:  # queries the socket's type: before the filter
        unfiltered = confine()
        channel.sendall(READY if unfiltered is None else READY_UNFILTERED)
        while True:
            try:
                request = DecodeRequest.unpack(bytes(receive(channel, REQUEST_BYTES)))
            except EOFError:
                return
            _bound_cpu(config.cpu_seconds)
            data = receive(channel, request.num_bytes)
            result, body = _run(request, data, config, resizer, canvas)
            channel.sendall(result.pack())
            channel.sendall(body)


def _run(
    request: DecodeRequest, data: bytearray, config: ChildConfig, resizer: Resizer, canvas: Canvas
) -> tuple[DecodeResult, memoryview]:
    try:
        return _prepare(request, data, config, resizer, canvas)
    except (UndecodableError, InvalidRequestError) as error:
        code, message = "invalid_image", str(error)
    except MemoryError:
        code, message = "image_too_large", NO_MEMORY
    text = f"{code}\0{message}".encode()
    return DecodeResult.failure(len(text)), memoryview(text)


def _prepare(
    request: DecodeRequest, data: bytearray, config: ChildConfig, resizer: Resizer, canvas: Canvas
) -> tuple[DecodeResult, memoryview]:
    start = time.perf_counter_ns()
    processor = config.processor.capped(request.max_pixels)
    size = (request.header.height, request.header.width)
    enough = processor.resized(*size) if config.scaled_jpeg else None
    rgb = decode_rgb(data, request.header, enough=enough, canvas=canvas)
    decoded = time.perf_counter_ns()
    geometry = processor.geometry(*size)
    pixels = model_pixels(rgb, processor, geometry, resizer=resizer, size=size)
    prepared = time.perf_counter_ns()
    key = image_key(
        rgb, processor, model_revision=config.model_revision, salt=request.salt, size=size
    )
    body = pixels.data.cast("B")
    result = DecodeResult(
        ok=True,
        image_key=key,
        file_digest=hashlib.sha256(data).digest(),
        grid_thw=geometry.grid_thw,
        num_tokens=geometry.num_tokens,
        decode_us=(decoded - start) // 1000,
        prepare_us=(prepared - decoded) // 1000,
        key_us=(time.perf_counter_ns() - prepared) // 1000,
        num_bytes=len(body),
    )
    return result, body


def _bound_memory(memory_bytes: int) -> None:
    """Limit the address space to that of the idle child plus `memory_bytes`. No core dumps."""
    np.zeros(1)  # the libraries' start-up allocations are part of the idle child
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def confine() -> str | None:
    """Limit what a malicious file can do if it controls this process.

    The process cannot open files or connections, write files, gain privileges by exec, or write to
    the worker's log. All modules are loaded before. Without the filter, resource limits alone would
    let it close a descriptor and open another one.

    Returns:
        Why the filter could not be installed; None if it is active.
    """
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 2)
    os.close(log)
    set_no_new_privileges()
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return allow_only_what_decoding_needs()


def _bound_cpu(cpu_seconds: int) -> None:
    """Limit CPU time from now on. RLIMIT_CPU counts from process start: raise it per image."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, hard))


if __name__ == "__main__":
    main()
