"""The process that meets hostile files: decodes one picture after another, and may die of any.

Started as `python -P -S -m vlm_worker.media.decode_child CONFIG`, a socket as its standard input.
It holds no secret and can open no file and no connection, and the kernel bounds it: address space,
and CPU time per picture. End of input ends it, so it never outlives its worker.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vlm_worker.errors import InvalidRequestError
from vlm_worker.media.frames import READY, ChildConfig, Done, Job, receive
from vlm_worker.media.patches import image_key, model_pixels
from vlm_worker.media.pixels import Canvas, UndecodableError, decode_rgb
from vlm_worker.media.resize import Resizer

NO_MEMORY = "decoding the image needs more memory than one image may take; send it smaller"


MAX_FILES = 3
"""Standard input, which is the channel, output and error."""
_PR_SET_NO_NEW_PRIVS = 38


class Tools(NamedTuple):
    """What serves every picture in turn."""

    resizer: Resizer
    canvas: Canvas


def main() -> None:
    """Serve jobs from standard input until it ends."""
    config = ChildConfig.from_json(sys.argv[1])
    tools = Tools(Resizer(config.native_library), Canvas())
    _bound_memory(config.memory_bytes)
    _confine()
    with socket.socket(fileno=0) as channel:
        channel.sendall(READY)
        while True:
            try:
                job = Job.unpack(bytes(receive(channel, Job.SIZE)))
            except EOFError:
                return
            _bound_cpu(config.cpu_seconds)
            done, body = _run(job, receive(channel, job.num_bytes), config, tools)
            channel.sendall(done.pack())
            channel.sendall(body)


def _run(job: Job, data: bytearray, config: ChildConfig, tools: Tools) -> tuple[Done, memoryview]:
    try:
        return _prepare(job, data, config, tools)
    except (UndecodableError, InvalidRequestError) as error:
        code, message = "invalid_image", str(error)
    except MemoryError:
        code, message = "image_too_large", NO_MEMORY
    text = f"{code}\0{message}".encode()
    return Done.failure(len(text)), memoryview(text)


def _prepare(
    job: Job, data: bytearray, config: ChildConfig, tools: Tools
) -> tuple[Done, memoryview]:
    start = time.perf_counter_ns()
    processor, size = config.processor.capped(job.max_pixels), (job.header.height, job.header.width)
    enough = processor.resized(*size) if config.scaled_jpeg else None
    rgb = decode_rgb(data, job.header, enough=enough, canvas=tools.canvas)
    decoded = time.perf_counter_ns()
    geometry = processor.geometry(*size)
    pixels = model_pixels(rgb, processor, geometry, resizer=tools.resizer, size=size)
    prepared = time.perf_counter_ns()
    key = image_key(rgb, processor, model_revision=config.model_revision, salt=job.salt, size=size)
    body = pixels.data.cast("B")
    done = Done(
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
    return done, body


def _bound_memory(memory_bytes: int) -> None:
    """Address space: what the idle child has, and so much more. No core dumps."""
    np.zeros(1)  # the libraries' own start-up allocations are part of the idle child
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _confine() -> None:
    """What a file that takes this process over cannot do any more.

    It opens no file and no connection and writes none, gets no privilege by exec, and says nothing
    in the worker's log. All that is needed is loaded by now.
    """
    log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 2)
    os.close(log)
    set_no_new_privileges()
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def set_no_new_privileges() -> None:
    """By prctl(2), where the system has it."""
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is None or prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot give up new privileges")


def _bound_cpu(cpu_seconds: int) -> None:
    """CPU time from now on; the kernel's limit counts the whole life, so it moves along."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_seconds, hard))


if __name__ == "__main__":
    main()
