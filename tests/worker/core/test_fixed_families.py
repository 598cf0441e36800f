"""LLaVA-1.5 and Gemma 3 from their files: what they say, what is refused, by field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava.configuration_llava import LlavaConfig

from vlm_worker.core.families import Family, ModelConfigError, parse_family
from vlm_worker.core.image_geometry import FixedProcessor
from vlm_worker.errors import InvalidRequestError
from vlm_worker.types import ImageItem

LLAVA = {
    "model_type": "llava",
    "image_token_index": 32000,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}
LLAVA_PIXELS = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}
LLAVA_PROCESSOR = {
    "patch_size": 14,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
GEMMA = {
    "model_type": "gemma3",
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "sliding_window": 1024},
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
}
GEMMA_PIXELS = {
    "image_processor_type": "Gemma3ImageProcessor",
    "do_convert_rgb": None,
    "do_pan_and_scan": None,
    "image_seq_length": 256,
    "size": {"height": 896, "width": 896},
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (LLAVA, LLAVA_PIXELS, LLAVA_PROCESSOR),
    "gemma3": (GEMMA, GEMMA_PIXELS, {"image_seq_length": 256}),
}


def family_of(name: str) -> Family:
    return parse_family(*MODELS[name])


@pytest.mark.parametrize(
    ("name", "grid", "num_tokens"),
    [("llava", (1, 24, 24), 576), ("gemma3", (1, 64, 64), 256)],
)
def test_every_image_of_the_published_models_has_as_many_tokens(
    name: str, grid: tuple[int, int, int], num_tokens: int
) -> None:
    family = family_of(name)
    for height, width in ((1, 1), (336, 336), (2000, 300), (77, 5000)):
        geometry = family.geometry(height, width, max_pixels=100)
        assert (geometry.grid_thw, geometry.num_tokens) == (grid, num_tokens)


def test_fields_that_files_leave_out_are_those_of_transformers() -> None:
    llava, gemma = LlavaConfig(), Gemma3Config()
    clip, siglip = CLIPImageProcessorPil(), Gemma3ImageProcessorPil()
    bare = parse_family(
        {"model_type": "llava", "vision_config": {"image_size": 224}},
        {"image_processor_type": "CLIPImageProcessor"},
    )
    assert bare.image_token_id == llava.image_token_index
    assert bare.hidden_size == llava.text_config.hidden_size
    assert bare.vocab_size == llava.text_config.vocab_size
    assert bare.max_position_embeddings == llava.text_config.max_position_embeddings
    assert_defaults(bare, clip)
    assert isinstance(bare.processor, FixedProcessor)
    assert bare.processor.shortest_edge == clip.size["shortest_edge"]
    bare = parse_family(
        {"model_type": "gemma3", "mm_tokens_per_image": 49},
        {"image_processor_type": "Gemma3ImageProcessor"},
    )
    assert bare.image_token_id == gemma.image_token_index
    assert bare.marker_token_id == gemma.boi_token_index
    assert gemma.eoi_token_index in bare.image_text
    assert bare.hidden_size == gemma.text_config.hidden_size
    assert bare.vocab_size == gemma.text_config.vocab_size
    assert bare.max_position_embeddings == gemma.text_config.max_position_embeddings
    assert_defaults(bare, siglip)


def assert_defaults(family: Family, reference: Any) -> None:
    processor = family.processor
    assert processor.image_mean == tuple(reference.image_mean)
    assert processor.image_std == tuple(reference.image_std)
    assert processor.resample == reference.resample
    assert processor.rescale_factor == reference.rescale_factor


@pytest.mark.parametrize(
    ("name", "config", "pixels", "problem"),
    [
        ("llava", {"text_config": {"model_type": "mistral"}}, {}, "'mistral'; only 'llama'"),
        ("llava", {"vision_config": {"model_type": "pixtral"}}, {}, "only 'clip_vision_model'"),
        ("llava", {"vision_config": {"image_size": 224}}, {}, "image_size is 224, .*336"),
        ("llava", {"vision_config": {"patch_size": 32}}, {}, "square of 32-pixel patches"),
        ("llava", {"vision_feature_select_strategy": "cls"}, {}, "'cls'; built: default, full"),
        ("llava", {"vision_feature_select_strategy": "full"}, {}, "makes 576 tokens .* 577"),
        ("llava", {}, {"do_center_crop": False}, "do_center_crop is False; only True"),
        ("llava", {}, {"do_pad": True}, "do_pad is True; only False or null"),
        ("llava", {}, {"size": {"shortest_edge": 224}}, "shortest_edge 224, below the 336"),
        ("llava", {}, {"image_processor_type": "SiglipImageProcessor"}, "built for this family"),
        ("gemma3", {}, {"do_pan_and_scan": True}, "do_pan_and_scan is True; only False or null"),
        ("gemma3", {"text_config": {"attn_logit_softcapping": 50.0}}, {}, "only null is built"),
        ("gemma3", {"text_config": {"final_logit_softcapping": 30.0}}, {}, "only null is built"),
        ("gemma3", {"text_config": {"use_bidirectional_attention": True}}, {}, "is True; only"),
        ("gemma3", {"mm_tokens_per_image": 64}, {}, "is 256, mm_tokens_per_image is 64"),
        ("gemma3", {}, {"size": {"height": 900, "width": 896}}, "do not pool"),
        ("gemma3", {"vision_config": {"image_size": 448}}, {}, "image_size is 448, .*896"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_field(
    name: str, config: dict[str, Any], pixels: dict[str, Any], problem: str
) -> None:
    whole, image_processor, processor = MODELS[name]
    changed = {
        key: {**whole[key], **value} if isinstance(value, dict) else value
        for key, value in config.items()
    }
    with pytest.raises(ModelConfigError, match=problem):
        parse_family(whole | changed, image_processor | pixels, processor)


@pytest.mark.parametrize("name", MODELS)
def test_positions_are_plain_and_only_the_one_grid_is_an_image(name: str) -> None:
    family = family_of(name)
    geometry = family.geometry(5, 5)
    ids = [7, *[family.image_token_id] * geometry.num_tokens, 8]
    item = ImageItem(b"", 1, geometry.num_tokens, geometry.grid_thw)
    positions, delta = family.positions(ids, [item])
    np.testing.assert_array_equal(positions, np.arange(len(ids))[None])
    assert delta == 0
    other = ImageItem(b"", 1, geometry.num_tokens, (1, 2, geometry.num_tokens // 2))
    with pytest.raises(InvalidRequestError, match="no patch grid"):
        family.positions(ids, [other])


def test_the_class_token_counts_where_the_model_keeps_it() -> None:
    config = LLAVA | {"vision_feature_select_strategy": "full"}
    told = LLAVA_PROCESSOR | {"vision_feature_select_strategy": "full"}
    assert parse_family(config, LLAVA_PIXELS, told).geometry(9, 9).num_tokens == 577
