"""Prompts of InternVL are those of transformers' processor: control tokens around tiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from worker import tokenizers_by_code as by_code
from worker.gateway.test_prompts import our_part, their_part

from vlm_worker.core.families import ModelConfigError
from vlm_worker.gateway.api.requests import Message
from vlm_worker.gateway.conversation import Conversation
from vlm_worker.gateway.prompts import PromptBuilder

TOKENS = {440: "<IMG_CONTEXT>", 441: "<img>", 442: "</img>", 443: "<video>"}
NAMED = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}
TEMPLATE = """\
{% for message in messages %}{{ message['role'] + ':' }}\
{% for item in message['content'] %}\
{% if item['type'] == 'image' %}{{ '<IMG_CONTEXT>\\n' }}{% else %}{{ item['text'] }}{% endif %}\
{% endfor %}{% endfor %}"""
CONFIG = {
    "model_type": "internvl",
    "image_token_id": 440,
    "image_seq_length": 4,
    "text_config": {
        "vocab_size": by_code.VOCAB_SIZE, "hidden_size": 64, "max_position_embeddings": 512,
    },
    "vision_config": {"patch_size": [14, 14]},
}  # fmt: skip


class ImagesAlone(InternVLProcessor):
    """Without the video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: object) -> type:
        return type(argument)


def written(directory: Path, tokens: dict[int, str]) -> Any:
    """The files of a model without its weights; transformers' processor of them."""
    tokenizer = by_code._fast(by_code._byte_pairs(()), tokens, extra_special_tokens=NAMED)
    processor = ImagesAlone(
        image_processor=GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=TEMPLATE,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    processor.image_processor.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return processor


SIZES = [(56, 56), (120, 60), (300, 299), (9, 3), (61, 250)]


def test_the_tokens_are_those_of_the_processor(tmp_path: Path) -> None:
    processor, ours = written(tmp_path, TOKENS), PromptBuilder(tmp_path)
    for sizes in ([], SIZES[:1], SIZES[1:3], SIZES):
        told = ["the ", *sizes, "what"]
        made = processor.apply_chat_template(
            [{"role": "user", "content": [*map(their_part, told)]}], tokenize=True, return_dict=True
        )
        counts = [ours.family.geometry(height, width).num_tokens for width, height in sizes]
        message = Message("user", tuple(map(our_part, told)))
        prompt = ours.chat(Conversation([message]), counts)
        assert list(prompt.token_ids) == list(made["input_ids"][0])


def test_a_tokenizer_without_the_tokens_around_images_is_refused(tmp_path: Path) -> None:
    written(tmp_path, TOKENS)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("</img>", "<other>"))
    with pytest.raises(ModelConfigError, match=r"tokenizer\.json: has no control token </img>"):
        PromptBuilder(tmp_path)
