"""The C++ kernels of this package: built once by the machine's compiler, cached, loaded.

    *.cpp, *.h ─▶ prebuilt? ─▶ cached? ─▶ compile, cache ─▶ load      else None: torch computes

Every .cpp beside this file goes into one library with a plain C interface. There is one library
per variant, the instructions that it may use; a machine builds only the best that it can run. To
add a kernel, write its .cpp (`threads.h` has the threads), and call it from Python:

    store = native.function("triptych_store", ctypes.c_void_p, ctypes.c_int64)
    if store is None: ...               # no library: compute with torch

Looked for, in this order: `$TRIPTYCH_NATIVE_DIR` or `<sys.prefix>/lib/triptych`, which an image
fills at build time (`python -m vlm_kernels.cpu DIR`); the user's cache directory; a compiler:
`$CXX`, g++, clang++, c++.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
OPTIONS = ("-std=gnu++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno")
COMPILE_SECONDS = 300
"""A compiler that takes longer than this is taken for stuck."""


class NativeError(Exception):
    """There is no library, and the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Instructions that a library may use.

    Attributes:
        name: also defined in C++, as `TRIPTYCH_AVX512BF16`.
        needs: flags in /proc/cpuinfo.
        options: of the compiler.
    """

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]


VARIANTS = (
    Variant(
        "avx512bf16",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma", "f16c"}),
        ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
    ),
    Variant("avx2", frozenset({"avx2", "fma", "f16c", "bmi2"}), ("-march=x86-64-v3",)),
    Variant("portable", frozenset(), ()),
)
"""Best first."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where a library may come from.

    Attributes:
        prebuilt: directory that an image fills; read alone.
        cache: directory of this user.
        compilers: commands to try, the first that exists is taken.
    """

    prebuilt: Path
    cache: Path
    compilers: Sequence[str]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Places:
        """As the environment says."""
        home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/")) / ".cache"
        prebuilt = environ.get("TRIPTYCH_NATIVE_DIR") or Path(sys.prefix) / "lib" / "triptych"
        chosen = environ.get("CXX")
        return cls(
            Path(prebuilt), Path(home) / "triptych" / "native", (chosen,) if chosen else COMPILERS
        )


_lock = threading.Lock()
_loaded: list[ctypes.CDLL | None] = []


def library() -> ctypes.CDLL | None:
    """The library of this process; None, said once in the log with the reason, where none is.

    The first call may take as long as a compiler takes.
    """
    with _lock:
        if not _loaded:
            places = Places.of(os.environ)  # noqa: TID251  read once, by the one who needs it
            _loaded.append(_find(places, supported()))
        return _loaded[0]


def function(name: str, *argument_types: Any, returns: Any = None) -> Callable[..., Any] | None:
    """A function of the library with its C types; None where there is none of this name."""
    found = library()
    if found is None or not hasattr(found, name):  # some are for some variants alone
        return None
    return typed(found, name, *argument_types, returns=returns)


def typed(
    of: ctypes.CDLL, name: str, *argument_types: Any, returns: Any = None
) -> Callable[..., Any]:
    """A function of one library with its C types, by itself: another may have it otherwise."""
    return ctypes.CFUNCTYPE(returns, *argument_types)((name, of))


def supported(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[Variant, ...]:
    """What this CPU can run, best first."""
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    return tuple(variant for variant in VARIANTS if variant.needs <= flags)


def build(variant: Variant, places: Places, *, sources: Path = SOURCES) -> Path:
    """The file of a library: prebuilt, cached, or compiled now.

    Safe while other processes do the same: one compiles, the others wait for it.

    Raises:
        NativeError: it cannot be had; names the missing thing.
    """
    prebuilt = places.prebuilt / f"{variant.name}-{_hash(sources, variant)}.so"
    if prebuilt.exists():
        return prebuilt
    compiler = _compiler(places)
    version = _run([compiler, "--version"])
    cached = places.cache / f"{variant.name}-{_hash(sources, variant, version)}.so"
    if cached.exists():
        return cached
    try:
        places.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with cached.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not cached.exists():
                _compile(compiler, variant, sources, cached)
    except OSError as error:
        raise NativeError(f"the cache {places.cache} cannot be written: {error}") from error
    return cached


def prebuild(directory: Path, places: Places) -> list[Path]:
    """Compile every variant into a directory, for machines that have no compiler.

    Raises:
        NativeError: one does not compile.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for variant in VARIANTS:
        files.append(directory / f"{variant.name}-{_hash(SOURCES, variant)}.so")
        _compile(_compiler(places), variant, SOURCES, files[-1])
    return files


def load(path: Path) -> ctypes.CDLL:
    """Load a library and let it run on torch's threads. Raises NativeError."""
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error
    process = ctypes.CDLL(None)  # torch's dependencies are global symbols
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    if all(hasattr(process, name) for name in names):
        entries = [ctypes.cast(getattr(process, name), ctypes.c_void_p) for name in names]
        found.triptych_use_openmp(*entries)
    else:
        logger.warning("no OpenMP runtime is loaded: native kernels run in one thread")
    return found


def _find(places: Places, variants: Sequence[Variant]) -> ctypes.CDLL | None:
    """The best variant that can be had; says in the log what came of it."""
    for variant in variants:
        began = time.monotonic()
        try:
            found = load(build(variant, places))
        except NativeError as error:
            logger.warning("no native kernels for %s: %s", variant.name, error)
            continue
        seconds = time.monotonic() - began
        logger.info("native kernels: %s, ready after %.1f s", variant.name, seconds)
        return found
    logger.warning("no native kernels at all: torch computes instead, slower")
    return None


def _compiler(places: Places) -> str:
    for name in places.compilers:
        found = shutil.which(name)
        if found is not None:
            return found
    raise NativeError(f"no C++ compiler: install one of {', '.join(places.compilers)}, or set CXX")


def _hash(sources: Path, variant: Variant, *more: str) -> str:
    """Of all that the library is made from."""
    digest = hashlib.sha256()
    for part in (*OPTIONS, *variant.options, *more):
        digest.update(part.encode() + b"\0")
    for file in sorted([*sources.glob("*.h"), *sources.glob("*.cpp")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(compiler: str, variant: Variant, sources: Path, target: Path) -> None:
    """Objects side by side, then one library, which appears under its name when it is whole."""
    options = (*OPTIONS, *variant.options, f"-DTRIPTYCH_{variant.name.upper()}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as name:
        files = sorted(sources.glob("*.cpp"))
        objects = [Path(name) / f"{file.stem}.o" for file in files]
        commands = [
            [compiler, *options, "-c", str(file), "-o", str(made)]
            for file, made in zip(files, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        whole = Path(name) / "whole.so"
        _run([compiler, "-shared", *map(str, objects), "-o", str(whole)])
        whole.rename(target)


def _run(command: Sequence[str]) -> str:
    """What a command prints; raises NativeError with the first line that says why it failed."""
    try:
        done = subprocess.run(  # noqa: S603  our own arguments
            command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{command[0]} does not run: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise NativeError(f"{command[0]} failed with status {done.returncode}: {first.strip()}")
    return done.stdout
