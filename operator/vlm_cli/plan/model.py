"""Reads config.json and the image processor's file of each family: ModelFacts. Pure but for files.

tests/contracts/test_plan.py compares parameters and KV with the worker's for every family. Defaults
of fields are those of transformers 5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from vlm_cli.plan.facts import ITEM_BYTES, Linear, ModelFacts, Part, Vision
from vlm_cli.plan.fields import Fields, PlanError, read_json
from vlm_cli.plan.images import FixedSize, NativeSize, Sizing


def read_model(path: Path, *, dtype: str | None = None) -> ModelFacts:
    """Read a model's directory, or its config.json beside the processor's file.

    Args:
        path: a directory or a file.
        dtype: replaces the one in config.json.

    Raises:
        PlanError: a file or field is missing or unsupported; the message names it.
    """
    config_path = path / "config.json" if path.is_dir() else path
    config = Fields(str(config_path), read_json(config_path))
    model_type = config.text("model_type")
    read = _FAMILIES.get(model_type)
    if read is None:
        raise config.error(
            "model_type", f"is {model_type!r}; planned are {', '.join(sorted(_FAMILIES))}"
        )
    for part in (config, config.child("text_config")):
        for name in ("quantization_config", "compression_config"):
            if name in part:
                method = part.child(name).text("quant_method", "unknown")
                raise part.error(
                    name, f"has quant_method {method!r}; the worker refuses quantised checkpoints: "
                    "use the bfloat16 one, with --weights=int8"
                )  # fmt: skip
    images, assumptions = _image_processor(config_path.parent)
    facts = read(config, images)
    found = dtype or _dtype(config)
    return dataclasses.replace(
        facts,
        path=config_path,
        model_type=model_type,
        dtype=found,
        assumptions=assumptions,
    )


def _image_processor(directory: Path) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields of the image processor, in the worker's order of precedence."""
    combined = directory / "processor_config.json"
    if combined.exists():
        processor = Fields(str(combined), read_json(combined))
        if "image_processor" in processor:
            return processor.child("image_processor"), ()
    path = directory / "preprocessor_config.json"
    if path.exists():
        return Fields(str(path), read_json(path)), ()
    return Fields(str(path), {}), (
        f"{path} does not exist: the sizes of images are the family's defaults.",
    )


def _dtype(config: Fields) -> str:
    text = config.child("text_config")
    for fields in (config, text):
        for name in ("dtype", "torch_dtype"):
            if name in fields:
                dtype = fields.text(name)
                if dtype not in ITEM_BYTES:
                    raise fields.error(name, f"is {dtype!r}; planned are {', '.join(ITEM_BYTES)}")
                return dtype
    raise config.error("dtype", "is missing; give --dtype")


def _qwen2_5_vl(config: Fields, images: Fields) -> ModelFacts:
    vision = config.child("vision_config")
    width, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    num_layers = vision.count("depth")
    patch_size = vision.count("patch_size", 14)
    full = set(vision.items("fullatt_block_indexes") or (7, 15, 23, 31))
    tower = Vision(
        width=width,
        inner=inner,
        num_layers=num_layers,
        num_full_layers=len(full & set(range(num_layers))),
        window_patches=(vision.count("window_size", 112) // patch_size) ** 2,
        patch_weights=width * _patch_values(vision, patch_size),
    )
    linears = (
        Linear(width, 3 * width, has_bias=True, count=num_layers),
        Linear(width, width, has_bias=True, count=num_layers),
        Linear(width, inner, has_bias=True, count=2 * num_layers),
        Linear(inner, width, has_bias=True, count=num_layers),
    )
    encoder = Part(linears, tower.patch_weights + 2 * width * num_layers)
    out = vision.count("out_hidden_size", 3584)
    return _qwen(config, images, tower, encoder, out_size=out, norm_size=width)


def _qwen2_vl(config: Fields, images: Fields) -> ModelFacts:
    vision = config.child("vision_config")
    width, num_layers = vision.count("embed_dim", 1280), vision.count("depth", 32)
    inner = int(width * vision.number("mlp_ratio", 4))
    tower = Vision(
        width=width,
        inner=inner,
        num_layers=num_layers,
        num_full_layers=num_layers,
        window_patches=0,
        patch_weights=width * _patch_values(vision, vision.count("patch_size", 14)),
    )
    linears = (
        Linear(width, 3 * width, has_bias=True, count=num_layers),
        Linear(width, width, has_bias=True, count=num_layers),
        Linear(width, inner, has_bias=True, count=num_layers),
        Linear(inner, width, has_bias=True, count=num_layers),
    )
    encoder = Part(linears, tower.patch_weights + 4 * width * num_layers)
    out = vision.count("hidden_size", 3584)
    return _qwen(config, images, tower, encoder, out_size=out, norm_size=2 * width)


def _patch_values(vision: Fields, patch_size: int) -> int:
    channels = vision.count("in_channels", vision.count("in_chans", 3))
    return channels * vision.count("temporal_patch_size", 2) * patch_size**2


def _qwen(
    config: Fields, images: Fields, tower: Vision, encoder: Part, *, out_size: int, norm_size: int
) -> ModelFacts:
    text = config.child("text_config") if "text_config" in config else config
    vision, size = config.child("vision_config"), images.child("size")
    patch_size = images.count("patch_size", vision.count("patch_size", 14))
    merge_size = images.count("merge_size", vision.count("spatial_merge_size", 2))
    merged = tower.width * merge_size**2
    sizing = NativeSize(
        patch_size=patch_size,
        merge_size=merge_size,
        patch_values=_patch_values(vision, patch_size),
        min_pixels=images.count("min_pixels", size.count("shortest_edge", 56 * 56)),
        max_pixels=images.count("max_pixels", size.count("longest_edge", 28 * 28 * 1280)),
    )
    if sizing.max_pixels < sizing.min_pixels:
        raise images.error("size", "has longest_edge (max_pixels) below shortest_edge (min_pixels)")
    hidden, heads = text.count("hidden_size"), text.count("num_attention_heads")
    return _facts(
        text,
        hidden_size=hidden,
        inner=text.count("intermediate_size"),
        vocab_size=text.count("vocab_size"),
        num_layers=text.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=text.count("num_key_value_heads"),
        head_dim=hidden // heads,
        max_model_len=text.count("max_position_embeddings"),
        has_qkv_bias=True,
        num_norms=2,
        is_head_tied=_is_tied(config, text, default=False),
        vision=tower,
        encoder=encoder,
        projector=Part(
            (Linear(merged, merged, has_bias=True), Linear(merged, out_size, has_bias=True)),
            norm_size,
        ),
        sizing=sizing,
        rounded=frozenset({"encoder", "merger", "layers", "head"}),
        sliding=_qwen_sliding(text),
    )


def _qwen_sliding(text: Fields) -> tuple[int, int]:
    """Return the sliding layers and their window; `max_window_layers` is the first of them."""
    if not text.flag("use_sliding_window", default=False):
        return 0, 0
    window, num_layers = text.count("sliding_window", 4096), text.count("num_hidden_layers")
    if "layer_types" in text:
        return text.items("layer_types").count("sliding_attention"), window
    return max(0, num_layers - text.count("max_window_layers", 80, least=0)), window


def _gemma3(config: Fields, images: Fields) -> ModelFacts:
    text, vision = config.child("text_config"), config.child("vision_config")
    width, side = vision.count("hidden_size"), vision.count("image_size")
    patch_size, num_tokens = vision.count("patch_size"), config.count("mm_tokens_per_image", 256)
    if images.flag("do_pan_and_scan", default=False):
        raise images.error("do_pan_and_scan", "is true; the worker builds no crops of an image")
    per_side = math.isqrt(num_tokens)
    if side % patch_size or per_side**2 != num_tokens or (side // patch_size) % per_side:
        raise config.error(
            "mm_tokens_per_image",
            f"is {num_tokens}: {side // patch_size} patches per side do not pool to it",
        )
    tower, encoder = _clip_like(vision, width=width, num_positions=(side // patch_size) ** 2)
    others = width + 2 * width  # the convolution's bias; the last norm
    if vision.flag("vision_use_head", default=True):  # probe, attention, norm, MLP
        inner = tower.inner
        others += 3 * width + 4 * (width**2 + width) + 2 * width * inner + inner + width
    hidden = text.count("hidden_size", 2304)
    num_layers = text.count("num_hidden_layers", 26)
    return _facts(
        text,
        hidden_size=hidden,
        inner=text.count("intermediate_size", 9216),
        vocab_size=text.count("vocab_size", 262_208),
        num_layers=num_layers,
        num_heads=text.count("num_attention_heads", 8),
        num_kv_heads=text.count("num_key_value_heads", 4),
        head_dim=text.count("head_dim", 256),
        max_model_len=text.count("max_position_embeddings", 131_072),
        num_norms=4,
        has_head_norms=True,
        is_head_tied=_is_tied(config, text, default=True),
        vision=tower,
        encoder=dataclasses.replace(encoder, num_others=encoder.num_others + others),
        projector=Part((Linear(width, hidden),), width),
        sizing=FixedSize(
            patch_size=patch_size,
            merge_size=side // patch_size // per_side,
            patch_values=3 * patch_size**2,
            side=side,
            num_extra_tokens=0,
            keeps_ratio=False,
        ),
        rounded=frozenset({"layers"}),
        sliding=_gemma_sliding(text, num_layers),
    )


def _gemma_sliding(text: Fields, num_layers: int) -> tuple[int, int]:
    """Return the sliding layers and their window; without `layer_types`, every sixth is full."""
    window = text.count("sliding_window", 4096)
    if "layer_types" in text:
        return text.items("layer_types").count("sliding_attention"), window
    pattern = text.count("sliding_window_pattern", 6)
    return num_layers - num_layers // pattern, window


def _llava(config: Fields, images: Fields) -> ModelFacts:
    text, vision = config.child("text_config"), config.child("vision_config")
    for fields, built in ((text, "llama"), (vision, "clip_vision_model")):
        if fields.text("model_type") != built:
            raise fields.error("model_type", f"is {fields.text('model_type')!r}; planned: {built}")
    width, patch_size = vision.count("hidden_size"), vision.count("patch_size")
    side = images.child("crop_size").count("height", vision.count("image_size", 336))
    strategy = config.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise config.error("vision_feature_select_strategy", f"is {strategy!r}")
    tower, encoder = _clip_like(vision, width=width, num_positions=(side // patch_size) ** 2 + 1)
    others = width + 4 * width  # the class token; norms before and after the layers
    hidden, heads = text.count("hidden_size", 4096), text.count("num_attention_heads", 32)
    has_bias = config.flag("multimodal_projector_bias", default=True)
    levels = len(_feature_layers(config))
    return _facts(
        text,
        hidden_size=hidden,
        inner=text.count("intermediate_size", 11_008),
        vocab_size=text.count("vocab_size", 32_000),
        num_layers=text.count("num_hidden_layers", 32),
        num_heads=heads,
        num_kv_heads=text.count("num_key_value_heads", heads),
        head_dim=text.count("head_dim", hidden // heads),
        max_model_len=text.count("max_position_embeddings", 2048),
        has_qkv_bias=text.flag("attention_bias", default=False),
        has_output_bias=text.flag("attention_bias", default=False),
        has_mlp_bias=text.flag("mlp_bias", default=False),
        num_norms=2,
        is_head_tied=_is_tied(config, text, default=False),
        vision=dataclasses.replace(tower, num_extra=1),
        encoder=dataclasses.replace(encoder, num_others=encoder.num_others + others),
        projector=Part(
            (Linear(width * levels, hidden, has_bias=has_bias), Linear(hidden, hidden, has_bias)),
        ),
        sizing=FixedSize(
            patch_size=patch_size,
            merge_size=1,
            patch_values=3 * patch_size**2,
            side=side,
            num_extra_tokens=1 if strategy == "full" else 0,
            keeps_ratio=True,
        ),
        rounded=frozenset({"layers"}),
    )


def _feature_layers(config: Fields) -> list[int]:
    """Return the layers of the tower whose outputs the projector reads; one by default."""
    try:
        return config.items("vision_feature_layer") or [-2]
    except PlanError:
        return [-2]  # a single number


def _clip_like(vision: Fields, *, width: int, num_positions: int) -> tuple[Vision, Part]:
    """Return a tower as in CLIP and SigLIP; the caller adds what differs."""
    inner, num_layers = vision.count("intermediate_size"), vision.count("num_hidden_layers")
    patch_size, channels = vision.count("patch_size"), vision.count("num_channels", 3)
    tower = Vision(
        width=width,
        inner=inner,
        num_layers=num_layers,
        num_full_layers=num_layers,
        window_patches=0,
        patch_weights=channels * patch_size**2 * width,
    )
    linears = (
        Linear(width, width, has_bias=True, count=4 * num_layers),
        Linear(width, inner, has_bias=True, count=num_layers),
        Linear(inner, width, has_bias=True, count=num_layers),
    )
    others = tower.patch_weights + num_positions * width + 4 * width * num_layers
    return tower, Part(linears, others)


def _is_tied(config: Fields, text: Fields, *, default: bool) -> bool:
    return config.flag(
        "tie_word_embeddings", default=text.flag("tie_word_embeddings", default=default)
    )


def _facts(
    text: Fields,
    *,
    hidden_size: int,
    inner: int,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_model_len: int,
    num_norms: int,
    is_head_tied: bool,
    vision: Vision,
    encoder: Part,
    projector: Part,
    sizing: Sizing,
    rounded: frozenset[str],
    has_qkv_bias: bool = False,
    has_output_bias: bool = False,
    has_mlp_bias: bool = False,
    has_head_norms: bool = False,
    sliding: tuple[int, int] = (0, 0),
) -> ModelFacts:
    """Return the facts of a model with gated MLPs, and the path and dtype still to be set."""
    if num_heads % num_kv_heads:
        raise text.error(
            "num_key_value_heads", f"is {num_kv_heads}: {num_heads} heads do not divide"
        )
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    norms = num_norms * hidden_size + (2 * head_dim if has_head_norms else 0)
    layers = Part(
        (
            Linear(hidden_size, queries, has_qkv_bias, num_layers),
            Linear(hidden_size, keys, has_qkv_bias, 2 * num_layers),
            Linear(queries, hidden_size, has_output_bias, num_layers),
            Linear(hidden_size, inner, has_mlp_bias, 2 * num_layers),
            Linear(inner, hidden_size, has_mlp_bias, num_layers),
        ),
        norms * num_layers + hidden_size,
    )
    return ModelFacts(
        path=Path(),
        model_type="",
        dtype="bfloat16",
        hidden_size=hidden_size,
        inner=inner,
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_sliding_layers=sliding[0],
        sliding_window=sliding[1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=max_model_len,
        vision=vision,
        encoder=encoder,
        projector=projector,
        layers=layers,
        table=Part(num_others=vocab_size * hidden_size),
        head=Part((Linear(hidden_size, vocab_size),)),
        is_head_tied=is_head_tied,
        sizing=sizing,
        rounded=rounded,
    )


_FAMILIES: Final[Mapping[str, Callable[[Fields, Fields], ModelFacts]]] = {
    "gemma3": _gemma3,
    "llava": _llava,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
}


def families() -> Iterable[str]:
    """Return the planned values of `model_type`."""
    return sorted(_FAMILIES)
