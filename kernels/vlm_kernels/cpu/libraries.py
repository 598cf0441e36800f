"""Libraries of C++ kernels in files: which this CPU can run, and where each comes from.

    *.cpp, *.h ─▶ prebuilt? ─▶ cached? ─▶ compile, cache ─▶ file

Every .cpp beside this file goes into one library per variant, the instructions that it may use.
Looked for, in this order: `$TRIPTYCH_NATIVE_DIR` or `<sys.prefix>/lib/triptych`, which an image
fills at build time (`python -m vlm_kernels.cpu DIR`); the user's cache directory; a compiler:
`$CXX`, g++, clang++, c++, with `$CXXFLAGS`. `$TRIPTYCH_NATIVE` names one variant, or `none`.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
OPTIONS = ("-std=gnu++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno")
DIGEST_BYTES = 32
COMPILE_SECONDS = 900
"""For one file, while a process waits for its kernels. An image build has no limit."""
VERSION_SECONDS = 60


class NativeError(Exception):
    """There is no library, and the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Instructions that a library may use.

    Attributes:
        name: also defined in C++, as `TRIPTYCH_AVX512BF16`.
        needs: flags in /proc/cpuinfo.
        options: of the compiler.
        machines: that have such instructions, by `platform.machine()`; empty for all.
    """

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]
    machines: frozenset[str] = frozenset()


V3 = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "xsave"})
"""Flags of what a compiler may use for x86-64-v3."""

X86 = frozenset({"x86_64", "amd64"})

AVX512BF16 = Variant(
    "avx512bf16",
    V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"},
    ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mprefer-vector-width=512"),
    X86,
)
VARIANTS = (
    Variant(
        "amx",
        AVX512BF16.needs | {"amx_tile", "amx_bf16", "amx_int8"},
        (*AVX512BF16.options, "-DTRIPTYCH_AVX512BF16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        X86,
    ),
    AVX512BF16,
    Variant("avx2", V3, ("-march=x86-64-v3",), X86),
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
        options: more of them for the compiler.
    """

    prebuilt: Path
    cache: Path
    compilers: Sequence[str]
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Places:
        """As the environment says."""
        home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/")) / ".cache"
        prebuilt = environ.get("TRIPTYCH_NATIVE_DIR") or Path(sys.prefix) / "lib" / "triptych"
        chosen = environ.get("CXX")
        return cls(
            Path(prebuilt),
            Path(home) / "triptych" / "native",
            (chosen,) if chosen else COMPILERS,
            tuple(shlex.split(environ.get("CXXFLAGS", ""))),
        )


def supported(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[Variant, ...]:
    """What this CPU can run, best first."""
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    return tuple(variant for variant in VARIANTS if variant.needs <= flags)


def wanted(name: str | None, variants: Sequence[Variant]) -> Sequence[Variant]:
    """Of the variants that the CPU can run, those to try: all, or what somebody names.

    Raises:
        ValueError: the name is none of these, nor `none`.
    """
    if not name:
        return variants
    if name == "none":
        return ()
    named = [variant for variant in variants if variant.name == name]
    if not named:
        can = ", ".join(variant.name for variant in variants)
        raise ValueError(f"TRIPTYCH_NATIVE is {name!r}: this CPU can run {can}; or none")
    return named


def build(variant: Variant, places: Places, *, sources: Path = SOURCES) -> Path:
    """The file of a library: prebuilt, cached, or compiled now; a damaged one is not used.

    Safe while other processes do the same: one compiles, the others wait for it.

    Raises:
        NativeError: it cannot be had; names the missing thing.
    """
    for options in dict.fromkeys((places.options, ())):
        prebuilt = places.prebuilt / f"{variant.name}-{_hash(sources, variant, *options)}.so"
        if _is_whole(prebuilt):
            if options != places.options:
                logger.warning(
                    "CXXFLAGS is ignored: the prebuilt %s is used as it is", variant.name
                )
            return prebuilt
    compiler = _compiler(places)
    version = _run([compiler, "--version"], VERSION_SECONDS)
    cached = places.cache / f"{variant.name}-{_hash(sources, variant, *places.options, version)}.so"
    if _is_whole(cached):
        return cached
    try:
        places.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with cached.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(cached):
                logger.info("compiling native kernels: %s", variant.name)
                _compile(compiler, variant, sources, cached, places.options)
    except OSError as error:
        raise NativeError(
            f"the cache {places.cache} cannot be written: {error}; set XDG_CACHE_HOME"
        ) from error
    return cached


def made_for(machine: str) -> tuple[Variant, ...]:
    """The variants that a CPU of this architecture may run, best first."""
    return tuple(one for one in VARIANTS if not one.machines or machine.lower() in one.machines)


def prebuild(
    directory: Path, places: Places, *, machine: str, sources: Path = SOURCES
) -> list[Path]:
    """Compile every variant of an architecture into a directory, for machines without a compiler.

    It takes as long as it takes: nobody waits for a pod, and builders may be slow or emulated.

    Raises:
        NativeError: one does not compile.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for variant in made_for(machine):
        files.append(directory / f"{variant.name}-{_hash(sources, variant, *places.options)}.so")
        _compile(_compiler(places), variant, sources, files[-1], places.options, seconds=None)
    return files


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


def _is_whole(path: Path) -> bool:
    """Whether a library ends in the digest of all before: mapping half a file ends a process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _compile(
    compiler: str,
    variant: Variant,
    sources: Path,
    target: Path,
    more_options: tuple[str, ...],
    *,
    seconds: float | None = COMPILE_SECONDS,
) -> None:
    """Objects side by side, then one library, which appears under its name when it is whole.

    `seconds` bounds each command; None for no bound.
    """
    defined = f"-DTRIPTYCH_{variant.name.upper()}"
    options = (*OPTIONS, *variant.options, defined, *more_options)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as name:
        files = sorted(sources.glob("*.cpp"))
        objects = [Path(name) / f"{file.stem}.o" for file in files]
        commands = [
            [compiler, *options, "-c", str(file), "-o", str(made)]
            for file, made in zip(files, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda command: _run(command, seconds), commands))
        whole = Path(name) / "whole.so"
        linking = [compiler, *more_options, "-shared", *map(str, objects), "-o", str(whole)]
        _run(linking, seconds)
        digest = hashlib.sha256(whole.read_bytes()).digest()
        with whole.open("ab") as file:
            file.write(digest)  # no part of the library ends there: loaders do not read it
        whole.rename(target)


def _run(command: Sequence[str], seconds: float | None) -> str:
    """What a command prints; raises NativeError with the first line that says why it failed."""
    try:
        done = subprocess.run(  # noqa: S603  our own arguments
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except OSError as error:
        raise NativeError(f"{command[0]} does not run: {error}") from error
    except subprocess.TimeoutExpired as error:
        what = next((Path(word).name for word in command if word.endswith(".cpp")), "its answer")
        raise NativeError(
            f"{command[0]} was still at work on {what} after {seconds:g} s: this machine is too "
            "slow to compile while a process waits; build the libraries beforehand with "
            "`python -m vlm_kernels.cpu DIR` and set TRIPTYCH_NATIVE_DIR"
        ) from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise NativeError(f"{command[0]} failed with status {done.returncode}: {first.strip()}")
    return done.stdout
