"""Small files of many pixels: over the limit they end at the header, at it in a bounded child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
import zlib
from statistics import median

import numpy as np
import pytest
from PIL import Image
from worker.media.files import OF_SIZE, chunk, encode, noise, with_chunk, zeros_png
from worker.media.pooling import FAMILY, proc, spec_of, until, works

from vlm_worker.errors import InvalidImageError
from vlm_worker.media.image_header import ImageLimits, read_header
from vlm_worker.media.pixels import UndecodableError, decode_rgb
from vlm_worker.media.pool import DECODE_MEMORY_BYTES, MediaPool, MediaSettings
from vlm_worker.types import PreparedImage

MAX_PIXELS = ImageLimits().max_pixels
SIDE = 4096


@pytest.mark.parametrize("fmt", OF_SIZE)
@pytest.mark.parametrize(
    ("width", "height", "passes"),
    [
        pytest.param(SIDE, SIDE - 1, True, id="a row less"),
        pytest.param(SIDE, SIDE, True, id="the limit"),
        pytest.param(SIDE, SIDE + 1, False, id="a row more"),
    ],
)
def test_the_header_alone_decides(fmt: str, width: int, height: int, passes: bool) -> None:
    assert SIDE * SIDE == MAX_PIXELS
    data = OF_SIZE[fmt](width, height)
    if passes:
        assert read_header(data, item=0).width == width
        return
    with pytest.raises(InvalidImageError, match=f"{width}x{height}") as caught:
        read_header(data, item=0)
    assert caught.value.code == "image_too_large"


BOMBS = {
    "PNG 13000x13000": lambda: zeros_png(13000, 13000),
    "WebP 16383x5400": lambda: OF_SIZE["WEBP"](16383, 5400),
    "JPEG 9400x9400": lambda: OF_SIZE["JPEG"](9400, 9400),
    "GIF 9400x9400": lambda: OF_SIZE["GIF"](9400, 9400),
}
"""Each takes more than a child has, in memory or in time."""


@pytest.fixture(scope="module", params=BOMBS)
def bomb(request: pytest.FixtureRequest) -> bytes:
    return BOMBS[request.param]()


async def test_a_bomb_ends_at_the_header(pool: MediaPool, bomb: bytes) -> None:
    before = pool.pids
    with pytest.raises(InvalidImageError, match="at most 8192 a side") as caught:
        await pool.prepare(bomb, spec_of(bomb))
    assert caught.value.code == "image_too_large"
    assert pool.pids == before


async def test_a_bomb_past_the_header_ends_in_the_child(unguarded: MediaPool, bomb: bytes) -> None:
    """Should the header check ever fail, the kernel's bounds hold and the worker does not grow."""
    spec = spec_of(bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (ended,) = await asyncio.gather(unguarded.prepare(bomb, spec), return_exceptions=True)
    if spec.format == "GIF":  # a byte a pixel: this one may fit
        assert isinstance(ended, PreparedImage | InvalidImageError)
    else:
        assert isinstance(ended, InvalidImageError)
    assert "a side" not in str(ended)  # the header check let it through
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024
    await works(unguarded)


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held."""
    status = (proc(pid, "status") or b"").decode()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def cpu_seconds(pid: int) -> float:
    ticks = (proc(pid, "stat") or b"").split()[13:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("fmt", OF_SIZE)
async def test_the_largest_image_passes_within_a_childs_bounds(fmt: str, pool: MediaPool) -> None:
    (child,) = pool.pids
    idle, begun = peak_bytes(child), cpu_seconds(child)
    data = OF_SIZE[fmt](SIDE, SIDE)
    assert (await pool.prepare(data, spec_of(data))).num_tokens == 256
    grown, took = peak_bytes(child) - idle, cpu_seconds(child) - begun
    print(f"{fmt} of {SIDE}x{SIDE}: {grown >> 20} MiB, {took:.2f} s of CPU")
    assert grown <= DECODE_MEMORY_BYTES
    assert pool.pids == {child}


async def test_with_alpha_the_largest_image_passes_too(pool: MediaPool) -> None:
    image = Image.new("RGBA", (SIDE, SIDE), (9, 80, 200, 128))
    data = encode(image, "WEBP", lossless=True, method=0)
    (child,) = pool.pids
    idle = peak_bytes(child)
    assert (await pool.prepare(data, spec_of(data))).num_tokens == 256
    assert peak_bytes(child) - idle <= DECODE_MEMORY_BYTES


def big_text() -> bytes:
    return zlib.compress(bytes(64 << 20), 9)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param(b"zTXt", lambda: b"k\0\0" + big_text(), id="zTXt"),
        pytest.param(b"iTXt", lambda: b"k\0\1\0\0\0" + big_text(), id="iTXt"),
        pytest.param(b"iCCP", lambda: b"k\0\0" + big_text(), id="iCCP"),
        pytest.param(b"eXIf", lambda: b"II*\0\x08\0\0\0\xff\xff" + bytes(1 << 20), id="eXIf"),
        pytest.param(b"tEXt", lambda: b"XML:com.adobe.xmp\0" + bytes(1 << 20), id="XMP"),
    ],
)
def test_what_stands_beside_the_pixels_costs_little_and_changes_nothing(
    kind: bytes, body: object
) -> None:
    assert callable(body)
    plain = encode(noise())
    wanted = decode_rgb(plain, read_header(plain, item=0))
    data = with_chunk(plain, kind, body())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with contextlib.suppress(UndecodableError):
        np.testing.assert_array_equal(decode_rgb(data, read_header(data, item=0)), wanted)
    took = time.process_time() - start
    print(f"{kind.decode()}: {took * 1e3:.1f} ms")
    assert took < 3 * 0.05
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_sixty_text_chunks_of_a_megabyte_cost_little_too() -> None:
    packed = b"k\0\0" + zlib.compress(bytes(1 << 20), 9)
    plain = encode(noise())
    data = plain[:33] + chunk(b"zTXt", packed) * 60 + plain[33:]
    start = time.process_time()
    np.testing.assert_array_equal(
        decode_rgb(data, read_header(data, item=0)),
        decode_rgb(plain, read_header(plain, item=0)),
    )
    took = time.process_time() - start
    print(f"60 zTXt of 1 MB: {took * 1e3:.1f} ms")
    assert took < 3 * 0.5


async def test_sixteen_large_images_starve_no_small_one() -> None:
    """One place is never theirs."""
    large = OF_SIZE["PNG"](SIDE, SIDE)
    pool = MediaPool(FAMILY.processor, model_revision="r", settings=MediaSettings(num_children=2))
    await pool.start()
    alone = await _small_ones(pool)
    spec = spec_of(large)
    bombs = [asyncio.create_task(pool.prepare(large, spec)) for _ in range(16)]
    await until(lambda: 0 < pool.num_waiting < 16)  # the first one is being decoded
    beside = await _small_ones(pool)
    assert pool.num_waiting >= 8  # the others waited all the time
    print(f"a small image: {alone * 1e3:.1f} ms, beside 16 large ones {beside * 1e3:.1f} ms")
    for bomb in bombs:
        bomb.cancel()
    await asyncio.gather(*bombs, return_exceptions=True)
    await pool.close()


async def _small_ones(pool: MediaPool) -> float:
    """Seconds that the median of twenty took, one after the other."""
    taken = []
    for seed in range(20):
        data = encode(noise(seed=seed))
        start = time.perf_counter()
        await pool.prepare(data, spec_of(data))
        taken.append(time.perf_counter() - start)
    return median(taken)
