r"""Gemma 3: one size for all images; the tokens of an image attend to each other both ways.

    "\n\n" <start_of_image> <image_soft_token> x 256 <end_of_image> "\n\n"

A chat template writes only <start_of_image>. The processor adds the rest as text before
tokenization, so line breaks merge with adjacent ones. Pan and scan is not implemented.
"""

from __future__ import annotations

import math

from vlm_worker.attends import Attends
from vlm_worker.core.families.family import Family, FamilySpec, Files, must_equal, pixel_fields
from vlm_worker.core.image_geometry import FixedProcessor
from vlm_worker.core.model_files import ConfigFields

HALF = (0.5, 0.5, 0.5)


def _parse(spec: FamilySpec, files: Files) -> Family:
    config = files.config
    text, vision = config.child("text_config"), config.child("vision_config")
    vision.must_be("model_type", "siglip_vision_model")
    # transformers' model ignores these caps, so they cannot be served
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        text.must_be(name, None)
    text.must_be("use_bidirectional_attention", False, None)
    num_tokens = config.count("mm_tokens_per_image", 256)
    _check_tokens(files, num_tokens)
    processor = _processor(
        files.image_processor,
        spec,
        patch_size=vision.count("patch_size", 16),
        num_tokens=num_tokens,
    )
    must_equal(vision, "image_size", processor.height, default=224)
    image_token_id = config.count("image_token_index", config.count("image_token_id", 262_144))
    start = config.count("boi_token_index", 255_999)
    end = config.count("eoi_token_index", 256_000)
    return Family(
        model_type=config.text("model_type"),
        spec=spec,
        processor=processor,
        image_token_id=image_token_id,
        marker_token_id=start,
        image_text=("\n\n", start, image_token_id, end, "\n\n"),
        vocab_size=text.count("vocab_size", 262_208),
        hidden_size=text.count("hidden_size", 2304),
        max_position_embeddings=text.count("max_position_embeddings", 131_072),
    )


def _check_tokens(files: Files, num_tokens: int) -> None:
    """Raise ModelConfigError if the processor's number of placeholders is not `num_tokens`."""
    for fields in (files.processor, files.image_processor):
        if "image_seq_length" in fields and fields.count("image_seq_length") != num_tokens:
            raise fields.error(
                "image_seq_length",
                f"is {fields.count('image_seq_length')}, mm_tokens_per_image is {num_tokens}",
            )


def _processor(
    fields: ConfigFields, spec: FamilySpec, *, patch_size: int, num_tokens: int
) -> FixedProcessor:
    shared = pixel_fields(fields, spec, resample=2, mean=HALF, std=HALF)
    fields.must_be("do_convert_rgb", True, None)
    fields.must_be("do_pan_and_scan", False, None)
    size = fields.child("size")
    height, width = size.count("height", 224), size.count("width", 224)
    tokens_per_side = math.isqrt(num_tokens)
    patches_per_side = height // patch_size
    if (
        height != width
        or height % patch_size
        or tokens_per_side**2 != num_tokens
        or patches_per_side % tokens_per_side
    ):
        raise fields.error(
            "size",
            f"is {height}x{width}: patches of {patch_size} pixels do not pool to a square of "
            f"{num_tokens} tokens (mm_tokens_per_image)",
        )
    return FixedProcessor(
        patch_size=patch_size,
        merge_size=patches_per_side // tokens_per_side,
        height=height,
        width=width,
        shortest_edge=0,
        num_extra_tokens=0,
        **shared,
    )


SPEC = FamilySpec(
    module="transformers.models.gemma3.modeling_gemma3",
    model_class="Gemma3ForConditionalGeneration",
    encoder_children=("vision_tower", "multi_modal_projector"),
    lm_children=("language_model",),
    merger="multi_modal_projector",
    head="lm_head",
    int8=frozenset({"layers"}),
    positions="rope",
    attends=Attends.IMAGES,
    image_processors=(
        "Gemma3ImageProcessor",
        "Gemma3ImageProcessorFast",
        "Gemma3ImageProcessorPil",
    ),
    parse=_parse,
)
