"""The native library is built once; if that fails, a log line says why, and torch computes."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import platform
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from vlm_kernels.cpu import libraries, native

PORTABLE = libraries.VARIANTS[-1]

ANSWER = """
#include "threads.h"
TRIPTYCH_EXPORT int triptych_answer() { return ANSWER; }
TRIPTYCH_EXPORT int triptych_sum(int count, int num_threads) {
  std::atomic<int> sum{0};
  triptych::parallel_for(num_threads, count, [&](std::ptrdiff_t i) { sum += int(i); });
  return sum;
}
TRIPTYCH_EXPORT bool triptych_mix(uint32_t* values, int size, int num_loops, int num_threads) {
  triptych::in_team(num_threads, [&](triptych::Threads& threads) {
    for (int loop = 0; loop < num_loops; ++loop) {
      const uint32_t* from = values + loop % 2 * size;
      uint32_t* to = values + (loop + 1) % 2 * size;
      threads.for_each(size, [&](std::ptrdiff_t i) { to[i] = 3 * from[i] + from[(i + 1) % size]; });
    }
  });
  return true;
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources of a small library, which compile in a second."""
    directory = tmp_path / "sources"
    directory.mkdir()
    for name in ("threads.h", "threads.cpp"):
        shutil.copy(libraries.SOURCES / name, directory)
    (directory / "answer.h").write_text("#define ANSWER 41\n")
    (directory / "answer.cpp").write_text('#include "answer.h"' + ANSWER)
    return directory


@pytest.fixture
def compiler() -> str:
    found = next((path for name in libraries.COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no C++ compiler on this machine: there is nothing to build")
    return found


class Places:
    """Directories of a test, and a compiler that counts its calls."""

    def __init__(self, root: Path, compiler: str) -> None:
        self.calls = root / "calls"
        script = root / "counting-compiler"
        script.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\nexec {compiler} "$@"\n')
        script.chmod(0o755)
        self.value = libraries.Places(root / "prebuilt", root / "cache", (str(script),))

    @property
    def num_links(self) -> int:
        return self.calls.read_text().count("-shared") if self.calls.exists() else 0


@pytest.fixture
def places(tmp_path: Path, compiler: str) -> Places:
    return Places(tmp_path, compiler)


def answer(path: Path) -> int:
    value = native.typed(native.load(path), "triptych_answer", returns=ctypes.c_int)()
    assert isinstance(value, int)
    return value


def test_a_library_is_compiled_once_and_again_when_a_header_changes(
    sources: Path, places: Places
) -> None:
    first = libraries.build(PORTABLE, places.value, sources=sources)
    assert answer(first) == 41
    assert libraries.build(PORTABLE, places.value, sources=sources) == first
    assert places.num_links == 1
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    second = libraries.build(PORTABLE, places.value, sources=sources)
    assert second != first
    assert answer(second) == 42
    assert places.num_links == 2


def test_concurrent_builds_wait_for_one_compiler(sources: Path, places: Places) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(libraries.build(PORTABLE, places.value, sources=sources))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert answer(found[0]) == 41
    assert places.num_links == 1
    assert [path for path in places.value.cache.iterdir() if path.name.startswith("build")] == []


def test_work_is_shared_by_threads_and_each_piece_is_done_once(
    sources: Path, places: Places
) -> None:
    library = native.load(libraries.build(PORTABLE, places.value, sources=sources))
    add = native.typed(library, "triptych_sum", ctypes.c_int, ctypes.c_int, returns=ctypes.c_int)
    for num_threads in (1, 2, 5):
        assert add(1000, num_threads) == 499_500


def test_members_of_a_team_see_what_all_did_in_the_loop_before(
    sources: Path, places: Places
) -> None:
    library = native.load(libraries.build(PORTABLE, places.value, sources=sources))
    mix = native.typed(library, "triptych_mix", ctypes.c_void_p, *[ctypes.c_int] * 3)
    first = np.arange(40, dtype=np.uint32)
    want = first
    for _ in range(200):
        want = 3 * want + np.roll(want, -1)
    for num_threads in (1, 2, 5):  # of five, some sleep: this machine may have two cores
        values = np.concatenate([first, np.zeros_like(first)])
        mix(values.ctypes.data, len(first), 200, num_threads)
        np.testing.assert_array_equal(values[:40], want)


def test_this_process_has_the_best_library_that_its_cpu_can_run() -> None:
    """Tests of a library that cannot be loaded are passed over: this one is not."""
    asked = os.environ.get("TRIPTYCH_NATIVE")  # noqa: TID251  as `native` reads it
    if asked == "none" or not any(map(shutil.which, libraries.COMPILERS)):
        pytest.skip("no native library is wanted, or no compiler is here")
    assert native.variant_name() == libraries.wanted(asked, libraries.supported())[0].name


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    if native.library() is None:
        pytest.skip("no native library on this machine")
    mapped = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line or "libiomp" in line or "libomp" in line
    }
    assert len(mapped) == 1, f"torch and the kernels would fight for the cores: {mapped}"


def test_a_prebuilt_library_needs_no_compiler(sources: Path, places: Places) -> None:
    built = libraries.build(PORTABLE, places.value, sources=sources)
    prebuilt = places.value.prebuilt
    prebuilt.mkdir()
    target = prebuilt / f"{PORTABLE.name}-{libraries._hash(sources, PORTABLE)}.so"
    shutil.copy(built, target)
    without = libraries.Places(prebuilt, places.value.cache, ("no-such-compiler",))
    assert libraries.build(PORTABLE, without, sources=sources) == target


def test_a_prebuilt_library_is_used_whatever_options_a_compiler_would_get(
    sources: Path, places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod with CXXFLAGS has no compiler, and torch would compute instead."""
    built = libraries.build(PORTABLE, places.value, sources=sources)
    prebuilt = places.value.prebuilt
    prebuilt.mkdir()
    target = prebuilt / f"{PORTABLE.name}-{libraries._hash(sources, PORTABLE)}.so"
    shutil.copy(built, target)
    without = libraries.Places(prebuilt, places.value.cache, ("no-such-compiler",), ("-g",))
    assert libraries.build(PORTABLE, without, sources=sources) == target
    assert "CXXFLAGS is ignored" in caplog.text
    own = prebuilt / f"{PORTABLE.name}-{libraries._hash(sources, PORTABLE, '-g')}.so"
    shutil.copy(built, own)
    assert libraries.build(PORTABLE, without, sources=sources) == own, "made with these options"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(None, "no C\\+\\+ compiler: install one of", id="no compiler"),
        pytest.param("#!/bin/sh\nexit 3\n", "status 3", id="a compiler that fails"),
        pytest.param(
            '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: no header" >&2\n'
            "exit 1\n",
            "no header",
            id="a header is missing",
        ),
    ],
)
def test_without_a_library_the_reason_is_said_and_torch_computes(
    script: str | None, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "compiler"
    if script is not None:
        compiler.write_text(script)
        compiler.chmod(0o755)
    places = libraries.Places(tmp_path / "none", tmp_path / "cache", (str(compiler),))
    with pytest.raises(libraries.NativeError, match=reason):
        libraries.build(PORTABLE, places)
    with caplog.at_level(logging.INFO):
        assert native._find(places, (PORTABLE,)) == native.Library(None, "none")
    assert caplog.records[-1].getMessage() == (
        "no native kernels at all: torch computes instead, slower"
    )


def test_a_damaged_library_is_no_reason_to_fail(tmp_path: Path) -> None:
    damaged = tmp_path / "library.so"
    damaged.write_bytes(b"not a library")
    with pytest.raises(libraries.NativeError, match="cannot be loaded"):
        native.load(damaged)


@pytest.mark.parametrize("num_bytes", [0, 5_000, -1])
def test_a_library_that_was_cut_off_is_compiled_again(
    num_bytes: int, sources: Path, places: Places
) -> None:
    path = libraries.build(PORTABLE, places.value, sources=sources)
    path.write_bytes(path.read_bytes()[:num_bytes])
    again = libraries.build(PORTABLE, places.value, sources=sources)
    assert (again, places.num_links) == (path, 2)
    assert answer(again) == 41


def test_a_damaged_prebuilt_library_is_passed_over(sources: Path, places: Places) -> None:
    built = libraries.build(PORTABLE, places.value, sources=sources)
    places.value.prebuilt.mkdir()
    damaged = places.value.prebuilt / f"{PORTABLE.name}-{libraries._hash(sources, PORTABLE)}.so"
    damaged.write_bytes(built.read_bytes()[:-100])
    assert libraries.build(PORTABLE, places.value, sources=sources) == built


def test_a_library_whose_tiles_the_system_withholds_is_not_used(
    sources: Path, places: Places
) -> None:
    refused = "TRIPTYCH_EXPORT int triptych_ask_for_tiles() { return 0; }"
    (sources / "tiles.cpp").write_text(f'#include "threads.h"\n{refused}\n')
    with pytest.raises(libraries.NativeError, match="tiles of AMX"):
        native.load(libraries.build(PORTABLE, places.value, sources=sources))


def test_options_of_the_compiler_make_a_library_of_their_own(sources: Path, places: Places) -> None:
    plain = libraries.build(PORTABLE, places.value, sources=sources)
    chosen = dataclasses.replace(places.value, options=("-DEXTRA=1",))
    assert libraries.build(PORTABLE, chosen, sources=sources) != plain
    assert "-DEXTRA=1" in places.calls.read_text()


@pytest.mark.parametrize(
    ("name", "tried"),
    [(None, ["avx2", "portable"]), ("portable", ["portable"]), ("none", [])],
)
def test_a_variant_may_be_named(name: str | None, tried: list[str]) -> None:
    assert [v.name for v in libraries.wanted(name, libraries.VARIANTS[2:])] == tried


def test_a_variant_that_the_cpu_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"avx512bf16.*can run avx2, portable; or none"):
        libraries.wanted("avx512bf16", libraries.VARIANTS[2:])


def test_a_cache_that_cannot_be_written_is_named(
    sources: Path, places: Places, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    nowhere = libraries.Places(tmp_path / "none", tmp_path / "file" / "x", places.value.compilers)
    with pytest.raises(libraries.NativeError, match="cannot be written"):
        libraries.build(PORTABLE, nowhere, sources=sources)


def test_the_best_variant_that_the_cpu_can_run_comes_first(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert [v.name for v in libraries.supported(cpuinfo)] == ["portable"]
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {' '.join(libraries.V3)}\n")
    assert [v.name for v in libraries.supported(cpuinfo)] == ["avx2", "portable"]
    for best, variant in enumerate(libraries.VARIANTS):
        flags = " ".join(variant.needs)
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        assert libraries.supported(cpuinfo) == libraries.VARIANTS[best:]


def test_the_environment_says_where_a_library_comes_from() -> None:
    chosen = libraries.Places.of(
        {"XDG_CACHE_HOME": "/c", "CXX": "mine", "CXXFLAGS": "-g -O1", "TRIPTYCH_NATIVE_DIR": "/p"}
    )
    cache = Path("/c/triptych/native")
    assert chosen == libraries.Places(Path("/p"), cache, ("mine",), ("-g", "-O1"))
    plain = libraries.Places.of({"HOME": "/h"})
    assert plain.cache == Path("/h/.cache/triptych/native")
    assert plain.prebuilt == Path(sys.prefix) / "lib" / "triptych"
    assert plain.compilers == libraries.COMPILERS


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        ("x86_64", ["amx", "avx512bf16", "avx2", "portable"]),
        ("AMD64", ["amx", "avx512bf16", "avx2", "portable"]),
        ("aarch64", ["portable"]),
        ("riscv64", ["portable"]),
    ],
)
def test_an_image_has_the_variants_of_its_architecture(
    machine: str, names: list[str], sources: Path, tmp_path: Path
) -> None:
    log = tmp_path / "commands"
    fake = tmp_path / "g++"  # creates the requested file and records its options
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        'while [ "$1" != -o ]; do shift; done\nprintf object > "$2"\n'
    )
    fake.chmod(0o755)
    places = libraries.Places(tmp_path / "none", tmp_path / "cache", (str(fake),))
    made = libraries.prebuild(tmp_path / "image", places, machine=machine, sources=sources)
    assert [file.name.rpartition("-")[0] for file in made] == names
    if names == ["portable"]:
        assert "-m" not in [word[:2] for word in log.read_text().split()]


def test_a_compiler_that_takes_too_long_is_named_with_its_file_and_a_remedy(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "g++"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 60\n')
    slow.chmod(0o755)
    places = libraries.Places(tmp_path / "none", tmp_path / "cache", (str(slow),))
    with pytest.raises(libraries.NativeError, match=r"still at work on \w+\.cpp after 0\.1 s.*DIR"):
        libraries._run([str(slow), "-c", "kernels.cpp"], 0.1)
    monkeypatch.setattr(libraries, "COMPILE_SECONDS", 0.1)
    slow.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.3; echo > "$2"\n')
    libraries.prebuild(tmp_path / "image", places, machine="aarch64", sources=sources)


@pytest.mark.full
def test_every_variant_compiles_for_an_image(tmp_path: Path, compiler: str) -> None:
    places = libraries.Places(tmp_path / "none", tmp_path / "cache", (compiler,))
    machine = platform.machine()
    made = libraries.prebuild(tmp_path / "image", places, machine=machine)
    assert len(made) == len(libraries.made_for(machine))
    without = libraries.Places(tmp_path / "image", tmp_path / "none", ())
    for variant in libraries.supported():
        native.load(libraries.build(variant, without))
