"""Held-out questions of `shapes`, prepared by transformers' own processor: what identity tests ask.

`questions()` holds more than 200: text alone, one image, several, several turns, and several
turns with an image each. Drawn from seeds, so that every test and every process asks the same.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from shapes_vlm import heldout

from vlm_worker.types import ImageItem, PreparedImage

SHAPES = Path(__file__).parents[3] / "examples" / "shapes" / "model"
IMAGE_TOKEN_ID = 5
MERGED_PATCHES = 4

NUM_PER_TASK = 6
NUM_TURNS_WITH_IMAGES = 20
MORE_OF = {"multi_turn": 20, "compare_color": 9, "compare_count": 9}


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """One prompt.

    Attributes:
        task: what is asked, for messages of failed tests.
        messages: as the chat template and OpenAI's API order them; a content part of type `image`
            holds a PIL image.
        token_ids: the prompt, placeholders expanded.
        items: places of the images in it.
        prepared_images: their patches.
        right_answer: what should follow.
    """

    task: str
    messages: tuple[dict[str, Any], ...]
    token_ids: tuple[int, ...]
    items: tuple[ImageItem, ...]
    prepared_images: tuple[PreparedImage, ...]
    right_answer: str = ""

    @property
    def images(self) -> list[Image.Image]:
        """The images, in order."""
        parts = [part for message in self.messages for part in message["content"]]
        return [part["image"] for part in parts if part["type"] == "image"]


@functools.cache
def questions(per_task: int = NUM_PER_TASK) -> tuple[Question, ...]:
    """The questions, in an order that mixes tasks."""
    items = [
        item
        for task in heldout.TASKS
        for item in heldout.build(task, max(per_task, MORE_OF.get(task, 0)))
    ]
    first = heldout.build("color", NUM_TURNS_WITH_IMAGES, seed=heldout.SEED + 1)
    second = heldout.build("count_all<=4", NUM_TURNS_WITH_IMAGES, seed=heldout.SEED + 1)
    drawn = [(item.task, _turns(item)) for item in items]
    drawn += [("image_per_turn", _turns(a) + _turns(b)) for a, b in zip(first, second, strict=True)]
    mixed = sorted(range(len(drawn)), key=lambda i: hashlib.sha256(str(i).encode()).digest())
    return tuple(_prepare(*drawn[i]) for i in mixed)


def _turns(item: heldout.Item) -> list[dict[str, Any]]:
    """Messages in turn, right answers included."""
    messages: list[dict[str, Any]] = []
    for number, (question, answer) in enumerate(item.turns):
        images = item.images if number == 0 else ()
        content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": question})
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return messages


@functools.cache
def _processor() -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(SHAPES)


def _prepare(task: str, turns: list[dict[str, Any]]) -> Question:
    *messages, last = turns
    batch = _processor().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="np"
    )
    token_ids = batch["input_ids"][0]
    grids = [tuple(int(n) for n in grid) for grid in batch.get("image_grid_thw", ())]
    items, prepared = place_images(token_ids, grids, batch.get("pixel_values"))
    right_answer = last["content"][0]["text"]
    return Question(task, tuple(messages), tuple(token_ids.tolist()), items, prepared, right_answer)


def place_images(
    token_ids: np.ndarray, grids: list[Any], patches: np.ndarray | None
) -> tuple[tuple[ImageItem, ...], tuple[PreparedImage, ...]]:
    """Find the runs of placeholders, and cut the packed patches by image."""
    items, prepared = [], []
    offset = used = 0
    for grid in grids:
        assert patches is not None
        num_patches = int(np.prod(grid))
        num_tokens = num_patches // MERGED_PATCHES
        own = np.ascontiguousarray(patches[used : used + num_patches], np.float32)
        key = hashlib.sha256(str(grid).encode() + own.tobytes()).digest()
        offset += int(np.argmax(token_ids[offset:] == IMAGE_TOKEN_ID))
        assert (token_ids[offset : offset + num_tokens] == IMAGE_TOKEN_ID).all()
        items.append(ImageItem(key, offset, num_tokens, grid))
        prepared.append(PreparedImage(key, grid, num_tokens, own.data))
        offset += num_tokens
        used += num_patches
    assert patches is None or used == len(patches)
    return tuple(items), tuple(prepared)
