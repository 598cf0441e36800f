"""Bytes of every kind come in; patches or one typed error come out. Real processes throughout."""

import random
import resource
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from worker.media.pooling import FAMILY, Heard, encode, noise, spec_of, works

from vlm_worker.errors import InvalidImageError, InvalidRequestError
from vlm_worker.media.header import read_header
from vlm_worker.media.patches import image_key, make_patches
from vlm_worker.media.pixels import decode_rgb
from vlm_worker.media.pool import ImageSpec, MediaPool, MediaSettings


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_a_child_makes_what_decoding_here_makes(
    pool: MediaPool, heard: Heard, fmt: str
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
    (times,) = heard.times
    assert min(times.decode, times.prepare, times.key) > 0
    assert times.queue >= 0


async def test_a_request_may_ask_for_fewer_pixels(pool: MediaPool) -> None:
    data = encode(noise(500, 500))
    full = await pool.prepare(data, spec_of(data))
    low = await pool.prepare(data, spec_of(data, max_pixels=50176))
    assert (full.num_tokens, low.num_tokens) == (256, 64)
    assert full.image_key != low.image_key
    processor = FAMILY.processor.capped(50176)
    wanted = make_patches(
        np.asarray(noise(500, 500)), processor, processor.geometry(500, 500)
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


async def test_a_damaged_file_is_the_pictures_error_and_the_child_lives(
    pool: MediaPool, heard: Heard
) -> None:
    before = pool.pids
    whole = encode(noise(), "PNG")
    at = whole.index(b"IDAT") + 30
    data = whole[:at] + bytes(200) + whole[at + 200 :]
    with pytest.raises(InvalidImageError, match="damaged") as caught:
        await pool.prepare(data, spec_of(data))
    assert (caught.value.code, caught.value.item) == ("invalid_image", 2)
    assert heard.refused == ["invalid_image"]
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
