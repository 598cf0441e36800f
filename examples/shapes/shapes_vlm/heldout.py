"""Held-out questions: seeds and styles that no training run uses, one new image per question."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from PIL import Image

from shapes_vlm import conversations, drawing, questions, scenes, style
from shapes_vlm.style import PLAIN, Style

SEED = 90_000_000
SIDES = (112, 168, 224, 280, 336)

TASKS = (
    "color", "shape", "count_all<=4", "count_all>4", "count_color", "count_shape", "exist",
    "background", "where", "rel_yesno", "rel_what", "extreme", "caption", "ocr", "ocr_line",
    "text_color", "char_count", "cell", "grid_size", "bar_extreme", "bar_value", "bar_count",
    "compare_count", "compare_color", "compare_shape", "multi_turn", "text:arithmetic",
    "text:spell", "text:repeat", "text:no_image", "text:chat",
)  # fmt: skip

GROUPS = {
    "color": ["color"],
    "shape": ["shape"],
    "count<=4": ["count_all<=4", "count_color", "count_shape"],
    "relations": ["rel_yesno", "rel_what", "extreme", "where"],
    "ocr": ["ocr", "ocr_line"],
    "grid": ["cell", "grid_size"],
    "chart": ["bar_extreme", "bar_value", "bar_count"],
}
CONVERSED = ("color", "shape", "where", "count_all")
MAX_EARLIER = 5


@dataclasses.dataclass(frozen=True)
class Item:
    """One question: pictures (before the first turn's text) and (question, answer) turns."""

    task: str
    images: tuple[Image.Image, ...]
    turns: tuple[tuple[str, str], ...]
    meta: dict[str, Any]


def build(
    task: str,
    count: int,
    sides: Sequence[int] = SIDES,
    seed: int = SEED,
    *,
    styled: bool = False,
) -> list[Item]:
    """`count` items of one task; a function of (task, sides, seed, styled).

    Images are plain, or `styled` as training never shows them.
    """
    rng = random.Random(f"{seed}/{task}")
    items: list[Item] = []
    while len(items) < count:
        width, height = rng.choice(sides), rng.choice(sides)
        if max(width, height) > 3 * min(width, height):
            continue
        item = _draw(task, width, height, rng, style.held_out(rng) if styled else PLAIN)
        if item is not None:
            items.append(item)
    return items


def conversation(task: str, count: int, num_earlier: int, seed: int = SEED) -> list[Item]:
    """`count` items whose last turn is of `task`, after `num_earlier` turns about the image."""
    rng = random.Random(f"{seed}/{task}/{num_earlier}")
    items: list[Item] = []
    while len(items) < count:
        width, height = (rng.choice(SIDES[1:]) for _ in range(2))
        scene = scenes.make_scene(rng, width, height, "shapes")
        last = questions.questions(scene, rng, 1, only=[task])
        asked = questions.questions(scene, rng, 3 * MAX_EARLIER)
        earlier = [
            turns[0]
            for kind, turns in asked
            if kind not in (task, "multi_turn") and last and turns[0][0] != last[0][1][0][0]
        ][:num_earlier]
        if last and len(earlier) == num_earlier:
            picture = Image.fromarray(drawing.render(scene, rng))
            turns = (*earlier, *last[0][1])
            items.append(Item(task, (picture,), turns, {"earlier": num_earlier}))
    return items


def _draw(task: str, width: int, height: int, rng: random.Random, look: Style) -> Item | None:
    if task.startswith("text:"):
        kind, turns = conversations.text_only(rng)
        return Item(task, (), tuple(turns), {}) if kind == task[5:] else None
    if task.startswith("compare"):
        drawn = [scenes.scene_shapes(rng, width, height, 4, style=look) for _ in range(2)]
        asked = [q for q in conversations.two_image_questions(*drawn, rng, 3) if q[0] == task]
    else:
        base = task.split("<")[0].split(">")[0]
        kinds = [kind for kind, tasks in questions.TASKS.items() if base in tasks]
        kind = "text" if base == "ocr" else kinds[rng.randrange(len(kinds))]
        drawn = [scenes.make_scene(rng, width, height, kind, look)]
        asked = questions.questions(drawn[0], rng, 1, only=[base])
    if not asked or not _in_range(task, asked[0][1][0][1]):
        return None
    meta: dict[str, Any] = {"size": [width, height]}
    if task.startswith("ocr"):
        text = next(t for t in drawn[0]["texts"] if t["s"] == asked[0][1][0][1])
        meta.update(font=text["size"], length=len(text["s"]))
    images = tuple(Image.fromarray(drawing.render(scene, rng)) for scene in drawn)
    return Item(task, images, tuple(asked[0][1]), meta)


def _in_range(task: str, answer: str) -> bool:
    """Whether a counting answer belongs to the half that the task's name asks for."""
    if task == "count_all<=4":
        return int(answer) <= 4
    if task == "count_all>4":
        return int(answer) > 4
    return True


def normalise(answer: str) -> str:
    """Lower case, without surrounding blanks and a final full stop: what exact match compares."""
    return answer.strip().lower().rstrip(".").strip()
