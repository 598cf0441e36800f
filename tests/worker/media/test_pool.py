"""Decode children die; the pool, and every other picture, live on. Real processes throughout."""

import asyncio
import io
import os
import random
import resource
import signal
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlm_worker.core.families import load_family
from vlm_worker.core.geometry import picture_geometry
from vlm_worker.errors import (
    EngineError,
    InvalidImageError,
    InvalidRequestError,
    OverloadedError,
)
from vlm_worker.media.child import DecodeChild
from vlm_worker.media.frames import ChildConfig
from vlm_worker.media.header import ImageLimits, read_header
from vlm_worker.media.patches import image_key, make_patches
from vlm_worker.media.pixels import decode_rgb
from vlm_worker.media.pool import ImageSpec, MediaPool, MediaSettings, MediaTimes

MODEL = Path(__file__).parents[3] / "examples" / "shapes" / "model"
FAMILY = load_family(MODEL)
UNLIMITED = ImageLimits(max_bytes=1 << 30, max_pixels=1 << 40, max_side=1 << 20)


def encode(image: Image.Image, fmt: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def noise(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def spec_of(data: bytes, *, max_pixels: int = 0, salt: bytes = b"") -> ImageSpec:
    """What a gateway would say of the file; hostile sizes included."""
    header = read_header(data, item=2, limits=UNLIMITED)
    geometry = FAMILY.geometry(header.height, header.width, max_pixels=max_pixels)
    return ImageSpec(
        2, header.format, header.width, header.height, geometry.num_tokens, max_pixels, salt
    )


def proc(pid: int, name: str) -> bytes | None:
    """A file of a process, None where the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except FileNotFoundError:
        return None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # another process's state announces itself to nobody


@pytest.fixture
async def times() -> list[MediaTimes]:
    return []


@pytest.fixture
async def pool(times: list[MediaTimes]) -> AsyncIterator[MediaPool]:
    pool = MediaPool(
        FAMILY.processor,
        model_revision="r1",
        settings=MediaSettings(num_children=1),
        observe=times.append,
    )
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
async def unguarded() -> AsyncIterator[MediaPool]:
    """A pool whose header check lets every size through, so that the child meets the bombs."""
    settings = MediaSettings(num_children=1, limits=UNLIMITED)
    pool = MediaPool(FAMILY.processor, model_revision="r1", settings=settings)
    await pool.start()
    yield pool
    await pool.close()


async def works(pool: MediaPool) -> None:
    data = encode(noise(seed=99))
    prepared = await pool.prepare(data, spec_of(data))
    assert prepared.num_tokens > 0


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_a_child_makes_what_decoding_here_makes(
    pool: MediaPool, times: list[MediaTimes], fmt: str
) -> None:
    data = encode(noise(), fmt)
    prepared = await pool.prepare(data, spec_of(data, salt=b"tenant"))
    rgb = decode_rgb(data, read_header(data, item=0))
    geometry = FAMILY.geometry(40, 60)
    patches = np.frombuffer(prepared.patches, np.float32).reshape(-1, FAMILY.processor.patch_dim)
    np.testing.assert_array_equal(patches, make_patches(rgb, FAMILY.processor, geometry))
    assert prepared.image_key == image_key(
        rgb, FAMILY.processor, model_revision="r1", salt=b"tenant"
    )
    assert (prepared.grid_thw, prepared.num_tokens) == (geometry.grid_thw, geometry.num_tokens)
    assert times[0].decode > 0
    assert times[0].prepare > 0
    assert times[0].queued >= 0


async def test_a_request_may_ask_for_fewer_pixels(pool: MediaPool) -> None:
    data = encode(noise(500, 500))
    full = await pool.prepare(data, spec_of(data))
    low = await pool.prepare(data, spec_of(data, max_pixels=50176))
    assert (full.num_tokens, low.num_tokens) == (256, 64)
    assert full.image_key != low.image_key
    processor = FAMILY.processor.capped(50176)
    wanted = make_patches(
        np.asarray(noise(500, 500)), processor, picture_geometry(500, 500, processor)
    )
    assert bytes(low.patches) == wanted.tobytes()


async def test_a_known_file_needs_no_decoding(pool: MediaPool) -> None:
    for data in (encode(noise()), encode(noise(600, 600))):
        spec = spec_of(data, salt=b"a")
        assert await pool.known_key(data, spec) is None
        prepared = await pool.prepare(data, spec)
        known = await pool.known_key(data, spec)
        assert known is not None
        assert known.image_key == prepared.image_key
        assert known.grid_thw == prepared.grid_thw
        assert await pool.known_key(data, spec_of(data, salt=b"b")) is None
        assert await pool.known_key(data, spec_of(data, max_pixels=3136, salt=b"a")) is None
        assert await pool.known_key(data + b"\0", spec) is None


async def test_the_file_used_longest_ago_is_forgotten() -> None:
    pool = MediaPool(
        FAMILY.processor,
        model_revision="r",
        settings=MediaSettings(num_children=1, max_aliases=2),
    )
    await pool.start()
    files = [encode(noise(seed=i)) for i in range(3)]
    for data in files:
        await pool.prepare(data, spec_of(data))
    known = [await pool.known_key(data, spec_of(data)) is not None for data in files]
    await pool.close()
    assert known == [False, True, True]


async def test_a_promise_that_the_file_does_not_keep_is_refused(pool: MediaPool) -> None:
    data = encode(noise())
    good = spec_of(data)
    for said in (
        ImageSpec(2, "JPEG", good.width, good.height, good.num_tokens),
        ImageSpec(2, "PNG", good.height, good.width, good.num_tokens),
        ImageSpec(2, "PNG", good.width, good.height, good.num_tokens + 1),
    ):
        with pytest.raises(InvalidImageError, match="60x40") as caught:
            await pool.prepare(data, said)
        assert caught.value.code == "image_mismatch"
        assert caught.value.item == 2
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        await pool.prepare(data, ImageSpec(2, "PNG", 60, 40, good.num_tokens, 0, bytes(65)))


async def test_a_damaged_file_is_the_pictures_error_and_the_child_lives(pool: MediaPool) -> None:
    before = pool.pids
    whole = encode(noise(), "PNG")
    at = whole.index(b"IDAT") + 30
    data = whole[:at] + bytes(200) + whole[at + 200 :]
    with pytest.raises(InvalidImageError, match="damaged") as caught:
        await pool.prepare(data, spec_of(data))
    assert (caught.value.code, caught.value.item) == ("invalid_image", 2)
    assert pool.pids == before
    await works(pool)


def zeros_png(width: int, height: int) -> bytes:
    """A bomb: an all-black PNG of any size in a few kilobytes."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    body = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    out = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for kind, chunk in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b"")):
        out += struct.pack(">I", len(chunk)) + kind + chunk
        out += struct.pack(">I", zlib.crc32(kind + chunk))
    return out


def lossless_webp(width: int, height: int) -> bytes:
    return encode(Image.new("RGB", (width, height)), "WEBP", lossless=True, method=0)


BOMBS = {
    "PNG 13000x13000": lambda: zeros_png(13000, 13000),
    "WebP 16383x5400": lambda: lossless_webp(16383, 5400),
    "JPEG 9400x9400": lambda: encode(Image.new("RGB", (9400, 9400)), "JPEG", quality=1),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_ends_at_the_header(pool: MediaPool, name: str) -> None:
    data = BOMBS[name]()
    before = pool.pids
    with pytest.raises(InvalidImageError, match="at most 8192 a side") as caught:
        await pool.prepare(data, spec_of(data))
    assert caught.value.code == "image_too_large"
    assert pool.pids == before


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_past_the_header_ends_in_the_child(unguarded: MediaPool, name: str) -> None:
    """Should the header check ever fail, the kernel's bounds hold and the worker does not grow."""
    data = BOMBS[name]()
    spec = spec_of(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidImageError) as caught:
        await unguarded.prepare(data, spec)
    assert "a side" not in str(caught.value)  # the header check let it through
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024
    await works(unguarded)


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP"])
async def test_the_largest_picture_that_may_pass_does(pool: MediaPool, fmt: str) -> None:
    options = {"lossless": True, "method": 0} if fmt == "WEBP" else {}
    mode = "RGB" if fmt == "JPEG" else "RGBA"
    data = encode(Image.new(mode, (4096, 4096)), fmt, **options)
    assert (await pool.prepare(data, spec_of(data))).num_tokens == 256


async def test_a_frozen_child_is_replaced_and_the_picture_still_decoded() -> None:
    pool = MediaPool(
        FAMILY.processor,
        model_revision="r",
        settings=MediaSettings(num_children=1, timeout_seconds=0.5),
    )
    await pool.start()
    (frozen,) = pool.pids
    os.kill(frozen, signal.SIGSTOP)
    await works(pool)
    assert frozen not in pool.pids
    assert proc(frozen, "stat") is None
    await pool.close()


async def test_a_child_that_is_killed_is_replaced_and_the_picture_still_decoded(
    pool: MediaPool,
) -> None:
    (killed,) = pool.pids
    os.kill(killed, signal.SIGKILL)
    await works(pool)
    assert len(pool.pids) == 1
    assert killed not in pool.pids


@pytest.mark.parametrize("fault", [signal.SIGSEGV, signal.SIGABRT, signal.SIGXCPU])
async def test_a_picture_that_crashes_the_decoder_is_not_tried_again(
    pool: MediaPool, fault: signal.Signals
) -> None:
    (crashed,) = pool.pids
    os.kill(crashed, fault)
    data = encode(noise())
    with pytest.raises(InvalidImageError, match="cannot be decoded within 2 s"):
        await pool.prepare(data, spec_of(data))
    await until(lambda: len(pool.pids) == 1 and crashed not in pool.pids)
    await works(pool)


async def test_cpu_time_is_bounded_per_picture(pool: MediaPool) -> None:
    """The kernel's limit counts a whole life; many pictures must not use it up together."""
    (child,) = pool.pids
    data = encode(noise(2000, 2000), "PNG", compress_level=1)
    spec = spec_of(data)
    for _ in range(12):
        await pool.prepare(data, spec)
    ticks = sum(int(x) for x in (proc(child, "stat") or b"").split()[13:15])
    soft = (proc(child, "limits") or b"").split(b"Max cpu time")[1].split()[0]
    used = ticks / os.sysconf("SC_CLK_TCK")
    assert int(soft) <= used + 4
    assert pool.pids == {child}


async def test_flipped_bytes_never_reach_the_worker(pool: MediaPool) -> None:
    rng = random.Random(11)
    num_ok = num_refused = 0
    for fmt in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = encode(noise(), fmt)
        for _ in range(60):
            data = bytearray(whole)
            for _ in range(3):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                await pool.prepare(bytes(data), spec_of(bytes(data)))
                num_ok += 1
            except InvalidImageError:
                num_refused += 1
            except InvalidRequestError:
                pass  # its size has no geometry; the gateway says the same
    assert num_ok > 10
    assert num_refused > 10
    await works(pool)


async def test_a_cancelled_picture_gives_its_child_back(pool: MediaPool) -> None:
    data = encode(noise(2000, 2000))
    spec = spec_of(data)
    task = asyncio.create_task(pool.prepare(data, spec))
    waiting = asyncio.create_task(pool.prepare(data, spec))
    await until(lambda: pool.num_waiting == 1)
    waiting.cancel()
    task.cancel()
    results = await asyncio.gather(task, waiting, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert pool.num_waiting == 0
    await works(pool)
    assert len(pool.pids) == 1


async def test_a_full_queue_says_when_to_come_back() -> None:
    settings = MediaSettings(num_children=1, max_waiting=2)
    pool = MediaPool(FAMILY.processor, model_revision="r", settings=settings)
    await pool.start()
    data = encode(noise(1000, 1000))
    spec = spec_of(data)
    tasks = [asyncio.create_task(pool.prepare(data, spec)) for _ in range(3)]
    await until(lambda: pool.num_waiting == 2)
    with pytest.raises(OverloadedError, match="2 images wait") as caught:
        await pool.prepare(data, spec)
    assert caught.value.retry_after_seconds >= 1
    assert len({(await task).image_key for task in tasks}) == 1
    await pool.close()


async def test_waiting_pixels_are_bounded_too() -> None:
    settings = MediaSettings(num_children=1, max_waiting_pixels=1000)
    pool = MediaPool(FAMILY.processor, model_revision="r", settings=settings)
    await pool.start()
    data = encode(noise())
    with pytest.raises(OverloadedError):
        await pool.prepare(data, spec_of(data))
    await pool.close()


async def test_closing_ends_children_and_answers_everyone() -> None:
    pool = MediaPool(FAMILY.processor, model_revision="r", settings=MediaSettings(num_children=1))
    await pool.start()
    (child,) = pool.pids
    data = encode(noise(1000, 1000))
    spec = spec_of(data)
    tasks = [asyncio.create_task(pool.prepare(data, spec)) for _ in range(3)]
    await until(lambda: pool.num_waiting == 2)
    await pool.close()
    async with asyncio.timeout(15):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, EngineError | asyncio.CancelledError) for r in results)
    assert proc(child, "stat") is None
    with pytest.raises(EngineError, match="closed"):
        await pool.prepare(data, spec)


async def test_a_child_that_cannot_start_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    pool = MediaPool(FAMILY.processor, model_revision="r")
    with pytest.raises(EngineError, match=r"did not start \(exit status 1\)"):
        await pool.start()
    assert not pool.pids


async def test_a_child_holds_nothing_of_its_worker(pool: MediaPool) -> None:
    (child,) = pool.pids
    environment = (proc(child, "environ") or b"").split(b"\0")
    names = {entry.split(b"=")[0] for entry in environment if entry}
    assert names == {b"PYTHONPATH", b"OPENBLAS_NUM_THREADS"}
    maps = proc(child, "maps") or b""
    assert b"_imaging" in maps
    assert b"libtorch" not in maps


async def test_children_end_with_their_worker() -> None:
    """A worker that is killed closes the channel; nothing else tells the child."""
    config = ChildConfig(FAMILY.processor, "r", memory_bytes=1 << 29, cpu_seconds=2)
    child = await DecodeChild.start(config)
    child._channel.close()
    await until(lambda: not child.alive)
    child.close()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_pool_works_on_both_event_loops(loop: str) -> None:
    import uvloop

    async def once() -> None:
        pool = MediaPool(
            FAMILY.processor, model_revision="r", settings=MediaSettings(num_children=2)
        )
        await pool.start()
        await works(pool)
        await pool.close()

    factory: Callable[[], asyncio.AbstractEventLoop] | None = (
        uvloop.new_event_loop if loop == "uvloop" else None
    )
    with asyncio.Runner(loop_factory=factory) as runner:
        work: Awaitable[None] = once()
        runner.run(work)
