"""Questions about a scene, with exact answers."""

from __future__ import annotations

import itertools
import random
from typing import Any

from shapes_vlm.drawing import COLOR_NAMES, SHAPES

NUM_WORDS = ["zero", "one", "two", "three", "four", "five", "six"]

Turns = list[tuple[str, str]]
"""Questions and answers of one conversation."""


def pick(rng: random.Random, *xs: str) -> str:
    """One of several wordings."""
    return rng.choice(xs)


def _col_word(rng):
    return rng.choice(["color", "color", "colour"])


def _name(o):
    return f"{o['color']} {o['shape']}"


def _uniq(objs, key):
    c = {}
    for o in objs:
        c.setdefault(key(o), []).append(o)
    return {k: v[0] for k, v in c.items() if len(v) == 1}


def _q_color(sc, rng):
    u = _uniq(sc["objs"], lambda o: o["shape"])
    if not u:
        return None
    s = rng.choice(sorted(u))
    return pick(
        rng,
        f"What {_col_word(rng)} is the {s}?",
        f"Which {_col_word(rng)} does the {s} have?",
        f"Tell me the {_col_word(rng)} of the {s}.",
    ), u[s]["color"]


def _q_shape(sc, rng):
    u = _uniq(sc["objs"], lambda o: o["color"])
    if not u:
        return None
    c = rng.choice(sorted(u))
    return pick(
        rng, f"What shape is {c}?", f"What is the shape of the {c} object?", f"Which shape is {c}?"
    ), u[c]["shape"]


def _q_count_all(sc, rng):
    return pick(
        rng, "How many shapes are there?", "How many objects are in the image?", "Count the shapes."
    ), str(len(sc["objs"]))


def _q_count_color(sc, rng):
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


def _q_count_shape(sc, rng):
    s = rng.choice([o["shape"] for o in sc["objs"]]) if rng.random() < 0.8 else rng.choice(SHAPES)
    pl = s + ("es" if s == "cross" else "s")
    return pick(
        rng, f"How many {pl} are there?", f"Count the {pl}.", f"How many {pl} do you see?"
    ), str(sum(o["shape"] == s for o in sc["objs"]))


def _q_exist(sc, rng):
    have = {_name(o) for o in sc["objs"]}
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


def _q_background(sc, rng):
    return pick(
        rng,
        f"What {_col_word(rng)} is the background?",
        f"What is the background {_col_word(rng)}?",
    ), sc["bg"]


def _q_where(sc, rng):
    W, H = sc["W"], sc["H"]
    u = [
        o
        for o in _uniq(sc["objs"], _name).values()
        if abs(o["cx"] - W / 2) > W * 0.08 and abs(o["cy"] - H / 2) > H * 0.08
    ]
    if not u:
        return None
    o = rng.choice(u)
    a = ("top" if o["cy"] < H / 2 else "bottom") + " " + ("left" if o["cx"] < W / 2 else "right")
    return pick(rng, f"Where is the {_name(o)}?", f"In which corner is the {_name(o)}?"), a


DIRS = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}


def _gapd(a, b, d, sc):
    """How far b lies from a in direction d, as a fraction of the image side."""
    dx, dy = DIRS[d]
    return (b["cx"] - a["cx"]) * dx / sc["W"] + (b["cy"] - a["cy"]) * dy / sc["H"]


def _rel_phrase(d, x):
    return f"{d} the {x}" if d in ("above", "below") else f"{d} of the {x}"


def _q_rel_yn(sc, rng):
    u = list(_uniq(sc["objs"], _name).values())
    if len(u) < 2:
        return None
    for _ in range(6):
        a, b = rng.sample(u, 2)
        d = rng.choice(list(DIRS))
        g = _gapd(b, a, d, sc)
        if abs(g) > 0.12:
            return pick(
                rng,
                f"Is the {_name(a)} {_rel_phrase(d, _name(b))}?",
                f"Is the {_name(a)} located {_rel_phrase(d, _name(b))}?",
            ), "yes" if g > 0 else "no"
    return None


def _q_rel_what(sc, rng):
    u = list(_uniq(sc["objs"], _name).values())
    if len(u) < 2:
        return None
    for _ in range(10):
        a, d = rng.choice(u), rng.choice(list(DIRS))
        gs = [(_gapd(a, o, d, sc), o) for o in sc["objs"] if o is not a]
        hit = [o for g, o in gs if g > 0.08]
        if len(hit) == 1 and all(abs(g) > 0.08 for g, o in gs):
            return pick(
                rng,
                f"What is {_rel_phrase(d, _name(a))}?",
                f"Which shape is {_rel_phrase(d, _name(a))}?",
            ), _name(hit[0])
    return None


EXT = {
    "leftmost": ("cx", 1, "W"),
    "rightmost": ("cx", -1, "W"),
    "topmost": ("cy", 1, "H"),
    "bottommost": ("cy", -1, "H"),
}


def _extreme(sc, e):
    k, sg, dim = EXT[e]
    os_ = sorted(sc["objs"], key=lambda o: sg * o[k])
    if len(os_) > 1 and abs(os_[0][k] - os_[1][k]) < 0.06 * sc[dim]:
        return None
    return os_[0]


def _q_extreme(sc, rng):
    e = rng.choice(list(EXT))
    o = _extreme(sc, e)
    if o is None:
        return None
    return pick(
        rng, f"What is the {e} shape?", f"Which shape is {e}?", f"Name the {e} object."
    ), _name(o)


def _q_caption(sc, rng):
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
    ns = [("an " if _name(o)[0] == "o" else "a ") + _name(o) for o in os_]
    return q, (ns[0] if len(ns) == 1 else " and ".join([", ".join(ns[:-1]), ns[-1]])) + " " + bg


def _q_ocr(sc, rng):
    if len(sc["texts"]) != 1:
        return None
    return pick(
        rng, "What does the text say?", "Read the text.", "What is written in the image?"
    ), sc["texts"][0]["s"]


def _q_ocr_line(sc, rng):
    if len(sc["texts"]) != 2:
        return None
    i = rng.randint(0, 1)
    w = ["top", "bottom"][i]
    return pick(
        rng, f"What is written at the {w}?", f"Read the {w} text.", f"What does the {w} line say?"
    ), sc["texts"][i]["s"]


def _q_text_color(sc, rng):
    if len(sc["texts"]) != 1:
        return None
    return pick(
        rng, f"What {_col_word(rng)} is the text?", f"What is the text {_col_word(rng)}?"
    ), sc["texts"][0]["color"]


def _q_char_count(sc, rng):
    if len(sc["texts"]) != 1:
        return None
    return pick(rng, "How many characters are written?", "How long is the text?"), str(
        len(sc["texts"][0]["s"])
    )


def _q_cell(sc, rng):
    j, i = rng.randint(1, sc["rows"]), rng.randint(1, sc["cols"])
    return pick(rng, f"What is in row {j}, column {i}?", f"What is in column {i} of row {j}?"), sc[
        "cells"
    ].get((j, i), "empty")


def _q_grid_size(sc, rng):
    w = rng.choice(["row", "column"])
    return f"How many {w}s does the grid have?", str(sc["rows"] if w == "row" else sc["cols"])


def _q_bar_extreme(sc, rng):
    hi = rng.random() < 0.5
    os_ = sorted(sc["objs"], key=lambda o: -o["value"] if hi else o["value"])
    if os_[0]["value"] == os_[1]["value"]:
        return None
    w = pick(rng, "tallest", "highest") if hi else pick(rng, "shortest", "lowest")
    return pick(rng, f"Which bar is the {w}?", f"What {_col_word(rng)} is the {w} bar?"), os_[0][
        "color"
    ]


def _q_bar_value(sc, rng):
    o = rng.choice(sc["objs"])
    return pick(
        rng, f"What is the value of the {o['color']} bar?", f"How high is the {o['color']} bar?"
    ), str(o["value"])


def _q_bar_count(sc, rng):
    return pick(rng, "How many bars are there?", "Count the bars."), str(len(sc["objs"]))


def _multi_turn(sc, rng):
    """A follow-up that only makes sense with the first turn."""
    e = rng.choice(list(EXT))
    o = _extreme(sc, e)
    if o is None:
        return None
    first = (pick(rng, f"What is the {e} shape?", f"Which shape is {e}?"), _name(o))
    opp = {
        "leftmost": "rightmost",
        "rightmost": "leftmost",
        "topmost": "bottommost",
        "bottommost": "topmost",
    }[e]
    p = _extreme(sc, opp)
    k = rng.random()
    if k < 0.3 and p is not None:
        return [first, (pick(rng, f"And the {opp} one?", f"What about the {opp} one?"), _name(p))]
    if k < 0.65:
        return [
            first,
            (pick(rng, f"What {_col_word(rng)} is it?", f"And its {_col_word(rng)}?"), o["color"]),
        ]
    n = sum(q["color"] == o["color"] for q in sc["objs"])
    return [first, ("How many shapes have the same color as it?", str(n))]


TASKS = {
    "shapes": {
        "color": (_q_color, 3),
        "shape": (_q_shape, 2),
        "count_all": (_q_count_all, 2),
        "count_color": (_q_count_color, 2.5),
        "count_shape": (_q_count_shape, 2.5),
        "exist": (_q_exist, 2.5),
        "background": (_q_background, 0.7),
        "where": (_q_where, 3),
        "rel_yesno": (_q_rel_yn, 4),
        "rel_what": (_q_rel_what, 3.5),
        "extreme": (_q_extreme, 2.5),
        "caption": (_q_caption, 0.8),
        "multi_turn": (_multi_turn, 1.2),
        "ocr": (_q_ocr, 2),
    },
    "text": {
        "ocr": (_q_ocr, 6),
        "ocr_line": (_q_ocr_line, 6),
        "text_color": (_q_text_color, 1),
        "background": (_q_background, 0.4),
        "char_count": (_q_char_count, 0.8),
        "caption": (_q_caption, 0.4),
    },
    "grid": {
        "cell": (_q_cell, 6),
        "grid_size": (_q_grid_size, 1.2),
        "caption": (_q_caption, 0.5),
        "background": (_q_background, 0.3),
    },
    "chart": {
        "bar_extreme": (_q_bar_extreme, 3),
        "bar_value": (_q_bar_value, 4),
        "bar_count": (_q_bar_count, 1),
        "caption": (_q_caption, 0.4),
        "background": (_q_background, 0.3),
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
