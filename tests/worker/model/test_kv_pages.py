"""Pages ahead of the blocks in use are there before a step writes to them, and no others are."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap

import numpy as np
import pytest
import torch

from vlm_worker.model import memory as kv_pages
from vlm_worker.model.memory import POPULATE_WRITE, KVPrefault, make_kv_cache
from vlm_worker.types import ITEMSIZE, KVLayout

PAGE = mmap.PAGESIZE
AHEAD, STEP = 8 * PAGE, 2 * PAGE
LAYOUT = KVLayout("r", 1, 1, 8, PAGE // 32, "bfloat16")
"""A block is a page."""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """32 blocks, no huge pages."""
    monkeypatch.setattr(kv_pages, "PREFAULT_BYTES", AHEAD)
    monkeypatch.setattr(kv_pages, "STEP_BYTES", STEP)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert LAYOUT.block_bytes == PAGE
    with mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        try:  # by Python's own way, so that a mistake in ours is skipped nowhere
            memory.madvise(POPULATE_WRITE)
        except OSError:
            pytest.skip("this system makes no pages ahead of use: Linux does since 5.14")
    return make_kv_cache(LAYOUT, 32, torch.device("cpu"))


def present(cache: torch.Tensor) -> list[bool]:
    """Whether the page of each block is there."""
    told = (ctypes.c_ubyte * len(cache))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(cache.data_ptr(), cache.nbytes, told) == 0
    return [bool(one & 1) for one in told]


def num_steps(pages: KVPrefault) -> int:
    """Of work, until there is no more."""
    count = 0
    while pages.prefault_next():
        count += 1
    return count


def test_so_much_is_had_before_anything_is_used(cache: torch.Tensor) -> None:
    assert not any(present(cache))
    assert num_steps(KVPrefault(cache)) == 4
    assert present(cache) == [True] * 8 + [False] * 24


def test_as_much_is_had_behind_the_last_block_in_use(cache: torch.Tensor) -> None:
    pages = KVPrefault(cache)
    pages.use(np.array([3, 12, 7]))
    cache[:13] = 1
    num_steps(pages)
    assert present(cache) == [True] * 22 + [False] * 10
    assert bool((cache[:13] == 1).all())
    assert bool((cache[13:22] == 0).all())
    pages.use(np.array([2]))
    assert not pages.prefault_next()


def test_what_was_written_first_keeps_what_it_holds(cache: torch.Tensor) -> None:
    cache[5] = 7
    num_steps(KVPrefault(cache))
    assert bool((cache[5] == 7).all())
    assert not bool(cache[:5].any())


def test_no_page_beyond_the_cache_is_asked_for(cache: torch.Tensor) -> None:
    pages = KVPrefault(cache)
    pages.use(np.array([31]))
    assert num_steps(pages) <= 1
    pages.use(np.array([28]))
    assert not pages.prefault_next()


def test_a_system_that_gives_none_is_asked_once(
    cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pages, "POPULATE_WRITE", -1)
    pages = KVPrefault(cache)
    assert not pages.prefault_next()
    assert not any(present(cache))
    pages.use(np.array([9]))
    assert not pages.prefault_next()


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_a_cache_has_the_bytes_of_its_layout(dtype: str) -> None:
    layout = dataclasses.replace(LAYOUT, dtype=dtype)
    cache = make_kv_cache(layout, 3, torch.device("cpu"))
    assert cache.nbytes == 3 * layout.block_bytes
    assert str(cache.dtype) == f"torch.{dtype}"
