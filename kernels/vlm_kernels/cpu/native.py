"""Provides the C++ kernels as functions; each process finds and loads their library once.

    library of the best variant (`libraries`) ─▶ load ─▶ function      else None: torch computes

A machine builds only the best variant that it supports. To add a kernel, write its .cpp file
(`threads.h` has the threads and the return values), and call it from Python:

    store = native.function("triptych_store", ctypes.c_void_p, ctypes.c_int64)
    if store is None: ...               # no library: compute with torch
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_kernels.cpu.libraries import NativeError, Places, Variant, build, supported, wanted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Library:
    """The library of this process and its variant, or None and `none`."""

    handle: ctypes.CDLL | None
    name: str


_lock = threading.Lock()
_found: list[Library] = []


def library() -> ctypes.CDLL | None:
    """The library of this process; None if there is none, which is logged once with the reason.

    The first call may compile; `COMPILE_SECONDS` limits each file.

    Raises:
        ValueError: `$TRIPTYCH_NATIVE` names no variant that this CPU supports.
    """
    return _library().handle


def variant_name() -> str:
    """The variant of `library()`; `none` if there is none."""
    return _library().name


def path() -> str | None:
    """The file of `library()`, to be loaded by another process; None if there is none."""
    found = library()
    return None if found is None else found._name


def _library() -> Library:
    with _lock:
        if not _found:
            environ = os.environ  # noqa: TID251  read once, by its only user
            variants = wanted(environ.get("TRIPTYCH_NATIVE"), supported())
            _found.append(_find(Places.of(environ), variants))
        return _found[0]


def function(name: str, *argument_types: Any, returns: Any = None) -> Callable[..., Any] | None:
    """A function of the library, from `typed`; None if the library does not have it."""
    found = library()
    if found is None or not hasattr(found, name):  # some variants lack some functions
        return None
    return typed(found, name, *argument_types, returns=returns)


def typed(
    of: ctypes.CDLL, name: str, *argument_types: Any, returns: Any = None
) -> Callable[..., Any]:
    """A function of one library with its C types; they may differ in other libraries.

    Without `returns` it is a kernel, which raises MemoryError if an allocation fails.
    """
    if returns is not None:
        return ctypes.CFUNCTYPE(returns, *argument_types)((name, of))
    kernel = ctypes.CFUNCTYPE(ctypes.c_bool, *argument_types)((name, of))
    kernel.errcheck = _check_memory  # type: ignore[assignment]
    return kernel


def _check_memory(had_memory: bool, kernel: Any, _: tuple[Any, ...]) -> None:
    if not had_memory:
        raise MemoryError(f"a kernel found no memory: {kernel!r}")


def load(path: Path) -> ctypes.CDLL:
    """Load a library and let it run on torch's threads. Raises NativeError."""
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error
    ask_for_tiles = getattr(found, "triptych_ask_for_tiles", None)  # in variants with AMX
    if ask_for_tiles is not None and not ask_for_tiles():
        raise NativeError("the system does not let this process use tiles of AMX")
    process = ctypes.CDLL(None)  # torch's dependencies are global symbols
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    if all(hasattr(process, name) for name in names):
        entries = [ctypes.cast(getattr(process, name), ctypes.c_void_p) for name in names]
        found.triptych_use_openmp(*entries)
    else:
        logger.warning("no OpenMP runtime is loaded: native kernels run in one thread")
    return found


def _find(places: Places, variants: Sequence[Variant]) -> Library:
    """The best available variant; logs the result."""
    for variant in variants:
        began = time.monotonic()
        try:
            found = load(build(variant, places))
        except NativeError as error:
            logger.warning("no native kernels for %s: %s", variant.name, error)
            continue
        seconds = time.monotonic() - began
        logger.info("native kernels: %s, ready after %.1f s", variant.name, seconds)
        return Library(found, variant.name)
    logger.warning("no native kernels at all: torch computes instead, slower")
    return Library(None, "none")
