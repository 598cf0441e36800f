"""Models and node classes for the tests of `vlm plan`: config.json files of known shapes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from vlm_cli.plan.facts import ModelFacts
from vlm_cli.plan.model import read_model

ROOT = Path(__file__).parents[3]
QWEN_7B = ROOT / "examples" / "plan" / "qwen2.5-vl-7b"
NODES = ROOT / "examples" / "plan"

# CLIP ViT-L/14 at 336 pixels, and Vicuna 7B: 32 layers, no shared heads
LLAVA_7B: dict[str, Any] = {
    "model_type": "llava",
    "torch_dtype": "float16",
    "image_token_index": 32000,
    "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 24, "image_size": 336, "patch_size": 14,
    },
}  # fmt: skip

GEMMA3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
        "num_hidden_layers": 27, "image_size": 896, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


# of Qwen2-VL 7B; its language model has the shape of Qwen2.5-VL 7B
QWEN2_VISION: dict[str, Any] = {
    "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
    "hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def with_text(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A copy of a config with other fields of its language model; None removes one."""
    found = copy.deepcopy(config)
    text = found.get("text_config", found)
    text.update(fields)
    for name in [name for name, value in text.items() if value is None]:
        del text[name]
    return found


def qwen_7b(**fields: Any) -> dict[str, Any]:
    return with_text(json.loads((QWEN_7B / "config.json").read_text()), **fields)


def write(directory: Path, config: dict[str, Any], processor: Any = None) -> Path:
    """Write a model's directory, without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def facts(directory: Path, config: dict[str, Any]) -> ModelFacts:
    return read_model(write(directory, config))
