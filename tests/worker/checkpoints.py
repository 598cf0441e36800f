"""Tiny checkpoints of every family, made by code: random weights, tokenizer, processor, template.

They are what transformers itself saves, so whatever reads them reads a real model's files. Weights
are drawn so that a wrong KV entry cannot hide behind a confident answer: logits have a standard
deviation of at least 3.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from worker import tokenizers_by_code as by_code

from vlm_worker.core.families import FAMILIES

SHAPES = Path(__file__).parents[2] / "examples" / "shapes" / "model"
MIN_LOGITS_STD = 3.0
IMAGE_SIDE, PATCH_SIZE = 112, 14
WINDOW = 8
"""Of Gemma 3's sliding layers: fewer tokens than one of its images has."""


def make_checkpoint(directory: Path, model_type: str, *, seed: int = 0) -> Path:
    """Write a model of a family into a new directory."""
    directory.mkdir(parents=True)
    fields = _MAKERS[model_type](directory)
    spec = FAMILIES[model_type]
    model_class = getattr(importlib.import_module(spec.module), spec.model_class)
    config = model_class.config_class.from_dict({"model_type": model_type, **fields})
    config.dtype = "float32"
    model = randomised(model_class(config).eval(), seed)
    model.save_pretrained(directory)
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def make_processor(directory: Path, model_type: str) -> Any:
    """Write all but the weights; transformers' processor of the same files."""
    from transformers import AutoProcessor

    directory.mkdir(parents=True)
    config = {"model_type": model_type, **_MAKERS[model_type](directory)}
    (directory / "config.json").write_text(json.dumps(config))
    return AutoProcessor.from_pretrained(directory)


@torch.no_grad()
def randomised(model: Any, seed: int) -> Any:
    """Give a tiny model random weights under which its answers depend on all of them."""
    rng = torch.Generator().manual_seed(seed)
    for name, weights in model.named_parameters():
        if weights.ndim >= 2:
            weights.normal_(0, 1.5 * weights[0].numel() ** -0.5, generator=rng)
        elif "norm" in name or "ln" in name:
            weights.add_(torch.empty_like(weights).normal_(0, 0.2, generator=rng))
        else:
            weights.normal_(0, 0.1, generator=rng)
    model.get_input_embeddings().weight.normal_(0, 1, generator=rng)
    ids = torch.randint(10, by_code.NUM_TEXT_TOKENS, (1, 64), generator=rng)
    scale = 1.2 * MIN_LOGITS_STD / model(input_ids=ids).logits.std()
    model.get_output_embeddings().weight.mul_(scale)
    return model


def _text(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": by_code.VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _vision(model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": IMAGE_SIDE,
        "patch_size": PATCH_SIZE,
    }  # fmt: skip


def _llava(directory: Path) -> dict[str, Any]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": IMAGE_SIDE},
            crop_size={"height": IMAGE_SIDE, "width": IMAGE_SIDE},
        ),
        tokenizer=by_code.llama(),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=by_code.LLAVA_TEMPLATE,
    )
    processor.save_pretrained(directory)
    return {
        "text_config": _text(model_type="llama"),
        "vision_config": _vision("clip_vision_model"),
        "image_token_index": by_code.IMAGE,
        "tie_word_embeddings": False,
    }


def _gemma3(directory: Path) -> dict[str, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": IMAGE_SIDE, "width": IMAGE_SIDE}),
        tokenizer=by_code.gemma(),
        image_seq_length=16,
        chat_template=by_code.GEMMA_TEMPLATE,
    )
    processor.save_pretrained(directory)
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    text = _text(
        model_type="gemma3_text", head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW,
        num_hidden_layers=len(layers), layer_types=layers,
    )  # fmt: skip
    return {
        "text_config": text,
        "vision_config": {**_vision("siglip_vision_model"), "vision_use_head": False},
        "mm_tokens_per_image": 16,
        "boi_token_index": by_code.IMAGE_START,
        "eoi_token_index": by_code.IMAGE_END,
        "image_token_index": by_code.IMAGE,
        "tie_word_embeddings": False,
    }


def _qwen2_5_vl(directory: Path) -> dict[str, Any]:
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return _qwen(directory, vision)


def _qwen2_vl(directory: Path) -> dict[str, Any]:
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2}
    return _qwen(directory, vision)


def _qwen(directory: Path, vision: dict[str, Any]) -> dict[str, Any]:
    """Tokenizer and processor are those of `shapes`."""
    for file in SHAPES.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, directory)
    shapes = json.loads((SHAPES / "config.json").read_text())
    tokens = {name: value for name, value in shapes.items() if name.endswith("_token_id")}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    patches = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {
        **tokens,
        "text_config": _text(vocab_size=704, rope_parameters=rope, pad_token_id=0),
        "vision_config": {**vision, **patches, "in_channels": 3},
        "tie_word_embeddings": False,
    }


_MAKERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "gemma3": _gemma3,
    "llava": _llava,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
}
