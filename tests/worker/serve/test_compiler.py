"""What torch compiles is kept beside the worker's other builds, unless somebody says otherwise."""

from __future__ import annotations

import pytest

from vlm_worker.serve.process import keep_compiled

DIR, THREADS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.mark.parametrize(
    ("environ", "directory", "threads"),
    [
        ({"HOME": "/home/u"}, "/home/u/.cache/triptych/compiled", "1"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/volume"}, "/volume/triptych/compiled", "1"),
        ({"XDG_CACHE_HOME": "/volume", DIR: "/mine", THREADS: "4"}, "/mine", "4"),
        ({}, "/.cache/triptych/compiled", "1"),
    ],
)
def test_what_is_compiled_has_a_place_of_its_own(
    environ: dict[str, str], directory: str, threads: str
) -> None:
    keep_compiled(environ)
    assert (environ[DIR], environ[THREADS]) == (directory, threads)
