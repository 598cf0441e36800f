"""LLaVA-1.5: one size for all images, plain positions, causal attention.

    <image> x 576       a 336x336 image in patches of 14: 24 x 24, without CLIP's class token

Only models with CLIP's tower and Llama's language model are supported, as in LLaVA-1.5.
"""

from __future__ import annotations

from vlm_worker.attends import Attends
from vlm_worker.core.families.family import Family, FamilySpec, Files, must_equal, pixel_fields
from vlm_worker.core.image_geometry import FixedProcessor
from vlm_worker.core.model_files import ConfigFields


def _parse(spec: FamilySpec, files: Files) -> Family:
    config = files.config
    text, vision = config.child("text_config"), config.child("vision_config")
    text.must_be("model_type", "llama")
    vision.must_be("model_type", "clip_vision_model")
    processor = _processor(files, spec, patch_size=vision.count("patch_size", 14))
    must_equal(vision, "image_size", processor.height, default=336)
    image_token_id = config.count("image_token_index", config.count("image_token_id", 32_000))
    return Family(
        model_type=config.text("model_type"),
        spec=spec,
        processor=processor,
        image_token_id=image_token_id,
        marker_token_id=image_token_id,
        image_text=(image_token_id,),
        vocab_size=text.count("vocab_size", 32_000),
        hidden_size=text.count("hidden_size", 4096),
        max_position_embeddings=text.count("max_position_embeddings", 2048),
    )


def _processor(files: Files, spec: FamilySpec, *, patch_size: int) -> FixedProcessor:
    fields = files.image_processor
    shared = pixel_fields(fields, spec)
    for name in ("do_convert_rgb", "do_center_crop"):
        fields.must_be(name, True)
    fields.must_be("do_pad", False, None)
    shortest_edge = fields.child("size").count("shortest_edge", 224)
    crop = fields.child("crop_size")
    height, width = crop.count("height", 224), crop.count("width", 224)
    if height != width or height % patch_size:
        raise fields.error(
            "crop_size", f"is {height}x{width}; it must be a square of {patch_size}-pixel patches"
        )
    if shortest_edge < height:
        raise fields.error(
            "size", f"has shortest_edge {shortest_edge}, below the {height} of crop_size"
        )
    processor = FixedProcessor(
        patch_size=patch_size,
        merge_size=1,
        height=height,
        width=width,
        shortest_edge=shortest_edge,
        num_extra_tokens=_num_extra_tokens(files.config),
        **shared,
    )
    _check_processor(files.processor, processor)
    return processor


def _num_extra_tokens(config: ConfigFields) -> int:
    """1 if the embedding includes CLIP's class token, else 0."""
    strategies = {"default": 0, "full": 1}
    strategy = config.text("vision_feature_select_strategy", "default")
    if strategy not in strategies:
        raise config.error(
            "vision_feature_select_strategy", f"is {strategy!r}; built: default, full"
        )
    return strategies[strategy]


def _check_processor(fields: ConfigFields, processor: FixedProcessor) -> None:
    """Raise ModelConfigError if `processor_config.json` counts other tokens than the tower."""
    if "patch_size" not in fields:
        return
    patch_size = fields.count("patch_size")
    num_tokens = (processor.height // patch_size) * (processor.width // patch_size)
    num_tokens += fields.count("num_additional_image_tokens", 0, least=0)
    if fields.text("vision_feature_select_strategy", "default") == "default":
        num_tokens -= 1
    if num_tokens != processor.max_tokens:
        raise fields.error(
            "num_additional_image_tokens",
            f"makes {num_tokens} tokens of an image, the vision tower {processor.max_tokens}",
        )


SPEC = FamilySpec(
    module="transformers.models.llava.modeling_llava",
    model_class="LlavaForConditionalGeneration",
    encoder_children=("vision_tower", "multi_modal_projector"),
    lm_children=("language_model",),
    merger="multi_modal_projector",
    head="lm_head",
    int8=frozenset({"layers"}),
    positions="rope",
    attends=Attends.CAUSAL,
    image_processors=(
        "CLIPImageProcessor",
        "CLIPImageProcessorFast",
        "CLIPImageProcessorPil",
        "LlavaImageProcessor",
        "LlavaImageProcessorFast",
        "LlavaImageProcessorPil",
    ),
    parse=_parse,
)
