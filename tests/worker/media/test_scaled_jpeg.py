"""JPEGs decoded no larger than needed: never smaller, nearly the same, never taken for exact."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from worker.media.files import encode, noise
from worker.media.pooling import FAMILY, spec_of
from worker.media.test_mutations import mutated
from worker.media.test_planes import CLIP, GEMMA

from vlm_worker.core.image_geometry import Processor
from vlm_worker.errors import InvalidImageError
from vlm_worker.media.image_header import ImageLimits, read_header
from vlm_worker.media.patches import image_key, make_patches
from vlm_worker.media.pixels import UndecodableError, decode_rgb
from vlm_worker.media.pool import ImageSpec, MediaPool, MediaSettings
from vlm_worker.types import PreparedImage

SMALL = ImageLimits(max_pixels=1 << 20)


def smooth(width: int, height: int) -> Image.Image:
    """Colours that change slowly, and another at each corner."""
    return noise(4, 3, seed=1).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image, orientation: int = 1, **options: object) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(image, "JPEG", exif=exif, **options)


@settings(max_examples=100)
@given(
    width=st.integers(1, 200),
    height=st.integers(1, 200),
    enough=st.tuples(st.integers(1, 250), st.integers(1, 250)),
    orientation=st.integers(1, 8),
    subsampling=st.sampled_from(["4:4:4", "4:2:2", "4:2:0", "4:1:1"]),
    progressive=st.booleans(),
)
def test_a_jpeg_is_as_small_as_is_enough_and_never_smaller(
    width: int,
    height: int,
    enough: tuple[int, int],
    orientation: int,
    subsampling: str,
    progressive: bool,
) -> None:
    image = smooth(width, height)
    data = jpeg(image, orientation, subsampling=subsampling, progressive=progressive)
    header = read_header(data, item=0)
    own = (header.height, header.width)
    sizes = [tuple(-(-side // by) for side in own) for by in (8, 4, 2, 1)]
    wanted = next((size for size in sizes if size[0] >= enough[0] and size[1] >= enough[1]), own)
    scaled = decode_rgb(data, header, enough=enough)
    assert scaled.shape == (*wanted, 3)
    assert scaled.flags.c_contiguous
    if wanted == own:
        np.testing.assert_array_equal(scaled, decode_rgb(data, header))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    "processor", [FAMILY.processor, CLIP, GEMMA], ids=["own", "cut", "stretched"]
)
def test_patches_of_a_smooth_image_are_nearly_those_of_all_its_pixels(
    orientation: int, processor: Processor
) -> None:
    data = jpeg(smooth(1900, 1500), orientation, quality=95)
    header = read_header(data, item=0)
    size = (header.height, header.width)
    geometry, rgb = processor.geometry(*size), decode_rgb(data, header)
    scaled = decode_rgb(data, header, enough=processor.resized(*size))
    assert scaled.shape < rgb.shape
    exact = make_patches(rgb, processor, geometry)
    near = make_patches(scaled, processor, geometry, size=size)
    assert near.shape == exact.shape
    assert np.abs(near - exact).mean() < 0.01
    assert np.abs(near - exact).max() < 0.2


@pytest.mark.parametrize("fmt", ["PNG", "WEBP", "GIF"])
def test_other_formats_are_decoded_whole(fmt: str) -> None:
    data = encode(noise(80, 60), fmt)
    header = read_header(data, item=0)
    np.testing.assert_array_equal(decode_rgb(data, header, enough=(1, 1)), decode_rgb(data, header))


def test_a_jpeg_that_pillow_reads_is_decoded_whole() -> None:
    data = encode(noise(80, 60).convert("CMYK"), "JPEG")
    header = read_header(data, item=0)
    np.testing.assert_array_equal(decode_rgb(data, header, enough=(1, 1)), decode_rgb(data, header))


def ended(data: bytes, enough: tuple[int, int] | None) -> str:
    try:
        decode_rgb(data, read_header(data, item=0, limits=SMALL), enough=enough)
    except (InvalidImageError, UndecodableError) as error:
        return str(error)
    return "an image"


def test_a_damaged_jpeg_ends_the_same_however_it_is_decoded() -> None:
    rng = random.Random(0)
    whole = [
        jpeg(smooth(160, 130), progressive=progressive, subsampling=subsampling)
        for progressive in (False, True)
        for subsampling in ("4:4:4", "4:2:0")
    ]
    ends = set()
    for _ in range(600):
        data = mutated(rng.choice(whole), rng)
        exact = ended(data, None)
        assert ended(data, (20, 16)) == exact
        ends.add(exact)
    assert {"an image", "the JPEG is damaged or cut off"} <= ends


def test_a_smaller_decode_has_a_key_of_its_own() -> None:
    data = jpeg(smooth(900, 700))
    header, processor = read_header(data, item=0), FAMILY.processor
    rgb = decode_rgb(data, header)
    scaled = decode_rgb(data, header, enough=(300, 300))
    keys = {
        image_key(pixels, processor, model_revision="r", salt=b"", size=size)
        for pixels, size in (
            (rgb, None),
            (scaled, None),
            (scaled, (700, 900)),
            (scaled, (699, 900)),
        )
    }
    assert len(keys) == 4
    assert image_key(rgb, processor, model_revision="r", salt=b"", size=(700, 900)) in keys


async def prepared_by(
    data: bytes, processor: Processor, spec: ImageSpec, *, scaled_jpeg: bool
) -> PreparedImage:
    sizes = MediaSettings(num_children=1, scaled_jpeg=scaled_jpeg)
    pool = MediaPool(processor, model_revision="r", settings=sizes)
    await pool.start()
    try:
        return await pool.prepare(data, spec)
    finally:
        await pool.close()


@pytest.mark.parametrize(("width", "height", "is_exact"), [(1900, 1500, False), (200, 150, True)])
async def test_a_pool_that_scales_shares_keys_where_pixels_are_the_same(
    width: int, height: int, is_exact: bool
) -> None:
    data = jpeg(smooth(width, height), orientation=6)
    spec, processor = spec_of(data), FAMILY.processor
    exact = await prepared_by(data, processor, spec, scaled_jpeg=False)
    scaled = await prepared_by(data, processor, spec, scaled_jpeg=True)
    assert (exact.image_key == scaled.image_key) == is_exact
    assert (exact.patches == scaled.patches) == is_exact
    assert (exact.grid_thw, exact.num_tokens) == (scaled.grid_thw, scaled.num_tokens)


async def test_a_pool_that_scales_cuts_the_middle_of_the_image_out() -> None:
    data = jpeg(smooth(1203, 701))
    spec = dataclasses.replace(spec_of(data), num_tokens=CLIP.max_tokens)
    exact = await prepared_by(data, CLIP, spec, scaled_jpeg=False)
    scaled = await prepared_by(data, CLIP, spec, scaled_jpeg=True)
    difference = np.frombuffer(exact.patches, np.float32) - np.frombuffer(
        scaled.patches, np.float32
    )
    assert exact.image_key != scaled.image_key
    assert np.abs(difference).mean() < 0.01
