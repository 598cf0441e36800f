"""Questions about a scene of shapes, each with its answer; None where it has none."""

from __future__ import annotations

from shapes_vlm.drawing import COLOR_NAMES, SHAPES
from shapes_vlm.wording import color_word, name, only_ones, pick

DIRS = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}
EXT = {
    "leftmost": ("cx", 1, "W"),
    "rightmost": ("cx", -1, "W"),
    "topmost": ("cy", 1, "H"),
    "bottommost": ("cy", -1, "H"),
}


def color(sc, rng):
    """The colour of the only shape of its kind."""
    u = only_ones(sc["objs"], lambda o: o["shape"])
    if not u:
        return None
    s = rng.choice(sorted(u))
    return pick(
        rng,
        f"What {color_word(rng)} is the {s}?",
        f"Which {color_word(rng)} does the {s} have?",
        f"Tell me the {color_word(rng)} of the {s}.",
    ), u[s]["color"]


def shape(sc, rng):
    """The shape of the only object of its colour."""
    u = only_ones(sc["objs"], lambda o: o["color"])
    if not u:
        return None
    c = rng.choice(sorted(u))
    return pick(
        rng, f"What shape is {c}?", f"What is the shape of the {c} object?", f"Which shape is {c}?"
    ), u[c]["shape"]


def count_all(sc, rng):
    """How many there are."""
    return pick(
        rng, "How many shapes are there?", "How many objects are in the image?", "Count the shapes."
    ), str(len(sc["objs"]))


def count_color(sc, rng):
    """How many of one colour."""
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


def count_shape(sc, rng):
    """How many of one shape."""
    s = rng.choice([o["shape"] for o in sc["objs"]]) if rng.random() < 0.8 else rng.choice(SHAPES)
    pl = s + ("es" if s == "cross" else "s")
    return pick(
        rng, f"How many {pl} are there?", f"Count the {pl}.", f"How many {pl} do you see?"
    ), str(sum(o["shape"] == s for o in sc["objs"]))


def exist(sc, rng):
    """Whether an object of a colour and a shape is there."""
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


def where(sc, rng):
    """In which corner one lies."""
    W, H = sc["W"], sc["H"]
    u = [
        o
        for o in only_ones(sc["objs"], name).values()
        if abs(o["cx"] - W / 2) > W * 0.08 and abs(o["cy"] - H / 2) > H * 0.08
    ]
    if not u:
        return None
    o = rng.choice(u)
    a = ("top" if o["cy"] < H / 2 else "bottom") + " " + ("left" if o["cx"] < W / 2 else "right")
    return pick(rng, f"Where is the {name(o)}?", f"In which corner is the {name(o)}?"), a


def relation_holds(sc, rng):
    """Whether one lies on a side of another."""
    u = list(only_ones(sc["objs"], name).values())
    if len(u) < 2:
        return None
    for _ in range(6):
        a, b = rng.sample(u, 2)
        d = rng.choice(list(DIRS))
        g = _gapd(b, a, d, sc)
        if abs(g) > 0.12:
            return pick(
                rng,
                f"Is the {name(a)} {_rel_phrase(d, name(b))}?",
                f"Is the {name(a)} located {_rel_phrase(d, name(b))}?",
            ), "yes" if g > 0 else "no"
    return None


def relation_to(sc, rng):
    """Which one lies on a side of another."""
    u = list(only_ones(sc["objs"], name).values())
    if len(u) < 2:
        return None
    for _ in range(10):
        a, d = rng.choice(u), rng.choice(list(DIRS))
        gs = [(_gapd(a, o, d, sc), o) for o in sc["objs"] if o is not a]
        hit = [o for g, o in gs if g > 0.08]
        if len(hit) == 1 and all(abs(g) > 0.08 for g, o in gs):
            return pick(
                rng,
                f"What is {_rel_phrase(d, name(a))}?",
                f"Which shape is {_rel_phrase(d, name(a))}?",
            ), name(hit[0])
    return None


def _gapd(a, b, d, sc):
    """How far b lies from a in direction d, as a fraction of the image side."""
    dx, dy = DIRS[d]
    return (b["cx"] - a["cx"]) * dx / sc["W"] + (b["cy"] - a["cy"]) * dy / sc["H"]


def _rel_phrase(d, x):
    return f"{d} the {x}" if d in ("above", "below") else f"{d} of the {x}"


def extreme(sc, rng):
    """Which one lies farthest to a side."""
    e = rng.choice(list(EXT))
    o = _extreme(sc, e)
    if o is None:
        return None
    return pick(
        rng, f"What is the {e} shape?", f"Which shape is {e}?", f"Name the {e} object."
    ), name(o)


def multi_turn(sc, rng):
    """A follow-up that only makes sense with the first turn."""
    e = rng.choice(list(EXT))
    o = _extreme(sc, e)
    if o is None:
        return None
    first = (pick(rng, f"What is the {e} shape?", f"Which shape is {e}?"), name(o))
    opp = {
        "leftmost": "rightmost",
        "rightmost": "leftmost",
        "topmost": "bottommost",
        "bottommost": "topmost",
    }[e]
    p = _extreme(sc, opp)
    k = rng.random()
    if k < 0.3 and p is not None:
        return [first, (pick(rng, f"And the {opp} one?", f"What about the {opp} one?"), name(p))]
    if k < 0.65:
        return [
            first,
            (
                pick(rng, f"What {color_word(rng)} is it?", f"And its {color_word(rng)}?"),
                o["color"],
            ),
        ]
    n = sum(q["color"] == o["color"] for q in sc["objs"])
    return [first, ("How many shapes have the same color as it?", str(n))]


def _extreme(sc, e):
    k, sg, dim = EXT[e]
    os_ = sorted(sc["objs"], key=lambda o: sg * o[k])
    if len(os_) > 1 and abs(os_[0][k] - os_[1][k]) < 0.06 * sc[dim]:
        return None
    return os_[0]
