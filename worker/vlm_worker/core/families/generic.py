"""Unlisted families: what `config.json` and the image processor's file say of any model type.

    image_processor_type ─▶ geometry ─┐
    config.json ─▶ ids, sizes ────────┴─▶ Family without modules ─▶ model.generic, model.verify

transformers' own model computes them. A worker serves one only if its start shows that answers are
those of `generate()`; that also finds the mask, which `Family.spec` here leaves open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from vlm_worker.attends import Attends
from vlm_worker.core.families.family import (
    ControlToken,
    Family,
    FamilySpec,
    Files,
    pixel_fields,
)
from vlm_worker.core.image_geometry import (
    DynamicProcessor,
    FixedProcessor,
    FramesProcessor,
    Processor,
    TilesProcessor,
)
from vlm_worker.core.model_files import ConfigFields

HALF = (0.5, 0.5, 0.5)
_BACKENDS = ("", "Fast", "Pil")
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
_STATELESS = frozenset({"full_attention", "sliding_attention"})

TEXT_DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    name: dict(zip(("vocab_size", "hidden_size", "max_position_embeddings"), sizes, strict=True))
    for name, sizes in {
        "gemma": (256_000, 3072, 8192),
        "gemma2": (256_000, 2304, 8192),
        "llama": (32_000, 4096, 2048),
        "mistral": (32_000, 4096, 131_072),
        "qwen2": (151_936, 4096, 32_768),
        "qwen3": (151_936, 4096, 32_768),
    }.items()
}
"""transformers' defaults, which published files of these language models leave out."""


MODEL_TYPES: Final[Mapping[str, tuple[ControlToken | None, ...]]] = {
    "glm46v": (None,),
    "glm4v": (None,),
    "glm4v_moe": (None,),
    "glm_ocr": (None,),
    "internvl": (ControlToken("<img>"), None, ControlToken("</img>")),
    "paligemma": (None,),
    "qwen3_vl": (None,),
    "qwen3_vl_moe": (None,),
}
"""What the processor of a type writes for an image; None is its placeholders.

No start can show this without a tokenizer, so a type that is absent here is refused.
"""

MROPE_TYPES: Final = frozenset(
    {"glm46v", "glm4v", "glm4v_moe", "glm_ocr", "qwen3_vl", "qwen3_vl_moe"}
)
"""Those with three rows of positions, also if `config.json` leaves out `mrope_section`."""


def parse_unlisted(files: Files) -> Family:
    """The Family of one of MODEL_TYPES.

    Raises:
        ModelConfigError: a field has a value that no unlisted family may have.
    """
    config = files.config
    model_type = config.text("model_type")
    text = config.child("text_config") if "text_config" in config else config
    _check_text(config, text)
    kind, spec = _spec_of(files)
    vision = config.child("vision_config")
    defaults = TEXT_DEFAULTS.get(text.text("model_type", ""), {})
    sizes = {name: text.count(name, defaults.get(name)) for name in _SIZES}
    image_token = next((name for name in _IMAGE_TOKENS if name in config), _IMAGE_TOKENS[0])
    image_token_id = config.count(image_token, least=0)
    has_levels = "deepstack_visual_indexes" in vision
    levels = vision.counts("deepstack_visual_indexes", least=0) if has_levels else ()
    return Family(
        model_type=model_type,
        spec=spec,
        processor=_PROCESSORS[kind](files, spec),
        image_token_id=image_token_id,
        marker_token_id=image_token_id,
        image_text=tuple(
            image_token_id if part is None else part for part in MODEL_TYPES[model_type]
        ),
        num_levels=len(levels),
        **sizes,
    )


_SIZES = ("vocab_size", "hidden_size", "max_position_embeddings")


def _spec_of(files: Files) -> tuple[str, FamilySpec]:
    """The kind of the image processor, and the facts of a model whose mask is not known yet."""
    fields = files.image_processor
    named = fields.text("image_processor_type")
    kind = named.removesuffix("Fast").removesuffix("Pil")
    if kind not in _PROCESSORS:
        raise fields.error(
            "image_processor_type",
            f"is {named!r}, whose images are not built; built for unlisted families: "
            f"{', '.join(sorted(_PROCESSORS))}",
        )
    has_axes = files.config.text("model_type") in MROPE_TYPES
    return kind, FamilySpec(
        module="",
        model_class="",
        encoder_children=(),
        lm_children=(),
        merger="",
        head="",
        int8=frozenset(),
        positions="mrope" if has_axes else "rope",
        attends=Attends.CAUSAL,
        image_processors=tuple(f"{kind}{backend}" for backend in _BACKENDS),
        parse=lambda _, files: parse_unlisted(files),
    )


def _check_text(config: ConfigFields, text: ConfigFields) -> None:
    """Raise ModelConfigError if the language model keeps or computes what no KV block holds."""
    config.must_be("is_encoder_decoder", False, None)
    for name in text.texts("layer_types"):
        if name not in _STATELESS:
            raise text.error(
                "layer_types",
                f"has {name!r}: layers that keep or see more than KV of a window are not built; "
                "use a model whose layers are full_attention or sliding_attention",
            )
    for rope in _ropes(text):
        # `dynamic` changes positions only behind max_position_embeddings, which no sequence reaches
        if rope.text("rope_type", rope.text("type", "default")) == "longrope":
            raise rope.error(
                "rope_type",
                "is 'longrope', whose positions change with the longest sequence of a step; remove "
                "it to serve the original context",
            )


def _ropes(text: ConfigFields) -> Iterator[ConfigFields]:
    """The parameters of positions: of all layers, or of each type of layers."""
    for name in ("rope_parameters", "rope_scaling"):
        fields = text.child(name)
        yield fields
        for inner in ("full_attention", "sliding_attention"):
            yield fields.child(inner)


def _dynamic(files: Files, spec: FamilySpec) -> DynamicProcessor:
    return DynamicProcessor(**_packed(files, spec, least=56 * 56, most=28 * 28 * 1280))


def _frames(files: Files, spec: FamilySpec) -> FramesProcessor:
    return FramesProcessor(**_packed(files, spec, least=112 * 112, most=28 * 28 * 15_000))


def _packed(files: Files, spec: FamilySpec, *, least: int, most: int) -> dict[str, Any]:
    """The fields of a processor whose tower reads packed patches; bounds as in transformers."""
    fields = files.image_processor
    fields.must_be("do_convert_rgb", True, None)
    size = fields.child("size")
    sizes = {
        "patch_size": fields.count("patch_size", 14),
        "merge_size": fields.count("merge_size", 2),
        "temporal_patch_size": fields.count("temporal_patch_size", 2),
        "min_pixels": fields.count("min_pixels", size.count("shortest_edge", least)),
        "max_pixels": fields.count("max_pixels", size.count("longest_edge", most)),
    }
    if sizes["max_pixels"] < sizes["min_pixels"]:
        raise fields.error("size", "has longest_edge (max_pixels) below shortest_edge (min_pixels)")
    return {**pixel_fields(fields, spec), **sizes}


def _stretched(files: Files, spec: FamilySpec, *, resample: int = 3) -> FixedProcessor:
    """All images have one size, and one token per patch or square of patches."""
    config, fields = files.config, files.image_processor
    for name in ("do_pan_and_scan", "do_center_crop", "do_pad"):
        fields.must_be(name, False, None)
    size = fields.child("size")
    height, width = size.count("height", 224), size.count("width", 224)
    patch_size = config.child("vision_config").count("patch_size", 16)
    patches = (height // patch_size) * (width // patch_size)
    tokens = config.count("mm_tokens_per_image", patches)
    merge_size = round((patches / tokens) ** 0.5)
    if height % patch_size or width % patch_size or merge_size**2 * tokens != patches:
        raise fields.error(
            "size",
            f"is {height}x{width}: patches of {patch_size} pixels do not pool to {tokens} tokens",
        )
    return FixedProcessor(
        patch_size=patch_size,
        merge_size=merge_size,
        height=height,
        width=width,
        shortest_edge=0,
        num_extra_tokens=0,
        **pixel_fields(fields, spec, resample=resample, mean=HALF, std=HALF),
    )


def _tiles(files: Files, spec: FamilySpec) -> TilesProcessor:
    """InternVL's, whatever `crop_to_patches` is: the processor around it always cuts images."""
    config, fields = files.config, files.image_processor
    fields.must_be("min_patches", 1, None)
    size, patch_sizes = fields.child("size"), config.child("vision_config").counts("patch_size")
    side, tokens = size.count("height", 384), config.count("image_seq_length", 256)
    patches = side // patch_sizes[0]
    merge_size = max(1, round(patches / tokens**0.5))
    is_square = len({side, size.count("width", 384)}) == len(set(patch_sizes)) == 1
    if not is_square or side % patch_sizes[0] or (patches // merge_size) ** 2 != tokens:
        raise fields.error("size", f"is not that of square tiles of {tokens} tokens")
    if files.processor.count("image_seq_length", tokens) != tokens:
        raise files.processor.error("image_seq_length", f"is not {tokens}, as in config.json")
    return TilesProcessor(
        patch_size=patch_sizes[0],
        merge_size=merge_size,
        side=side,
        max_tiles=fields.count("max_patches", 12),
        **pixel_fields(fields, spec),
    )


_PROCESSORS: Final[Mapping[str, Callable[[Files, FamilySpec], Processor]]] = {
    "Gemma3ImageProcessor": functools.partial(_stretched, resample=2),
    "Glm46VImageProcessor": _frames,
    "Glm4vImageProcessor": _frames,
    "GotOcr2ImageProcessor": _tiles,
    "Qwen2VLImageProcessor": _dynamic,
    "SiglipImageProcessor": _stretched,
}
