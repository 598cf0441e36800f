"""Patches bit for bit as transformers makes them, and the content key that names them."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vlm_worker.core.families import load_family
from vlm_worker.core.image_geometry import DynamicProcessor
from vlm_worker.media.image_header import read_header
from vlm_worker.media.patches import image_key, make_patches
from vlm_worker.media.pixels import decode_rgb

MODEL = Path(__file__).parents[3] / "examples" / "shapes" / "model"
SHAPES = load_family(MODEL).processor
CLIP = dataclasses.replace(
    SHAPES,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
    rescale_factor=1 / 255,
    resample=2,
)


def reference(image: Image.Image, processor: DynamicProcessor) -> tuple[np.ndarray, list[int]]:
    made = Qwen2VLImageProcessorPil(
        size={"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels},
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        temporal_patch_size=processor.temporal_patch_size,
        image_mean=list(processor.image_mean),
        image_std=list(processor.image_std),
        rescale_factor=processor.rescale_factor,
        resample=processor.resample,
    )(images=image, return_tensors="np")
    return made["pixel_values"], made["image_grid_thw"][0].tolist()


def noise(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@settings(max_examples=60)
@given(
    width=st.integers(5, 700),
    height=st.integers(5, 700),
    processor=st.sampled_from([SHAPES, CLIP, SHAPES.capped(50176)]),
)
def test_patches_are_those_of_transformers(
    width: int, height: int, processor: DynamicProcessor
) -> None:
    rgb = noise(width, height)
    geometry = processor.geometry(height, width)
    wanted, grid = reference(Image.fromarray(rgb), processor)
    patches = make_patches(rgb, processor, geometry)
    assert patches.dtype == np.float32
    assert patches.flags.c_contiguous
    assert list(geometry.grid_thw) == grid
    np.testing.assert_array_equal(patches, wanted)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_from_a_file_the_patches_are_those_of_transformers(mode: str) -> None:
    colour = Image.fromarray(noise(90, 60)).convert("RGBA")
    colour.putalpha(Image.linear_gradient("L").resize((90, 60)))
    out = io.BytesIO()
    colour.convert(mode).save(out, "PNG")
    header = read_header(out.getvalue(), item=0)
    rgb = decode_rgb(out.getvalue(), header)
    patches = make_patches(rgb, SHAPES, SHAPES.geometry(header.height, header.width))
    with Image.open(out) as image:
        wanted, _ = reference(image, SHAPES)
    np.testing.assert_array_equal(patches, wanted)


def test_patches_are_finite_for_extreme_images() -> None:
    for value in (0, 255):
        rgb = np.full((28, 28, 3), value, np.uint8)
        assert np.isfinite(make_patches(rgb, CLIP, CLIP.geometry(28, 28))).all()


def key(
    rgb: np.ndarray, processor: DynamicProcessor = SHAPES, revision: str = "r", salt: bytes = b""
) -> bytes:
    return image_key(rgb, processor, model_revision=revision, salt=salt)


def test_the_key_depends_on_pixels_not_on_the_file() -> None:
    keys = set()
    for options in ({"compress_level": 1}, {"compress_level": 9, "icc_profile": b"x" * 128}):
        out = io.BytesIO()
        Image.fromarray(noise(30, 20)).save(out, "PNG", **options)
        keys.add(key(decode_rgb(out.getvalue(), read_header(out.getvalue(), item=0))))
    out = io.BytesIO()
    Image.fromarray(noise(30, 20)).save(out, "WEBP", lossless=True)
    keys.add(key(decode_rgb(out.getvalue(), read_header(out.getvalue(), item=0))))
    assert len(keys) == 1
    assert len(keys.pop()) == 32


def test_whatever_changes_the_embedding_or_its_owner_changes_the_key() -> None:
    rgb = noise(30, 20)
    one = rgb.copy()
    one[3, 4, 1] ^= 1
    square = noise(20, 20)
    keys = [
        key(rgb),
        key(one),
        key(rgb.reshape(30, 20, 3)),
        key(rgb.reshape(10, 60, 3)),
        key(rgb[:, :, ::-1]),
        key(square),
        key(square.transpose(1, 0, 2)),
        key(rgb, SHAPES.capped(50176)),
        key(rgb, dataclasses.replace(SHAPES, image_mean=(0.5, 0.5, 0.4))),
        key(rgb, revision="s"),
        key(rgb, salt=b"tenant"),
    ]
    assert len(set(keys)) == len(keys)
    assert key(rgb) == key(rgb.copy())
