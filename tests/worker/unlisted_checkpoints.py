"""Tiny checkpoints of unlisted families, made by code: random weights and the processor's file.

No tokenizer: engines take ids. Sizes are the smallest that show a difference of masks, levels,
experts and positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from worker.checkpoints import randomised

from vlm_worker.core.families import FAMILIES, generic

VOCAB_SIZE, NUM_TEXT_TOKENS, IMAGE = 448, 340, 440
IDS = {
    "image_token_id": IMAGE, "video_token_id": 441, "vision_start_token_id": 442,
    "vision_end_token_id": 443,
}  # fmt: skip
GLM_IDS = {
    "image_token_id": IMAGE, "video_token_id": 441, "image_start_token_id": 442,
    "image_end_token_id": 443, "video_start_token_id": 444, "video_end_token_id": 445,
}  # fmt: skip
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def make_unlisted(
    directory: Path, name: str, *, seed: int = 0, vocab_size: int = VOCAB_SIZE, **ids: int
) -> Path:
    """Write a model of an unlisted family into a new directory; `ids` are of special tokens."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    directory.mkdir(parents=True)
    model_type, fields, processor = {**UNLISTED, **LANGUAGE_MODELS}[name]()
    fields |= ids
    fields["text_config"] = fields["text_config"] | {"vocab_size": vocab_size}
    config = CONFIG_MAPPING[model_type](**fields, tie_word_embeddings=False)
    config.dtype = "float32"
    model = randomised(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval(), seed)
    model.save_pretrained(directory)
    _write_defaults(directory, config)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def _write_defaults(directory: Path, config: Any) -> None:
    """Write the fields that equal transformers' defaults, too."""
    (directory / "config.json").write_text(config.to_json_string(use_diff=False))


def _text(model_type: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        **({"model_type": model_type} if model_type else {}),
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _mrope(section: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "mrope_section": section, "rope_theta": 10000.0, **more}


def _packed(kind: str, patch: int = 14, **more: Any) -> dict[str, Any]:
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 100 * patch**2}
    return {
        "image_processor_type": kind, "patch_size": patch, "merge_size": 2,
        "temporal_patch_size": 2, "size": size, **more,
    }  # fmt: skip


def _qwen_tower(patch: int, **more: Any) -> dict[str, Any]:
    return {
        "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 64, "patch_size": patch, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_channels": 3, **more,
    }  # fmt: skip


_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
_LEVELS = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}

Made = tuple[str, dict[str, Any], dict[str, Any]]


def _qwen3(model_type: str, **text: Any) -> Made:
    rope = _mrope([4, 2, 2], mrope_interleaved=True)
    fields = {
        **IDS,
        "text_config": _text(rope_parameters=rope, **text),
        "vision_config": _qwen_tower(16, **_LEVELS),
    }
    return model_type, fields, _packed("Qwen2VLImageProcessorFast", 16, **HALVES)


def _qwen2_5() -> Made:
    fields = {
        **IDS,
        "text_config": _text(rope_parameters=_mrope([2, 3, 3])),
        "vision_config": _qwen_tower(14, window_size=56, fullatt_block_indexes=[1]),
    }
    return "qwen2_5_vl", fields, _packed("Qwen2VLImageProcessor")


def _glm(model_type: str, kind: str, text: dict[str, Any]) -> Made:
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 64, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "image_size": 112,
    }  # fmt: skip
    if model_type == "glm46v":
        vision["model_type"] = "glm4v_vision"
    processor = _packed(kind)
    processor["size"] = {name: 2 * pixels for name, pixels in processor["size"].items()}
    return model_type, {**GLM_IDS, "text_config": text, "vision_config": vision}, processor


def _glm4v_moe() -> Made:
    text = _text(
        rope_parameters=_mrope([1, 1, 2], partial_rotary_factor=0.5), n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, n_group=1,
        topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    return _glm("glm4v_moe", "Glm4vImageProcessor", text)


def _siglip(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
        "vision_use_head": False, **more,
    }  # fmt: skip


def _square(kind: str) -> dict[str, Any]:
    return {"image_processor_type": kind, "size": {"height": 56, "width": 56}, **HALVES}


def _paligemma(text: str) -> Made:
    """Gemma 2 has its default order of layers: with a window and without, in turn."""
    more = {"query_pre_attn_scalar": 16, "layer_types": MIXED_LAYERS, "sliding_window": 8}
    fields = {
        "text_config": _text(text, **(more if text == "gemma2" else {})),
        "vision_config": _siglip(projection_dim=64),
        "image_token_index": IMAGE,
        "projection_dim": 64,
    }
    return "paligemma", fields, _square("SiglipImageProcessor")


def _gemma3() -> Made:
    text = _text(
        "gemma3_text", layer_types=MIXED_LAYERS, sliding_window=8, query_pre_attn_scalar=16
    )
    fields = {
        "text_config": text,
        "vision_config": _siglip(),
        "image_token_index": IMAGE,
        "boi_token_index": 442,
        "eoi_token_index": 443,
        "mm_tokens_per_image": 4,
    }
    return "gemma3", fields, _square("Gemma3ImageProcessor")


def _gemma4(**more: Any) -> Made:
    """Its own images are not built; the language model alone runs."""
    text = _text(
        layer_types=MIXED_LAYERS[:2] * 2, num_hidden_layers=4, sliding_window=8,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCAB_SIZE,
        use_bidirectional_attention="vision", **{"global_head_dim": 16, **more},
    )  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 14,
        "pooling_kernel_size": 2, "position_embedding_size": 64,
    }  # fmt: skip
    fields = {
        "text_config": text, "vision_config": vision, "audio_config": None,
        "image_token_id": IMAGE, "video_token_id": 441, "audio_token_id": 442,
        "boi_token_id": 443, "eoi_token_id": 444,
    }  # fmt: skip
    return "gemma4", fields, _square("SiglipImageProcessor")


def _internvl() -> Made:
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": [56, 56], "patch_size": [14, 14],
    }  # fmt: skip
    fields = {
        "text_config": _text("qwen3"),
        "vision_config": vision,
        "image_token_id": IMAGE,
        "image_seq_length": 4,
    }
    return "internvl", fields, {**_square("GotOcr2ImageProcessorFast"), "max_patches": 6}


LANGUAGE_MODELS: Mapping[str, Callable[[], Made]] = {
    "gemma4": _gemma4,
    "gemma4_wide": lambda: _gemma4(global_head_dim=32),
}
"""Makers of checkpoints whose encoder is not served."""

UNLISTED: Mapping[str, Callable[[], Made]] = {
    "gemma3": _gemma3,
    "glm46v": lambda: _glm(
        "glm46v", "Glm46VImageProcessor", _text("glm4v_text", rope_parameters=_mrope([2, 3, 3]))
    ),
    "glm4v": lambda: _glm("glm4v", "Glm4vImageProcessor", _text(rope_parameters=_mrope([2, 3, 3]))),
    "glm4v_moe": _glm4v_moe,
    "glm_ocr": lambda: _glm(
        "glm_ocr", "Glm46VImageProcessor", _text(rope_parameters=_mrope([2, 3, 3]))
    ),
    "internvl": _internvl,
    "paligemma": lambda: _paligemma("gemma"),
    "paligemma2": lambda: _paligemma("gemma2"),
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": lambda: _qwen3("qwen3_vl"),
    "qwen3_vl_moe": lambda: _qwen3("qwen3_vl_moe", **_EXPERTS),
}
"""Makers of model type, `config.json` and processor; `unlist` says why two are listed types."""


def unlist(patch: pytest.MonkeyPatch) -> None:
    """Let the generic path compute what is listed, or what it refuses for its images."""
    for name in ("gemma3", "qwen2_5_vl"):
        patch.delitem(FAMILIES, name)  # type: ignore[arg-type]
    for name in ("gemma3", "gemma4", "qwen2_5_vl"):
        patch.setitem(generic.MODEL_TYPES, name, (None,))  # type: ignore[attr-defined]
    patch.setattr(generic, "MROPE_TYPES", generic.MROPE_TYPES | {"qwen2_5_vl"})
