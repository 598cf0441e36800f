"""Bytes of every kind come in; patches or one typed error come out. Real processes throughout."""

import dataclasses

import numpy as np
import pytest
from worker.media.files import encode, noise
from worker.media.pooling import FAMILY, Heard, spec_of, works

from vlm_worker.errors import InvalidImageError, InvalidRequestError
from vlm_worker.media.image_header import read_header
from vlm_worker.media.patches import image_key, make_patches, model_pixels
from vlm_worker.media.pixels import decode_rgb
from vlm_worker.media.pool import ImageSpec, MediaPool, MediaSettings, _refusal
from vlm_worker.media.texture import pixel_relevance
from vlm_worker.reduction import Method, Reduction


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
    wanted = make_patches(np.asarray(noise(500, 500)), processor, processor.geometry(500, 500))
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


@pytest.mark.parametrize("method", [Method.ARRCOC, Method.ARRCOC_PYRAMID])
async def test_arrcoc_gets_the_relevance_of_the_pixels_and_other_images_get_none(
    pool: MediaPool, method: Method
) -> None:
    data = encode(noise(120, 200))
    whole = spec_of(data)
    arrcoc = dataclasses.replace(whole, num_tokens=9, reduction=Reduction(method, 333))
    other = dataclasses.replace(whole, num_tokens=9, reduction=Reduction(Method.MERGE, 333))
    prepared = await pool.prepare(data, arrcoc)
    geometry = FAMILY.geometry(whole.height, whole.width)
    pixels = model_pixels(np.asarray(noise(120, 200)), FAMILY.processor, geometry)
    assert prepared.kept_tokens == 9
    assert prepared.relevance == pixel_relevance(pixels, prepared.cells).tobytes()
    known = await pool.known_key(data, arrcoc)
    assert known == dataclasses.replace(prepared, patches=memoryview(b""), relevance=b"")
    for spec in (whole, other):
        assert (await pool.prepare(data, spec)).relevance == b""


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


async def test_a_damaged_file_is_the_images_error_and_the_child_lives(
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


def test_a_child_that_a_file_has_taken_over_names_no_codes_of_its_own() -> None:
    known = _refusal(b"image_too_large\0too many pixels", 3)
    assert (known.code, known.item, str(known)) == ("image_too_large", 3, "too many pixels")
    for body in (b"rm_rf\0/root/secret", b"", b"\xff\xfe", b"invalid_image"):
        told = _refusal(body, 3)
        assert told.code == "invalid_image"
        assert "secret" not in str(told)
