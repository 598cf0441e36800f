"""Questions about two pictures, and conversations without one."""

from __future__ import annotations

import random
from typing import Any

from shapes_vlm.drawing import COLOR_NAMES, SHAPES
from shapes_vlm.scenes import rand_string
from shapes_vlm.wording import Turns, pick


def two_image_questions(
    a: dict[str, Any], b: dict[str, Any], rng: random.Random, k: int
) -> list[tuple[str, Turns]]:
    """At most `k` distinct questions that compare two scenes, as (task, turns)."""
    out, seen = [], set()

    def cnt(sc, f):
        return sum(f(o) for o in sc["objs"])

    for _ in range(k * 4):
        if len(out) == k:
            break
        u = rng.random()
        if u < 0.4:
            na, nb = len(a["objs"]), len(b["objs"])
            if na == nb:
                continue
            q = pick(rng, "Which image has more shapes?", "Which picture contains more objects?")
            r = ("compare_count", [(q, "first" if na > nb else "second")])
        elif u < 0.7:
            c = rng.choice(COLOR_NAMES)
            x, y = cnt(a, lambda o, c=c: o["color"] == c), cnt(b, lambda o, c=c: o["color"] == c)
            if (x > 0) == (y > 0):
                continue
            an = "an" if c[0] == "o" else "a"
            r = (
                "compare_color",
                [(f"Which image has {an} {c} shape?", "first" if x else "second")],
            )
        else:
            s = rng.choice(SHAPES)
            x, y = cnt(a, lambda o, s=s: o["shape"] == s), cnt(b, lambda o, s=s: o["shape"] == s)
            if (x > 0) == (y > 0):
                continue
            r = ("compare_shape", [(f"Which image has a {s}?", "first" if x else "second")])
        if r[1][0][0] not in seen:
            seen.add(r[1][0][0])
            out.append(r)
    return out


NO_IMAGE = "I need an image to answer that."


def text_only(rng: random.Random) -> tuple[str, Turns]:
    """One conversation without a picture, as (task, turns)."""
    u = rng.random()
    if u < 0.3:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        if rng.random() < 0.6:
            return "arithmetic", [(pick(rng, f"What is {a} + {b}?", f"{a} + {b} = ?"), str(a + b))]
        a, b = max(a, b), min(a, b)
        return "arithmetic", [(pick(rng, f"What is {a} - {b}?", f"{a} - {b} = ?"), str(a - b))]
    if u < 0.5:
        w = rand_string(rng)
        return "spell", [(pick(rng, f"Spell {w}.", f"Spell the word {w}."), " ".join(w))]
    if u < 0.65:
        w = rand_string(rng)
        return "repeat", [(pick(rng, f"Repeat {w}.", f"Say {w}."), w)]
    if u < 0.8:
        q = pick(
            rng,
            "What color is the circle?",
            "How many shapes are there?",
            "What does the text say?",
            "Describe the image.",
            "Which bar is the tallest?",
            "What is the leftmost shape?",
            "What color is the background?",
            "What do you see?",
            "Is there a red circle?",
            "Read the text.",
        )
        return "no_image", [(q, NO_IMAGE)]
    return "chat", [
        rng.choice(
            [
                (
                    "What can you do?",
                    "I answer questions about shapes, colors, text, grids and bar charts.",
                ),
                ("Help", "I answer questions about shapes, colors, text, grids and bar charts."),
                ("Who are you?", "I am a tiny vision language model."),
                ("What are you?", "I am a tiny vision language model."),
                ("What is your name?", "I am a tiny vision language model."),
                ("Hello", "Hello! Show me an image and ask a question."),
                ("Hello!", "Hello! Show me an image and ask a question."),
                ("Hi", "Hello! Show me an image and ask a question."),
                ("Thank you.", "You are welcome."),
                ("Thanks!", "You are welcome."),
                (
                    "Which shapes do you know?",
                    "circle, square, triangle, star, diamond, cross and ring.",
                ),
                (
                    "Which colors do you know?",
                    "red, green, blue, yellow, orange, purple, pink and cyan.",
                ),
                ("Goodbye", "Goodbye!"),
                ("Bye", "Goodbye!"),
            ]
        )
    ]
