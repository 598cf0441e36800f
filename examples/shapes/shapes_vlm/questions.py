"""Questions about a scene, with exact answers."""

from __future__ import annotations
import random
from typing import Any
from shapes_vlm.scenes import BGS, CHARS, COLOR_NAMES, SHAPES, rand_string


# ------------------------------------------------------------------ questions
def pick(rng, *xs):
    return rng.choice(xs)


def col_word(rng):
    return rng.choice(["color", "color", "colour"])


def name(o):
    return f"{o['color']} {o['shape']}"


def uniq(objs, key):
    c = {}
    for o in objs:
        c.setdefault(key(o), []).append(o)
    return {k: v[0] for k, v in c.items() if len(v) == 1}


def q_color(sc, rng):
    u = uniq(sc["objs"], lambda o: o["shape"])
    if not u:
        return None
    s = rng.choice(sorted(u))
    return pick(
        rng,
        f"What {col_word(rng)} is the {s}?",
        f"Which {col_word(rng)} does the {s} have?",
        f"Tell me the {col_word(rng)} of the {s}.",
    ), u[s]["color"]


def q_shape(sc, rng):
    u = uniq(sc["objs"], lambda o: o["color"])
    if not u:
        return None
    c = rng.choice(sorted(u))
    return pick(
        rng, f"What shape is {c}?", f"What is the shape of the {c} object?", f"Which shape is {c}?"
    ), u[c]["shape"]


def q_count_all(sc, rng):
    return pick(
        rng, "How many shapes are there?", "How many objects are in the image?", "Count the shapes."
    ), str(len(sc["objs"]))


def q_count_color(sc, rng):
    c = (
        rng.choice([o["color"] for o in sc["objs"]])
        if rng.random() < 0.8
        else rng.choice(COLOR_NAMES)
    )
    return pick(
        rng,
        f"How many {c} shapes are there?",
        f"How many objects are {c}?",
        f"Count the {c} shapes.",
    ), str(sum(o["color"] == c for o in sc["objs"]))


def q_count_shape(sc, rng):
    s = rng.choice([o["shape"] for o in sc["objs"]]) if rng.random() < 0.8 else rng.choice(SHAPES)
    pl = s + ("es" if s == "cross" else "s")
    return pick(
        rng, f"How many {pl} are there?", f"Count the {pl}.", f"How many {pl} do you see?"
    ), str(sum(o["shape"] == s for o in sc["objs"]))


def q_exist(sc, rng):
    have = {name(o) for o in sc["objs"]}
    if rng.random() < 0.5:
        x = rng.choice(sorted(have))
    elif rng.random() < 0.6:  # hard negatives: right colour or right shape, wrong pair
        o = rng.choice(sc["objs"])
        x = (
            f"{o['color']} {rng.choice(SHAPES)}"
            if rng.random() < 0.5
            else f"{rng.choice(COLOR_NAMES)} {o['shape']}"
        )
    else:
        x = f"{rng.choice(COLOR_NAMES)} {rng.choice(SHAPES)}"
    an = "an" if x[0] == "o" else "a"
    return pick(
        rng, f"Is there {an} {x}?", f"Do you see {an} {x}?", f"Does the image contain {an} {x}?"
    ), "yes" if x in have else "no"


def q_background(sc, rng):
    return pick(
        rng, f"What {col_word(rng)} is the background?", f"What is the background {col_word(rng)}?"
    ), sc["bg"]


def q_where(sc, rng):
    W, H = sc["W"], sc["H"]
    u = [
        o
        for o in uniq(sc["objs"], name).values()
        if abs(o["cx"] - W / 2) > W * 0.08 and abs(o["cy"] - H / 2) > H * 0.08
    ]
    if not u:
        return None
    o = rng.choice(u)
    a = ("top" if o["cy"] < H / 2 else "bottom") + " " + ("left" if o["cx"] < W / 2 else "right")
    return pick(rng, f"Where is the {name(o)}?", f"In which corner is the {name(o)}?"), a


DIRS = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}


def gapd(a, b, d, sc):
    """How far b lies from a in direction d, as a fraction of the image side."""
    dx, dy = DIRS[d]
    return (b["cx"] - a["cx"]) * dx / sc["W"] + (b["cy"] - a["cy"]) * dy / sc["H"]


def rel_phrase(d, x):
    return f"{d} the {x}" if d in ("above", "below") else f"{d} of the {x}"


def q_rel_yn(sc, rng):
    u = list(uniq(sc["objs"], name).values())
    if len(u) < 2:
        return None
    for _ in range(6):
        a, b = rng.sample(u, 2)
        d = rng.choice(list(DIRS))
        g = gapd(b, a, d, sc)
        if abs(g) > 0.12:
            return pick(
                rng,
                f"Is the {name(a)} {rel_phrase(d, name(b))}?",
                f"Is the {name(a)} located {rel_phrase(d, name(b))}?",
            ), "yes" if g > 0 else "no"
    return None


def q_rel_what(sc, rng):
    u = list(uniq(sc["objs"], name).values())
    if len(u) < 2:
        return None
    for _ in range(10):
        a, d = rng.choice(u), rng.choice(list(DIRS))
        gs = [(gapd(a, o, d, sc), o) for o in sc["objs"] if o is not a]
        hit = [o for g, o in gs if g > 0.08]
        if len(hit) == 1 and all(abs(g) > 0.08 for g, o in gs):
            return pick(
                rng,
                f"What is {rel_phrase(d, name(a))}?",
                f"Which shape is {rel_phrase(d, name(a))}?",
            ), name(hit[0])
    return None


EXT = {
    "leftmost": ("cx", 1, "W"),
    "rightmost": ("cx", -1, "W"),
    "topmost": ("cy", 1, "H"),
    "bottommost": ("cy", -1, "H"),
}


def extreme(sc, e):
    k, sg, dim = EXT[e]
    os_ = sorted(sc["objs"], key=lambda o: sg * o[k])
    if len(os_) > 1 and abs(os_[0][k] - os_[1][k]) < 0.06 * sc[dim]:
        return None
    return os_[0]


def q_extreme(sc, rng):
    e = rng.choice(list(EXT))
    o = extreme(sc, e)
    if o is None:
        return None
    return pick(
        rng, f"What is the {e} shape?", f"Which shape is {e}?", f"Name the {e} object."
    ), name(o)


def q_caption(sc, rng):
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
    if any(b["cx"] - a["cx"] < 0.05 * sc["W"] for a, b in zip(os_, os_[1:])):
        return None
    ns = [("an " if name(o)[0] == "o" else "a ") + name(o) for o in os_]
    return q, (ns[0] if len(ns) == 1 else " and ".join([", ".join(ns[:-1]), ns[-1]])) + " " + bg


def q_ocr(sc, rng):
    if len(sc["texts"]) != 1:
        return None
    return pick(
        rng, "What does the text say?", "Read the text.", "What is written in the image?"
    ), sc["texts"][0]["s"]


def q_ocr_line(sc, rng):
    if len(sc["texts"]) != 2:
        return None
    i = rng.randint(0, 1)
    w = ["top", "bottom"][i]
    return pick(
        rng, f"What is written at the {w}?", f"Read the {w} text.", f"What does the {w} line say?"
    ), sc["texts"][i]["s"]


def q_text_color(sc, rng):
    if len(sc["texts"]) != 1:
        return None
    return pick(
        rng, f"What {col_word(rng)} is the text?", f"What is the text {col_word(rng)}?"
    ), sc["texts"][0]["color"]


def q_char_count(sc, rng):
    if len(sc["texts"]) != 1:
        return None
    return pick(rng, "How many characters are written?", "How long is the text?"), str(
        len(sc["texts"][0]["s"])
    )


def q_cell(sc, rng):
    j, i = rng.randint(1, sc["rows"]), rng.randint(1, sc["cols"])
    return pick(rng, f"What is in row {j}, column {i}?", f"What is in column {i} of row {j}?"), sc[
        "cells"
    ].get((j, i), "empty")


def q_grid_size(sc, rng):
    w = rng.choice(["row", "column"])
    return f"How many {w}s does the grid have?", str(sc["rows"] if w == "row" else sc["cols"])


def q_bar_extreme(sc, rng):
    hi = rng.random() < 0.5
    os_ = sorted(sc["objs"], key=lambda o: -o["value"] if hi else o["value"])
    if os_[0]["value"] == os_[1]["value"]:
        return None
    w = pick(rng, "tallest", "highest") if hi else pick(rng, "shortest", "lowest")
    return pick(rng, f"Which bar is the {w}?", f"What {col_word(rng)} is the {w} bar?"), os_[0][
        "color"
    ]


def q_bar_value(sc, rng):
    o = rng.choice(sc["objs"])
    return pick(
        rng, f"What is the value of the {o['color']} bar?", f"How high is the {o['color']} bar?"
    ), str(o["value"])


def q_bar_count(sc, rng):
    return pick(rng, "How many bars are there?", "Count the bars."), str(len(sc["objs"]))


def multi_turn(sc, rng):
    """A follow-up that only makes sense with the first turn."""
    e = rng.choice(list(EXT))
    o = extreme(sc, e)
    if o is None:
        return None
    first = (pick(rng, f"What is the {e} shape?", f"Which shape is {e}?"), name(o))
    opp = {
        "leftmost": "rightmost",
        "rightmost": "leftmost",
        "topmost": "bottommost",
        "bottommost": "topmost",
    }[e]
    p = extreme(sc, opp)
    k = rng.random()
    if k < 0.3 and p is not None:
        return [first, (pick(rng, f"And the {opp} one?", f"What about the {opp} one?"), name(p))]
    if k < 0.65:
        return [
            first,
            (pick(rng, f"What {col_word(rng)} is it?", f"And its {col_word(rng)}?"), o["color"]),
        ]
    n = sum(q["color"] == o["color"] for q in sc["objs"])
    return [first, ("How many shapes have the same color as it?", str(n))]


TASKS = {
    "shapes": {
        "color": (q_color, 3),
        "shape": (q_shape, 2),
        "count_all": (q_count_all, 2),
        "count_color": (q_count_color, 2.5),
        "count_shape": (q_count_shape, 2.5),
        "exist": (q_exist, 2.5),
        "background": (q_background, 0.7),
        "where": (q_where, 3),
        "rel_yesno": (q_rel_yn, 4),
        "rel_what": (q_rel_what, 3.5),
        "extreme": (q_extreme, 2.5),
        "caption": (q_caption, 0.8),
        "multi_turn": (multi_turn, 1.2),
        "ocr": (q_ocr, 2),
    },
    "text": {
        "ocr": (q_ocr, 6),
        "ocr_line": (q_ocr_line, 6),
        "text_color": (q_text_color, 1),
        "background": (q_background, 0.4),
        "char_count": (q_char_count, 0.8),
        "caption": (q_caption, 0.4),
    },
    "grid": {
        "cell": (q_cell, 6),
        "grid_size": (q_grid_size, 1.2),
        "caption": (q_caption, 0.5),
        "background": (q_background, 0.3),
    },
    "chart": {
        "bar_extreme": (q_bar_extreme, 3),
        "bar_value": (q_bar_value, 4),
        "bar_count": (q_bar_count, 1),
        "caption": (q_caption, 0.4),
        "background": (q_background, 0.3),
    },
}


def questions(sc, rng, k, only=None):
    """k distinct branches [(task, [(question, answer), ...])] for one scene."""
    tasks = TASKS[sc["kind"]]
    names, w = zip(*[(t, v[1]) for t, v in tasks.items() if only is None or t in only])
    out, seen = [], set()
    for _ in range(k * 3):
        if len(out) == k:
            break
        t = rng.choices(names, w)[0]
        r = tasks[t][0](sc, rng)
        if r is None:
            continue
        turns = r if isinstance(r, list) else [r]
        key = turns[0][0] + turns[-1][0]
        if key not in seen:
            seen.add(key)
            out.append((t, turns))
    return out


def two_image_questions(a, b, rng, k):
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
            x, y = cnt(a, lambda o: o["color"] == c), cnt(b, lambda o: o["color"] == c)
            if (x > 0) == (y > 0):
                continue
            an = "an" if c[0] == "o" else "a"
            r = (
                "compare_color",
                [(f"Which image has {an} {c} shape?", "first" if x else "second")],
            )
        else:
            s = rng.choice(SHAPES)
            x, y = cnt(a, lambda o: o["shape"] == s), cnt(b, lambda o: o["shape"] == s)
            if (x > 0) == (y > 0):
                continue
            r = ("compare_shape", [(f"Which image has a {s}?", "first" if x else "second")])
        if r[1][0][0] not in seen:
            seen.add(r[1][0][0])
            out.append(r)
    return out


NO_IMAGE = "I need an image to answer that."


def text_only(rng):
    """One conversation without an image: (task, turns)."""
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
