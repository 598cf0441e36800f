"""Unlisted families: geometry is transformers', and a refusal names the field."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from vlm_worker.attends import Attends
from vlm_worker.core.families import (
    FAMILIES,
    ControlToken,
    Family,
    ModelConfigError,
    parse_family,
)
from vlm_worker.core.families.generic import MODEL_TYPES, TEXT_DEFAULTS
from vlm_worker.core.image_geometry import FramesProcessor, TilesProcessor
from vlm_worker.media.patches import make_patches
from vlm_worker.model.memory import encode_bytes
from vlm_worker.serve.budget import image_bytes

TEXT = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
AXES = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
INTERNVL = {
    "model_type": "internvl", "text_config": TEXT, "image_token_id": 990, "image_seq_length": 4,
    "vision_config": {"model_type": "internvl_vision", "patch_size": [14, 14]},
}  # fmt: skip
TILES = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 56, "width": 56}}
GLM = {
    "model_type": "glm4v", "text_config": {**TEXT, **AXES}, "image_token_id": 990,
    "vision_config": {"model_type": "glm4v_vision", "patch_size": 14},
}  # fmt: skip
FRAMES = {
    "image_processor_type": "Glm4vImageProcessor",
    "size": {"shortest_edge": 6272, "longest_edge": 40_000},
}
QWEN3 = {
    "model_type": "qwen3_vl", "text_config": {**TEXT, **AXES}, "image_token_id": 990,
    "vision_config": {"patch_size": 16, "deepstack_visual_indexes": [0, 2]},
}  # fmt: skip
PACKED = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16}


def family(config: dict[str, Any], processor: dict[str, Any], **changed: Any) -> Family:
    return parse_family({**config, **changed}, processor)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


SIDES = st.integers(1, 400)


@given(SIDES, SIDES)
def test_tiles_are_those_of_transformers(height: int, width: int) -> None:
    processor = family(INTERNVL, TILES).processor
    assert isinstance(processor, TilesProcessor)
    real = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56})
    count = real.get_number_of_image_patches(height, width, {"crop_to_patches": True})
    geometry = processor.geometry(height, width)
    assert geometry.grid_thw[0] == count
    assert geometry.num_tokens == 4 * count == processor.num_tokens(geometry.grid_thw)


@given(SIDES, SIDES)
def test_no_tiled_image_is_larger_than_the_largest(height: int, width: int) -> None:
    one = family(INTERNVL, TILES)
    largest = one.processor.largest
    assert largest == one.geometry(900, 1200)
    assert largest.num_tokens == one.processor.max_tokens == 4 * 13
    geometry = one.geometry(height, width)
    assert geometry.num_tokens <= largest.num_tokens
    held = 4 * math.prod(geometry.grid_thw) * one.processor.patch_dim
    assert held + 3 * geometry.height * geometry.width <= image_bytes(one)


def test_a_call_of_a_tower_holds_all_tiles() -> None:
    sizes = types.SimpleNamespace(hidden_size=32, intermediate_size=64)
    one = family(INTERNVL, TILES)
    largest = encode_bytes(sizes, one, num_tokens=4 * 13, element_bytes=4)
    assert encode_bytes(sizes, one, num_tokens=1, element_bytes=4) == largest


@pytest.mark.parametrize("size", [(61, 250), (250, 61), (56, 56), (230, 200), (9, 3), (300, 299)])
def test_pixels_of_tiles_equal_those_of_transformers(size: tuple[int, int]) -> None:
    processor = family(INTERNVL, TILES).processor
    real = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56})
    rgb = noise(*size)
    want = real(images=[rgb], return_tensors="np", crop_to_patches=True)["pixel_values"]
    got = make_patches(rgb, processor, processor.geometry(*size))
    assert np.array_equal(got.reshape(want.shape), want)


def test_a_cap_leaves_fewer_tiles_and_low_detail_one() -> None:
    one = family(INTERNVL, TILES)
    assert one.geometry(200, 200).num_tokens == 4 * 10
    assert one.geometry(200, 200, max_pixels=4 * 56 * 56).num_tokens == 4 * 5
    assert one.geometry(200, 200, max_pixels=one.max_pixels_of("low")).num_tokens == 4
    assert one.processor.num_tokens((2, 4, 4)) is None


@given(SIDES, SIDES)
def test_two_frames_are_resized_as_by_transformers(height: int, width: int) -> None:
    processor = family(GLM, FRAMES).processor
    assert isinstance(processor, FramesProcessor)
    real = Glm4vImageProcessorPil(size=FRAMES["size"])
    if max(height, width) > 200 * min(height, width):
        return
    count = real.get_number_of_image_patches(height, width, {})
    grid = processor.geometry(height, width).grid_thw
    assert grid[1] * grid[2] == count
    assert processor.num_tokens(grid) == count // 4


@pytest.mark.parametrize("size", [(61, 250), (250, 61), (56, 56), (230, 200), (9, 30)])
def test_patches_of_two_frames_equal_those_of_transformers(size: tuple[int, int]) -> None:
    processor = family(GLM, FRAMES).processor
    real = Glm4vImageProcessorPil(size=FRAMES["size"])(images=[noise(*size)], return_tensors="np")
    geometry = processor.geometry(*size)
    assert tuple(real["image_grid_thw"][0]) == geometry.grid_thw
    assert np.array_equal(make_patches(noise(*size), processor, geometry), real["pixel_values"])


def test_facts_of_unlisted_families() -> None:
    qwen, internvl = family(QWEN3, PACKED), family(INTERNVL, TILES)
    assert (qwen.num_levels, qwen.num_position_rows, internvl.num_position_rows) == (2, 3, 1)
    assert internvl.image_text == (ControlToken("<img>"), 990, ControlToken("</img>"))
    for one in (qwen, internvl):
        assert not one.spec.is_listed
        assert not one.is_reducible
        assert one.spec.attends is Attends.CAUSAL


@pytest.mark.parametrize(("config", "processor"), [(QWEN3, PACKED), (GLM, FRAMES)])
def test_positions_have_three_rows_without_a_field(
    config: dict[str, Any], processor: dict[str, Any]
) -> None:
    assert family(config, processor, text_config=TEXT).num_position_rows == 3


@pytest.mark.parametrize("name", TEXT_DEFAULTS)
def test_defaults_of_language_models_are_those_of_transformers(name: str) -> None:
    config = CONFIG_MAPPING[name]()
    assert {field: getattr(config, field) for field in TEXT_DEFAULTS[name]} == TEXT_DEFAULTS[name]


AWQ = {"quant_method": "awq"}


@pytest.mark.parametrize(
    ("text", "config", "processor", "problem"),
    [
        (
            {},
            {"model_type": "molmo2"},
            {},
            r"config.json: model_type is 'molmo2', .* internvl, .*qwen2_vl",
        ),
        ({}, {"is_encoder_decoder": True}, {}, "is_encoder_decoder is True"),
        ({}, {"quantization_config": AWQ}, {}, "quant_method is 'awq'"),
        ({}, {"image_token_id": None}, {}, "image_token_id must be an integer"),
        ({"layer_types": ["linear_attention"]}, {}, {}, "text_config: layer_types has 'linear_att"),
        ({"layer_types": ["chunked_attention"]}, {}, {}, "layer_types has 'chunked_attention'"),
        ({"layer_types": "all"}, {}, {}, "layer_types must be a list"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            {},
            {},
            "rope_parameters: rope_type is 'longrope'",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
            {},
            {},
            "full_attention: rope_type is 'longrope'",
        ),
        ({"model_type": "new", "hidden_size": None}, {}, {}, "hidden_size must be an integer"),
        ({}, {}, {"image_processor_type": "X"}, "'X', whose images are not built; .*GotOcr2"),
        ({}, {}, {"size": {"height": 60, "width": 56}}, "size is not that of square tiles"),
        ({}, {"image_seq_length": 5}, {}, "size is not that of square tiles of 5 tokens"),
        ({}, {}, {"do_resize": False}, "do_resize is False"),
        ({}, {}, {"min_patches": 2}, "min_patches is 2"),
    ],
)
def test_a_model_that_is_not_served_is_refused_by_its_field(
    text: dict[str, Any], config: dict[str, Any], processor: dict[str, Any], problem: str
) -> None:
    fields = INTERNVL | {"text_config": TEXT | text} | config
    with pytest.raises(ModelConfigError, match=problem) as caught:
        parse_family(fields, TILES | processor)
    assert "\n" not in str(caught.value)


def test_no_type_is_both_listed_and_unlisted() -> None:
    assert not FAMILIES.keys() & MODEL_TYPES.keys()
