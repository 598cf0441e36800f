"""Qwen2-VL and Qwen2.5-VL: native image resolution, M-RoPE.

    <|vision_start|> <|image_pad|> x n <|vision_end|>      n grows with the pixels

Both have the same processor and positions. Their vision towers differ, which only the modelling
module implements.
"""

from __future__ import annotations

import dataclasses

from vlm_worker.attends import Attends
from vlm_worker.core.families.family import Family, FamilySpec, Files, must_equal, pixel_fields
from vlm_worker.core.image_geometry import DynamicProcessor
from vlm_worker.core.model_files import ConfigFields


def _parse(spec: FamilySpec, files: Files) -> Family:
    config = files.config
    text = config.child("text_config") if "text_config" in config else config
    processor = _processor(files.image_processor, spec)
    vision = config.child("vision_config")
    must_equal(vision, "patch_size", processor.patch_size, default=14)
    must_equal(vision, "spatial_merge_size", processor.merge_size, default=2)
    must_equal(vision, "temporal_patch_size", processor.temporal_patch_size, default=2)
    image_token_id = config.count("image_token_id", least=0)
    model_type = config.text("model_type")
    has_windows = model_type == "qwen2_5_vl"
    return Family(
        model_type=model_type,
        spec=spec,
        processor=processor,
        image_token_id=image_token_id,
        marker_token_id=image_token_id,
        image_text=(image_token_id,),
        vocab_size=text.count("vocab_size"),
        hidden_size=text.count("hidden_size"),
        max_position_embeddings=text.count("max_position_embeddings"),
        window_cells=vision.count("window_size", 112) // processor.factor if has_windows else 0,
    )


def _processor(fields: ConfigFields, spec: FamilySpec) -> DynamicProcessor:
    fields.must_be("do_convert_rgb", True)
    shared = pixel_fields(fields, spec)
    size = fields.child("size")
    processor = DynamicProcessor(
        patch_size=fields.count("patch_size", 14),
        merge_size=fields.count("merge_size", 2),
        temporal_patch_size=fields.count("temporal_patch_size", 2),
        min_pixels=fields.count("min_pixels", size.count("shortest_edge", 56 * 56)),
        max_pixels=fields.count("max_pixels", size.count("longest_edge", 28 * 28 * 1280)),
        **shared,
    )
    if processor.max_pixels < processor.min_pixels:
        raise fields.error("size", "has longest_edge (max_pixels) below shortest_edge (min_pixels)")
    return processor


QWEN2_5_VL = FamilySpec(
    module="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    model_class="Qwen2_5_VLForConditionalGeneration",
    encoder_children=("visual",),
    lm_children=("language_model",),
    merger="visual.merger",
    head="lm_head",
    int8=frozenset({"encoder", "merger", "layers", "head"}),
    positions="mrope",
    attends=Attends.CAUSAL,
    image_processors=(
        "Qwen2VLImageProcessor",
        "Qwen2VLImageProcessorFast",
        "Qwen2VLImageProcessorPil",
    ),
    parse=_parse,
)

QWEN2_VL = dataclasses.replace(
    QWEN2_5_VL,
    module="transformers.models.qwen2_vl.modeling_qwen2_vl",
    model_class="Qwen2VLForConditionalGeneration",
)
