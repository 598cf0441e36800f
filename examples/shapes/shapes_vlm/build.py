"""Tokenizer, configuration and processor: everything of the model directory but the weights.

python -m shapes_vlm.build --out model
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from shapes_vlm import questions, scenes

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
VOCABULARY = 768
MIN_PIXELS, MAX_PIXELS = 56 * 56, 448 * 448
TOKENIZER = Path(__file__).parent / "tokenizer.json"

# ChatML as in Qwen2.5-VL, without a default system prompt. Jinja's trim would eat the newlines
# after the role and after <|im_end|>, so they are written as expressions.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message['role'] }}\n"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] in ('image', 'image_url') or 'image' in item or 'image_url' in item -%}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in item -%}{{ item['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
).replace("\n", "{{ '\\n' }}")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The stored tokenizer.

    It is kept as a file because any change to the generator changes the corpus, and a tokenizer
    trained anew would no longer fit an older checkpoint.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(TOKENIZER)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )


def train_tokenizer() -> None:
    """Write tokenizer.json anew, from the generator's texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(TOKENIZER))


def _corpus(seed: int = 7, num_scenes: int = 5000) -> Iterator[str]:
    """Texts for the tokenizer, without OCR strings, so that upper case splits into characters."""
    rng = random.Random(seed)
    drop = re.compile(r"\b[A-Z0-9]+\b")
    for number in range(num_scenes):
        conversations = questions.questions(scenes.make_scene(rng, 168, 168), rng, 6)
        pair = [scenes.scene_shapes(rng, 168, 168) for _ in range(2)]
        conversations += conversations.two_image_questions(*pair, rng, 1)
        if number % 2:
            conversations.append(conversations.text_only(rng))
        for task, turns in conversations:
            for question, answer in turns:
                if task in ("spell", "repeat"):
                    question, answer = "Spell the word . Repeat . Say .", ""  # noqa: PLW2901
                texts = [question, "user", "assistant", "system"]
                texts += [] if "ocr" in task else [answer]
                for text in texts:
                    whole = task == "chat" or text == conversations.NO_IMAGE
                    yield text if whole else drop.sub("", text)


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """3.85 M parameters: vision 4 layers x 128, language 5 layers x 256."""
    token = tokenizer.convert_tokens_to_ids
    rows = (len(tokenizer) + 63) // 64 * 64
    text = {
        "vocab_size": rows,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        # small, because pictures have few cells
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 40.0,
            "mrope_section": [4, 14, 14],
        },
        "bos_token_id": token("<|endoftext|>"),
        "eos_token_id": token("<|im_end|>"),
        "pad_token_id": token("<|endoftext|>"),
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 2,
        "out_hidden_size": 256,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained model."""
    return Qwen2_5_VLForConditionalGeneration(make_config(tokenizer))


def save_processor(path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write tokenizer, chat template and image processor.

    `Qwen2_5_VLProcessor` needs a video processor and so torchvision; `PaddleOCRVLProcessor` does
    the same for images (one placeholder per merged patch, `mm_token_type_ids`) without it.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    }
    named = {"processor_class": "PaddleOCRVLProcessor"}
    _write_json(path / "preprocessor_config.json", image | named)
    _write_json(path / "processor_config.json", named | {"image_processor": image})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("model"))
    parser.add_argument("--train-tokenizer", action="store_true", help="write tokenizer.json anew")
    arguments = parser.parse_args()
    if arguments.train_tokenizer:
        train_tokenizer()
    save_processor(arguments.out, make_tokenizer())
