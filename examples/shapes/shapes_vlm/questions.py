"""Questions about a scene, with exact answers."""

from __future__ import annotations

import itertools
import random
from typing import Any

from shapes_vlm import diagram_questions, shape_questions
from shapes_vlm.wording import Turns, color_word, name, pick

NUM_WORDS = ["zero", "one", "two", "three", "four", "five", "six"]


def _background(sc, rng):
    return pick(
        rng,
        f"What {color_word(rng)} is the background?",
        f"What is the background {color_word(rng)}?",
    ), sc["bg"]


def _caption(sc, rng):
    q = pick(
        rng, "Describe the image.", "What do you see?", "Write a caption.", "What is in this image?"
    )
    bg = f"on a {sc['bg']} background."
    if sc["kind"] == "text":
        return q, " and ".join(f'"{t["s"]}"' for t in sc["texts"]) + f" written {bg}"
    if sc["kind"] == "grid":
        return q, f"a grid with {sc['rows']} rows and {sc['cols']} columns {bg}"
    if sc["kind"] == "chart":
        return q, f"a bar chart with {len(sc['objs'])} bars {bg}"
    os_ = sorted(sc["objs"], key=lambda o: o["cx"])
    if len(os_) > 3:
        return q, f"{NUM_WORDS[len(os_)]} shapes {bg}"
    if any(b["cx"] - a["cx"] < 0.05 * sc["W"] for a, b in itertools.pairwise(os_)):
        return None
    ns = [("an " if name(o)[0] == "o" else "a ") + name(o) for o in os_]
    return q, (ns[0] if len(ns) == 1 else " and ".join([", ".join(ns[:-1]), ns[-1]])) + " " + bg


TASKS = {
    "shapes": {
        "color": (shape_questions.color, 3),
        "shape": (shape_questions.shape, 2),
        "count_all": (shape_questions.count_all, 2),
        "count_color": (shape_questions.count_color, 2.5),
        "count_shape": (shape_questions.count_shape, 2.5),
        "exist": (shape_questions.exist, 2.5),
        "background": (_background, 0.7),
        "where": (shape_questions.where, 3),
        "rel_yesno": (shape_questions.relation_holds, 4),
        "rel_what": (shape_questions.relation_to, 3.5),
        "extreme": (shape_questions.extreme, 2.5),
        "caption": (_caption, 0.8),
        "multi_turn": (shape_questions.multi_turn, 1.2),
        "ocr": (diagram_questions.ocr, 2),
    },
    "text": {
        "ocr": (diagram_questions.ocr, 6),
        "ocr_line": (diagram_questions.ocr_line, 6),
        "text_color": (diagram_questions.text_color, 1),
        "background": (_background, 0.4),
        "char_count": (diagram_questions.char_count, 0.8),
        "caption": (_caption, 0.4),
    },
    "grid": {
        "cell": (diagram_questions.cell, 6),
        "grid_size": (diagram_questions.grid_size, 1.2),
        "caption": (_caption, 0.5),
        "background": (_background, 0.3),
    },
    "chart": {
        "bar_extreme": (diagram_questions.bar_extreme, 3),
        "bar_value": (diagram_questions.bar_value, 4),
        "bar_count": (diagram_questions.bar_count, 1),
        "caption": (_caption, 0.4),
        "background": (_background, 0.3),
    },
}


def questions(
    sc: dict[str, Any], rng: random.Random, k: int, only: list[str] | None = None
) -> list[tuple[str, Turns]]:
    """At most `k` distinct conversations about one scene, as (task, turns)."""
    tasks = TASKS[sc["kind"]]
    chosen = {t: v[1] for t, v in tasks.items() if only is None or t in only}
    out, seen = [], set()
    for _ in range(k * 3):
        if len(out) == k:
            break
        t = rng.choices(list(chosen), list(chosen.values()))[0]
        r = tasks[t][0](sc, rng)
        if r is None:
            continue
        turns = r if isinstance(r, list) else [r]
        key = turns[0][0] + turns[-1][0]
        if key not in seen:
            seen.add(key)
            out.append((t, turns))
    return out
