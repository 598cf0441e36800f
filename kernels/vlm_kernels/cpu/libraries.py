"""Finds or builds the libraries of C++ kernels, by the instructions that this CPU supports.

    *.cpp, *.h ─▶ prebuilt? ─▶ cached? ─▶ compile, cache ─▶ file

All .cpp files of this folder form one library per variant, a set of instructions. The search order
is: `$TRIPTYCH_NATIVE_DIR` or `<sys.prefix>/lib/triptych`, which an image build fills
(`python -m vlm_kernels.cpu DIR`); the user's cache directory; a compiler: `$CXX`, g++, clang++,
c++, with `$CXXFLAGS`. `$TRIPTYCH_NATIVE` selects one variant, or `none`.
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
"""Limit for one file, because a process waits for its kernels. An image build has no limit."""
VERSION_SECONDS = 60


class NativeError(Exception):
    """No library is available; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The instructions that a library may use.

    Attributes:
        name: also defined in C++, as `TRIPTYCH_AVX512BF16`.
        needs: flags in /proc/cpuinfo.
        options: of the compiler.
        machines: architectures with these instructions, by `platform.machine()`; empty for all.
    """

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]
    machines: frozenset[str] = frozenset()


V3 = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "xsave"})
"""CPU flags of the instructions that a compiler may use for x86-64-v3."""

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
    """The places that may have a library.

    Attributes:
        prebuilt: directory that an image build fills; only read here.
        cache: directory of this user.
        compilers: commands to try; the first that exists is used.
        options: additional options of the compiler.
    """

    prebuilt: Path
    cache: Path
    compilers: Sequence[str]
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Places:
        """The places that the environment variables give."""
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
    """The variants that this CPU supports, best first."""
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    return tuple(variant for variant in VARIANTS if variant.needs <= flags)


def wanted(name: str | None, variants: Sequence[Variant]) -> Sequence[Variant]:
    """The supported variants to try: all, or the one of this name.

    Raises:
        ValueError: the name is neither one of these nor `none`.
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

    Safe with concurrent processes: one compiles, the others wait for it.

    Raises:
        NativeError: no library is available; the text names what is missing.
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

    There is no time limit: no pod waits for it, and builders may be slow or emulated.

    Raises:
        NativeError: a variant does not compile.
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
    """Hash of everything from which the library is built."""
    digest = hashlib.sha256()
    for part in (*OPTIONS, *variant.options, *more):
        digest.update(part.encode() + b"\0")
    for file in sorted([*sources.glob("*.h"), *sources.glob("*.cpp")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _is_whole(path: Path) -> bool:
    """Whether a library ends in its digest: loading a truncated file would crash the process."""
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
    """Compile objects in parallel, then link one library, which is renamed when it is complete.

    `seconds` limits each command; None sets no limit.
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
            file.write(digest)  # after the last part of the library: loaders do not read it
        whole.rename(target)


def _run(command: Sequence[str], seconds: float | None) -> str:
    """The output of a command; raises NativeError with the first line that explains a failure."""
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
