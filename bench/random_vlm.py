"""Creates a Qwen2-VL with 400 million random weights, which every compared engine can run.

    text    24 layers x 1024, 8 heads x 128 over 2 KV heads, MLP 2816, vocabulary 32,000, tied head
    vision  12 layers x 768; an image of 448 x 448 is 1,024 patches and 256 tokens

`SMALL` has the same form at a tenth of the size, for tests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

IMAGE_SIDE = 448
NUM_IMAGE_TOKENS = 256
VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN = 31_990, 31_991, 31_992, 31_993
FIRST_WORD, LAST_WORD = 300, 31_000


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """Widths and depths; head size 128 in text, 64 in vision."""

    hidden: int = 1024
    layers: int = 24
    heads: int = 8
    kv_heads: int = 2
    mlp: int = 2816
    vision_layers: int = 12
    vision_width: int = 768
    vocabulary: int = 32_000


FULL = Size()
SMALL = Size(hidden=512, layers=6, heads=4, mlp=1408, vision_layers=3, vision_width=384)


def make_model(
    directory: Path, size: Size = FULL, *, max_side: int = IMAGE_SIDE, seed: int = 0
) -> Path:
    """Write config, image processor and bfloat16 weights into a directory.

    Square images of up to `max_side` pixels keep their size.
    """
    import torch
    from transformers.models.qwen2_vl import modeling_qwen2_vl as modeling

    config = modeling.Qwen2VLConfig(
        text_config={
            "hidden_size": size.hidden,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "intermediate_size": size.mlp,
            "vocab_size": size.vocabulary,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [16, 24, 24],
                "rope_theta": 1e6,
            },
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": size.vision_layers,
            "embed_dim": size.vision_width,
            "num_heads": size.vision_width // 64,
            "hidden_size": size.hidden,
            "mlp_ratio": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = modeling.Qwen2VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(previous)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": max_side**2},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def arguments(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """The flags of benchmarks of this model; `rounds` is their default."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="counted rounds")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", type=Path, help="where the model is, or is to be made")
    return parser


@contextlib.contextmanager
def model_directory(given: Path | None) -> Iterator[Path]:
    """A directory with the model: the given one, filled if it is empty, or a temporary one."""
    if given is not None:
        if not (given / "config.json").exists():
            given.mkdir(parents=True, exist_ok=True)
            make_model(given)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as made:
        yield make_model(Path(made))
