"""Images of one size, bit for bit as transformers makes them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from worker.media.files import encode

from vlm_worker.core.families.family import CLIP_MEAN, CLIP_STD
from vlm_worker.core.families.gemma3 import HALF
from vlm_worker.core.image_geometry import MAX_ASPECT_RATIO, FixedProcessor
from vlm_worker.errors import InvalidRequestError
from vlm_worker.media.decode_channel import ChildConfig
from vlm_worker.media.patches import make_patches
from vlm_worker.media.pool import ImageSpec, MediaPool, MediaSettings

SIDE = 112
CLIP = FixedProcessor(
    patch_size=14, merge_size=1, resample=3, rescale_factor=1 / 255, image_mean=CLIP_MEAN,
    image_std=CLIP_STD, height=SIDE, width=SIDE, shortest_edge=SIDE, num_extra_tokens=0,
)  # fmt: skip
GEMMA = FixedProcessor(
    patch_size=14, merge_size=2, resample=2, rescale_factor=1 / 255, image_mean=HALF,
    image_std=HALF, height=SIDE, width=SIDE, shortest_edge=0, num_extra_tokens=0,
)  # fmt: skip


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def planes(rgb: np.ndarray, processor: FixedProcessor) -> np.ndarray:
    geometry = processor.geometry(*rgb.shape[:2])
    patches = make_patches(rgb, processor, geometry)
    assert patches.dtype == np.float32
    assert patches.flags.c_contiguous
    assert patches.shape == (np.prod(geometry.grid_thw), processor.patch_dim)
    return patches.reshape(1, 3, processor.height, processor.width)


@settings(max_examples=40)
@given(width=st.integers(1, 500), height=st.integers(1, 500), edge=st.sampled_from([112, 131]))
def test_a_resized_and_cropped_image_is_that_of_transformers(
    width: int, height: int, edge: int
) -> None:
    rgb = noise(width, height)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        return
    processor = dataclasses.replace(CLIP, shortest_edge=edge)
    wanted = CLIPImageProcessorPil(
        size={"shortest_edge": edge}, crop_size={"height": SIDE, "width": SIDE}
    )(images=Image.fromarray(rgb), return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(planes(rgb, processor), wanted)


@settings(max_examples=40)
@given(width=st.integers(1, 500), height=st.integers(1, 500))
def test_a_stretched_image_is_that_of_transformers(width: int, height: int) -> None:
    rgb = noise(width, height)
    made = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})(
        images=Image.fromarray(rgb), return_tensors="np"
    )
    np.testing.assert_array_equal(planes(rgb, GEMMA), made["pixel_values"])


def test_an_image_too_narrow_to_keep_its_shape_is_refused_and_a_stretched_one_is_not() -> None:
    with pytest.raises(InvalidRequestError, match="200 times"):
        CLIP.geometry(1, MAX_ASPECT_RATIO + 1)
    assert GEMMA.geometry(1, 5000).num_tokens == 16
    with pytest.raises(InvalidRequestError, match="empty"):
        GEMMA.geometry(0, 5)


@pytest.mark.parametrize("processor", [CLIP, GEMMA], ids=["cropped", "stretched"])
async def test_children_prepare_such_images_up_to_the_most_extreme(
    processor: FixedProcessor,
) -> None:
    config = ChildConfig(processor, "r", 1 << 29, 2)
    assert ChildConfig.from_json(config.to_json()) == config
    sides = {"height": 336, "width": 336, "shortest_edge": 336 if processor.shortest_edge else 0}
    large = dataclasses.replace(processor, **sides)
    pool = MediaPool(large, model_revision="r", settings=MediaSettings(num_children=1))
    await pool.start()
    try:
        for width, height in ((90, 130), (MAX_ASPECT_RATIO, 1), (1, MAX_ASPECT_RATIO)):
            rgb = noise(width, height)
            data = encode(Image.fromarray(rgb))
            spec = ImageSpec(0, "PNG", width, height, large.max_tokens)
            prepared = await pool.prepare(data, spec)
            assert prepared.grid_thw == large.grid
            assert bytes(prepared.patches) == planes(rgb, large).tobytes()
    finally:
        await pool.close()
