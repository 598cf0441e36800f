"""Scenes: what is in a picture, and what each patch of it shows.

A scene is a dict of size, background, objects and texts, drawn from a seeded generator, so that
data are never stored. `drawing.render` draws it; `dense_labels` is the ground truth of the
trainer's patch loss.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from shapes_vlm.drawing import BGS, CHARS, COLOR_NAMES, PATCH, SHAPES
from shapes_vlm.style import PLAIN, Style, font

WORDS = """
CAT DOG SUN CAR BUS BOX CUP HAT PEN KEY MAP BED EGG FOX OWL BEE COW PIG ANT BAT JAM TEA ICE SKY
SEA TREE FISH BIRD BOOK MOON STAR SHIP DOOR HAND FOOT LAMP LEAF MILK CAKE FROG LION BEAR WOLF
DUCK GOAT KING RING ROAD ROCK SNOW RAIN WIND FIRE GOLD IRON OPEN STOP EXIT PUSH PULL LEFT UP
DOWN ON OFF YES NO GO IN OUT HOT COLD NEW OLD BIG RED BLUE PINK ZERO ONE TWO FIVE NINE TEN VIEW
QUIZ JAZZ WAX YAK ZOO VAN HEXA
""".split()  # noqa: SIM905  a list of these fills a screen

LONG_WORDS = """
APPLE BREAD CHAIR DREAM EARTH FIELD GRAPE HOUSE IMAGE JUICE KNIFE LEMON MOUSE NIGHT OCEAN PIANO
QUEEN RIVER SHEEP TABLE UNCLE VIDEO WATER YOUTH ZEBRA BANANA CASTLE DOCTOR ENGINE FLOWER GARDEN
HAMMER ISLAND JACKET KITTEN LADDER MARKET NUMBER ORANGE PENCIL RABBIT SILVER TICKET VALLEY WINDOW
YELLOW AIRPORT BICYCLE CABINET DIAMOND EVENING FACTORY GALLERY HOLIDAY JOURNEY KITCHEN LIBRARY
MACHINE NATURAL PICTURE QUARTER RAILWAY STATION TEACHER VILLAGE WEATHER
""".split()  # noqa: SIM905  as above

_MIX = {"shapes": 6, "text": 2.6, "grid": 1, "chart": 1.2}


def _place(rng, W, H, r, taken, tries=60, gap=4):
    for _ in range(tries):
        cx, cy = rng.uniform(r + 2, W - r - 2), rng.uniform(r + 2, H - r - 2)
        if all((cx - a) ** 2 + (cy - b) ** 2 > (r + c + gap) ** 2 for a, b, c in taken):
            taken.append((cx, cy, r))
            return cx, cy
    return None


def _base(rng, W, H, kind, style, bg=None):
    return {
        "style": style,
        "W": W,
        "H": H,
        "kind": kind,
        "bg": bg or rng.choice(list(BGS)),
        "objs": [],
        "texts": [],
    }


def _text_color(rng, bg):
    if rng.random() < 0.5:
        return "white" if bg in ("black", "brown") else "black"
    return rng.choice(COLOR_NAMES)


def _add_text(sc, s, size, color, x, yc):
    f = font(size, sc["style"].font)
    chars = []
    for i, ch in enumerate(s):
        a, b = f.getlength(s[:i]), f.getlength(s[: i + 1])
        chars.append((ch, x + (a + b) / 2, yc))
    sc["texts"].append(
        {"s": s, "size": size, "color": color, "x": x, "y": yc, "chars": chars, "w": f.getlength(s)}
    )


def rand_string(rng: random.Random, style: Style = PLAIN) -> str:
    """A word, digits, or up to four characters; in other styles than PLAIN up to seven."""
    if style != PLAIN and rng.random() < 0.35:
        if rng.random() < 0.6:
            return rng.choice(LONG_WORDS)
        return "".join(rng.choice(CHARS) for _ in range(rng.choice([4, 5, 5, 6, 7])))
    u, n = rng.random(), rng.choices([1, 2, 3, 4], [4, 3, 2, 1.5])[0]
    if u < 0.2:
        return rng.choice(WORDS)
    return "".join(rng.choice("0123456789" if u < 0.55 else CHARS) for _ in range(n))


def scene_shapes(
    rng: random.Random, W: int, H: int, nmax: int = 6, n: int | None = None, style: Style = PLAIN
) -> dict[str, Any]:
    """Up to `nmax` shapes, sometimes with a word."""
    sc = _base(rng, W, H, "shapes", style)
    s = math.sqrt(W * H) / 112
    n = n or rng.randint(1, nmax)
    u = rng.random()  # repeated attributes make counting questions worth asking
    cols = rng.sample(COLOR_NAMES, 2 if u < 0.25 else 8)
    shps = rng.sample(SHAPES, 2 if 0.15 < u < 0.4 else 7)
    taken = []
    for _ in range(n):
        r = rng.uniform(9.5, 14.5) * rng.uniform(1, max(1.0, s**0.8))
        p = _place(rng, W, H, r, taken)
        if p:
            sc["objs"].append(
                {
                    "color": rng.choice(cols),
                    "shape": rng.choice(shps),
                    "cx": p[0],
                    "cy": p[1],
                    "r": r,
                }
            )
    if rng.random() < 0.12 and W >= 168:
        t = rand_string(rng, style)
        size = rng.randint(18, 30)
        w = font(size, style.font).getlength(t)
        x, y = rng.uniform(4, max(5, W - w - 4)), rng.uniform(size * 0.7, H - size * 0.7)
        if all(
            abs(y - b) > c + size * 0.6 or x > a + c + 3 or x + w < a - c - 3 for a, b, c in taken
        ):
            _add_text(sc, t, size, _text_color(rng, sc["bg"]), x, y)
    return sc


def _scene_text(rng, W, H, style=PLAIN):
    sc = _base(rng, W, H, "text", style)
    for half in range(rng.choice([1, 1, 2])):  # one line, or one above the other
        s = rand_string(rng, style)
        big = min(H * (0.3 if half else 0.34), 36)
        size = int(rng.uniform(16, big))
        while font(size, style.font).getlength(s) > W - 8 and size > 11:
            size -= 1
        w = font(size, style.font).getlength(s)
        x = rng.uniform(3, max(4, W - w - 3))
        sc.setdefault("_lines", []).append((s, size, x))
    lines = sc.pop("_lines")
    if len(lines) == 1:
        s, size, x = lines[0]
        _add_text(
            sc,
            s,
            size,
            _text_color(rng, sc["bg"]),
            x,
            rng.uniform(size * 0.6 + 2, H - size * 0.6 - 2),
        )
    else:
        c1 = _text_color(rng, sc["bg"])
        c2 = _text_color(rng, sc["bg"])
        for i, (s, size, x) in enumerate(lines):
            lo, hi = (0, H / 2) if i == 0 else (H / 2, H)
            _add_text(
                sc,
                s,
                min(size, int(H * 0.36)),
                c1 if i == 0 else c2,
                x,
                rng.uniform(lo + size * 0.6 + 1, max(lo + size * 0.6 + 1.5, hi - size * 0.6 - 1)),
            )
    return sc


def _scene_grid(rng, W, H, style=PLAIN):
    sc = _base(rng, W, H, "grid", style, rng.choice(["white", "gray", "black"]))
    rows, cols = rng.randint(2, min(4, H // 36)), rng.randint(2, min(4, W // 36))
    m = 4
    cw, ch = (W - 2 * m) / cols, (H - 2 * m) / rows
    solid = rng.random() < 0.5
    line = (60, 60, 60) if sc["bg"] != "black" else (190, 190, 190)
    q = style.line / 2
    sc["rects"] = [(m + i * cw - q, m, m + i * cw + q, H - m, line) for i in range(cols + 1)]
    sc["rects"] += [(m, m + j * ch - q, W - m, m + j * ch + q, line) for j in range(rows + 1)]
    cells = {}
    for j in range(rows):
        for i in range(cols):
            if rng.random() < 0.2:
                continue
            cx, cy, col = m + (i + 0.5) * cw, m + (j + 0.5) * ch, rng.choice(COLOR_NAMES)
            if solid:
                q = min(5, cw * 0.08)
                o = {
                    "color": col,
                    "shape": "cell",
                    "cx": cx,
                    "cy": cy,
                    "r": min(cw, ch) / 2,
                    "box": (cx - cw / 2 + q, cy - ch / 2 + q, cx + cw / 2 - q, cy + ch / 2 - q),
                }
            else:
                o = {
                    "color": col,
                    "shape": rng.choice(SHAPES),
                    "cx": cx,
                    "cy": cy,
                    "r": min(cw, ch) * rng.uniform(0.3, 0.4),
                }
            sc["objs"].append(o)
            cells[(j + 1, i + 1)] = col if solid else f"{col} {o['shape']}"
    sc.update(rows=rows, cols=cols, cells=cells, solid=solid)
    return sc


def _scene_chart(rng, W, H, style=PLAIN):
    sc = _base(rng, W, H, "chart", style, rng.choice(["white", "black"]))
    n = rng.randint(2, min(5, W // 28))
    names = rng.sample(COLOR_NAMES, n)
    vals = [rng.randint(1, 9) for _ in names]
    line = (205, 205, 205) if sc["bg"] == "white" else (70, 70, 70)
    top, bot, left = 6, H - 8, 8
    unit = (bot - top) / 10
    sc["rects"] = [
        (left, bot - k * unit - 0.5, W - 4, bot - k * unit + 0.5, line)
        for k in range(1, 10)
        if style.chart_lines
    ]
    ink = (60, 60, 60) if sc["bg"] == "white" else (220, 220, 220)
    if style.axes:
        sc["rects"] += [(left - 2, top, left, bot + 2, ink), (left - 2, bot, W - 4, bot + 2, ink)]
    step = (W - left - 6) / n
    bw = min(step * rng.uniform(0.45, 0.8), 60)
    for i, (c, v) in enumerate(zip(names, vals, strict=False)):
        cx = left + 2 + (i + 0.5) * step
        box = (cx - bw / 2, bot - v * unit, cx + bw / 2, bot)
        sc["objs"].append(
            {
                "color": c,
                "shape": "bar",
                "cx": cx,
                "cy": bot - v * unit / 2,
                "r": bw / 2,
                "box": box,
                "value": v,
            }
        )
    return sc


SCENES = {"shapes": scene_shapes, "text": _scene_text, "grid": _scene_grid, "chart": _scene_chart}


def make_scene(
    rng: random.Random, W: int, H: int, kind: str | None = None, style: Style = PLAIN
) -> dict[str, Any]:
    """A scene of one kind, or of a drawn one."""
    kind = kind or rng.choices(list(_MIX), list(_MIX.values()))[0]
    return SCENES[kind](rng, W, H, style=style)


def clutter_scene(rng: random.Random, W: int, H: int, style: Style = PLAIN) -> dict[str, Any]:
    """Dense scene for perception pre-training: many shapes and many characters."""
    sc = _base(rng, W, H, "clutter", style)
    taken = []
    area = W * H / (112 * 112)
    for _ in range(int(rng.randint(0, 3) * area) + 1):
        r = rng.uniform(9, 16) * rng.choice([1, 1, 1.5])
        p = _place(rng, W, H, r, taken, 12)
        if p:
            sc["objs"].append(
                {
                    "color": rng.choice(COLOR_NAMES),
                    "shape": rng.choice(SHAPES),
                    "cx": p[0],
                    "cy": p[1],
                    "r": r,
                }
            )
    for _ in range(int(rng.randint(3, 8) * area) + 1):
        size = rng.randint(16, 32)
        s = "".join(rng.choice(CHARS) for _ in range(rng.randint(1, 5)))
        w = font(size, style.font).getlength(s)
        if w > W - 6:
            continue
        x, y = rng.uniform(2, W - w - 2), rng.uniform(size * 0.5 + 2, H - size * 0.5 - 2)
        hh = size * 0.5
        if all(abs(y - b) > c + hh or x > a + c + 2 or x + w < a - c - 2 for a, b, c in taken):
            _add_text(sc, s, size, _text_color(rng, sc["bg"]), x, y)
            taken.extend((x + k, y, hh) for k in range(0, int(w) + 1, max(6, int(hh))))
    return sc


def dense_labels(sc: dict[str, Any]) -> np.ndarray:
    """Per-patch ground truth [gh, gw, 4]: colour, shape, object-centre flag, character."""
    gh, gw = sc["H"] // PATCH, sc["W"] // PATCH
    lab = np.zeros((gh, gw, 4), np.int64)
    yy, xx = (np.arange(gh) + 0.5)[:, None] * PATCH, (np.arange(gw) + 0.5)[None] * PATCH
    for o in sc["objs"]:
        ci = COLOR_NAMES.index(o["color"]) + 1
        si = (
            SHAPES.index(o["shape"]) + 1
            if o["shape"] in SHAPES
            else len(SHAPES) + (1 if o["shape"] == "bar" else 2)
        )
        if "box" in o:
            x0, y0, x1, y1 = o["box"]
            m = (xx >= x0) & (xx <= x1) & (yy >= y0) & (yy <= y1)
        else:
            m = (xx - o["cx"]) ** 2 + (yy - o["cy"]) ** 2 <= (o["r"] + 2) ** 2
        j, i = min(gh - 1, int(o["cy"] // PATCH)), min(gw - 1, int(o["cx"] // PATCH))
        m = np.broadcast_to(m, (gh, gw))
        lab[m, 0], lab[m, 1] = ci, si
        lab[j, i] = (ci, si, 1, lab[j, i, 3])
    for t in sc["texts"]:
        for chx, x, y in t["chars"]:
            j, i = min(gh - 1, max(0, int(y // PATCH))), min(gw - 1, max(0, int(x // PATCH)))
            lab[j, i, 3] = CHARS.index(chx) + 1
    return lab
