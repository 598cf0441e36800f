"""Tiny models of every family and random questions to them, with transformers' answers.

A question is random text with up to two images of noise, prepared by transformers' own processor.
Beginnings and images come from small sets, so that prompts share prefixes and images; some end
right behind an image, so that a prefix hit ends inside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from worker.checkpoints import MIN_LOGITS_STD
from worker.identity.questions import Question
from worker.identity.reference import Answer, answer, load_reference
from worker.tokenizers_by_code import NUM_TEXT_TOKENS

from vlm_worker.core.families import Family, load_family
from vlm_worker.types import ImageItem, PreparedImage

NUM_TOKENS = 24
SIZES = ((150, 120), (61, 250), (112, 112), (230, 200))
FIRST_TEXT_TOKEN = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, questions to it, and the answers."""

    model_dir: Path
    family: Family
    pairs: tuple[tuple[Question, Answer], ...]


def make_case(model_dir: Path, *, count: int, seed: int, min_distinct: int = 60) -> Case:
    """Ask transformers; the seed is printed, as it makes all of a failure."""
    print(f"{model_dir.name}: seed {seed}")
    family, reference = load_family(model_dir), load_reference(model_dir)
    pairs = tuple(
        (question, answer(reference, question, max_tokens=NUM_TOKENS, ignore_eos=True))
        for question in random_questions(model_dir, family, count=count, seed=seed)
    )
    assert min(answer.logits.std() for _, answer in pairs) >= MIN_LOGITS_STD
    distinct = len({token for _, answer in pairs for token in answer.token_ids})
    assert distinct > min_distinct, "continuations that repeat a few tokens show little"
    return Case(model_dir, family, pairs)


def random_questions(model_dir: Path, family: Family, *, count: int, seed: int) -> list[Question]:
    """0, 1, 2, 0, ... images; the whole is a function of the seed."""
    rng = np.random.default_rng(seed)
    images = [
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in SIZES
    ]
    prepared = [_prepared(model_dir, family, image) for image in images]

    def text(least: int, most: int) -> list[int]:
        size = int(rng.integers(least, most))
        return rng.integers(FIRST_TEXT_TOKEN, NUM_TEXT_TOKENS, size).tolist()

    beginnings = [text(9, 14), text(5, 8)]
    out = []
    for number in range(count):
        token_ids, chosen, items = [1, *beginnings[number % 2]], [], []
        for _ in range(number % 3):
            choice = int(rng.integers(len(prepared)))
            one = prepared[choice]
            before, after = _around(family)
            token_ids += before
            place = (one.image_key, len(token_ids), one.num_tokens, one.grid_thw)
            items.append(ImageItem(*place))
            token_ids += [family.image_token_id] * one.num_tokens + after
            chosen.append(choice)
            token_ids += text(1, 3) if number % 4 else text(2, 9)
        token_ids += text(1, 2) if number % 2 else text(3, 12)
        content = tuple({"type": "image", "image": images[choice]} for choice in chosen)
        out.append(
            Question(
                task=f"{len(chosen)} images",
                messages=({"role": "user", "content": content},),
                token_ids=tuple(token_ids),
                items=tuple(items),
                prepared_images=tuple(prepared[choice] for choice in chosen),
            )
        )
    return out


def _around(family: Family) -> tuple[list[int], list[int]]:
    """Control tokens before and after an image."""
    control = [part for part in family.image_text if isinstance(part, int)]
    at = control.index(family.image_token_id)
    return control[:at], control[at + 1 :]


_MODULES = {
    "CLIPImageProcessor": "clip",
    "Gemma3ImageProcessor": "gemma3",
    "GotOcr2ImageProcessor": "got_ocr2",
    "Glm46VImageProcessor": "glm46v",
    "Glm4vImageProcessor": "glm4v",
    "Qwen2VLImageProcessor": "qwen2_vl",
    "SiglipImageProcessor": "siglip",
}


def image_processor(model_dir: Path, family: Family) -> Any:
    """Transformers' own, on Pillow."""
    kind = family.spec.image_processors[0]
    name = _MODULES[kind]
    loaded = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    return getattr(loaded, f"{kind}Pil").from_pretrained(model_dir)


def _prepared(model_dir: Path, family: Family, image: Image.Image) -> PreparedImage:
    crops = {"crop_to_patches": True} if family.processor.kind == "tiles" else {}
    made = image_processor(model_dir, family)(images=[image], return_tensors="np", **crops)
    values = np.ascontiguousarray(made["pixel_values"], np.float32)
    geometry = family.geometry(image.height, image.width)
    key = hashlib.sha256(str(geometry).encode() + values.tobytes()).digest()
    return PreparedImage(key, geometry.grid_thw, geometry.num_tokens, values.reshape(-1).data)


def with_images(case: Case) -> list[tuple[Question, Answer]]:
    """The questions that have any."""
    return [pair for pair in case.pairs if pair[0].prepared_images]


def cut_behind_images(question: Question) -> Question:
    """The same up to the token behind the last image."""
    end = question.items[-1].end + 1
    return dataclasses.replace(question, token_ids=question.token_ids[:end])


def longest(case: Case) -> int:
    """Tokens of the longest question with its answer."""
    return max(itertools.chain(len(q.token_ids) + NUM_TOKENS for q, _ in case.pairs))
