"""Scenes: what is in a picture, how it is drawn, and what each patch of it shows.

A scene is a dict: size, background, objects and texts, all drawn from a seeded generator, so that data
are never stored. `render` draws it with the font embedded in Pillow; `dense_labels` says per 14-pixel
patch what is there, the ground truth of the trainer's auxiliary loss.
"""

from __future__ import annotations
import math
import random
from typing import Any
import numpy as np
from PIL import Image, ImageDraw, ImageFont

PATCH = 14  # ViT patch; one visual token = 2x2 patches = 28x28 pixels
CELL = 28

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 220, 50),
    "orange": (245, 140, 30),
    "purple": (140, 60, 180),
    "pink": (250, 150, 190),
    "cyan": (60, 200, 220),
}
BGS = {
    "white": (246, 246, 246),
    "gray": (150, 150, 150),
    "black": (16, 16, 16),
    "brown": (110, 75, 45),
}
SHAPES = ["circle", "square", "triangle", "star", "diamond", "cross", "ring"]
CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOR_NAMES = list(COLORS)
WORDS = (
    "CAT DOG SUN CAR BUS BOX CUP HAT PEN KEY MAP BED EGG FOX OWL BEE COW PIG ANT BAT JAM TEA ICE SKY SEA TREE "
    "FISH BIRD BOOK MOON STAR SHIP DOOR HAND FOOT LAMP LEAF MILK CAKE FROG LION BEAR WOLF DUCK GOAT KING RING "
    "ROAD ROCK SNOW RAIN WIND FIRE GOLD IRON OPEN STOP EXIT PUSH PULL LEFT UP DOWN ON OFF YES NO GO IN OUT HOT "
    "COLD NEW OLD BIG RED BLUE PINK ZERO ONE TWO FIVE NINE TEN VIEW QUIZ JAZZ WAX YAK ZOO VAN HEXA"
).split()
NUM_WORDS = ["zero", "one", "two", "three", "four", "five", "six"]
N_AUX_COLOR = 1 + len(COLORS)  # 0 = background
N_AUX_SHAPE = 1 + len(SHAPES) + 2  # none, shapes, bar, cell
N_AUX_CHAR = 1 + len(CHARS)

_fonts = {}
_noise = None


def font(size):
    if size not in _fonts:
        _fonts[size] = ImageFont.load_default(size)  # PIL's embedded font: no font files needed
    return _fonts[size]


def jitter(rgb, rng, k=12):
    return tuple(int(min(255, max(0, c + rng.randint(-k, k)))) for c in rgb)


# ------------------------------------------------------------------ drawing
def draw_shape(d, shape, cx, cy, r, fill, s=1):
    cx, cy, r = cx * s, cy * s, r * s
    if shape == "circle":
        d.ellipse((cx - r, cy - r, cx + r, cy + r), fill=fill)
    elif shape == "ring":
        d.ellipse((cx - r, cy - r, cx + r, cy + r), outline=fill, width=max(2, int(r * 0.38)))
    elif shape == "square":
        q = r * 0.86
        d.rectangle((cx - q, cy - q, cx + q, cy + q), fill=fill)
    elif shape == "diamond":
        d.polygon([(cx, cy - r), (cx + r * 0.8, cy), (cx, cy + r), (cx - r * 0.8, cy)], fill=fill)
    elif shape == "triangle":
        d.polygon([(cx, cy - r), (cx + r, cy + r * 0.85), (cx - r, cy + r * 0.85)], fill=fill)
    elif shape == "cross":
        q = r * 0.34
        d.rectangle((cx - r, cy - q, cx + r, cy + q), fill=fill)
        d.rectangle((cx - q, cy - r, cx + q, cy + r), fill=fill)
    elif shape == "star":
        pts = []
        for i in range(10):
            a, q = -math.pi / 2 + i * math.pi / 5, (r * 1.08 if i % 2 == 0 else r * 0.44)
            pts.append((cx + q * math.cos(a), cy + q * math.sin(a)))
        d.polygon(pts, fill=fill)


def render(sc, rng):
    """Scene dict -> RGB uint8 array [H, W, 3]."""
    global _noise
    W, H = sc["W"], sc["H"]
    s = 2 if rng.random() < 0.35 else 1  # supersampled (soft edges) or plain
    im = Image.new("RGB", (W * s, H * s), jitter(BGS[sc["bg"]], rng, 7))
    d = ImageDraw.Draw(im)
    for x0, y0, x1, y1, fill in sc.get("rects", ()):
        d.rectangle((x0 * s, y0 * s, x1 * s - 1, y1 * s - 1), fill=fill)
    for o in sc["objs"]:
        rgb = jitter(COLORS[o["color"]], rng)
        if o["shape"] in SHAPES:
            draw_shape(d, o["shape"], o["cx"], o["cy"], o["r"], rgb, s)
        else:  # bar or cell: a rectangle
            x0, y0, x1, y1 = o["box"]
            d.rectangle((x0 * s, y0 * s, x1 * s - 1, y1 * s - 1), fill=rgb)
    for t in sc["texts"]:
        rgb = jitter(COLORS[t["color"]], rng) if t["color"] in COLORS else BGS[t["color"]]
        d.text((t["x"] * s, t["y"] * s), t["s"], fill=rgb, font=font(t["size"] * s), anchor="lm")
    if s == 2:
        im = im.reduce(2)
    a = np.asarray(im)
    style = rng.random()
    if style < 0.5:
        return a
    a = a.astype(np.float32)
    if style < 0.75:  # brightness gradient
        g = np.linspace(
            -rng.uniform(5, 22),
            rng.uniform(5, 22),
            W if rng.random() < 0.5 else H,
            dtype=np.float32,
        )
        g = g[::-1] if rng.random() < 0.5 else g
        a = a + (
            g[None, :, None] if len(g) == W and (W != H or rng.random() < 0.5) else g[:, None, None]
        )
    else:  # pixel noise
        if _noise is None:
            _noise = np.random.RandomState(0).randn(1024, 1024, 1).astype(np.float32)
        y, x = rng.randint(0, 1024 - H), rng.randint(0, 1024 - W)
        a = a + _noise[y : y + H, x : x + W] * rng.uniform(3, 13)
    return np.clip(a, 0, 255).astype(np.uint8)


# ------------------------------------------------------------------ scenes
def place(rng, W, H, r, taken, tries=60, gap=4):
    for _ in range(tries):
        cx, cy = rng.uniform(r + 2, W - r - 2), rng.uniform(r + 2, H - r - 2)
        if all((cx - a) ** 2 + (cy - b) ** 2 > (r + c + gap) ** 2 for a, b, c in taken):
            taken.append((cx, cy, r))
            return cx, cy
    return None


def base(rng, W, H, kind, bg=None):
    return dict(W=W, H=H, kind=kind, bg=bg or rng.choice(list(BGS)), objs=[], texts=[])


def text_color(rng, bg):
    if rng.random() < 0.5:
        return "white" if bg in ("black", "brown") else "black"
    return rng.choice(COLOR_NAMES)


def add_text(sc, rng, s, size, color, x, yc):
    f = font(size)
    chars = []
    for i, ch in enumerate(s):
        a, b = f.getlength(s[:i]), f.getlength(s[: i + 1])
        chars.append((ch, x + (a + b) / 2, yc))
    sc["texts"].append(dict(s=s, size=size, color=color, x=x, y=yc, chars=chars, w=f.getlength(s)))


def rand_string(rng):
    u, n = rng.random(), rng.choices([1, 2, 3, 4], [4, 3, 2, 1.5])[0]
    if u < 0.2:
        return rng.choice(WORDS)
    return "".join(rng.choice("0123456789" if u < 0.55 else CHARS) for _ in range(n))


def scene_shapes(rng, W, H, nmax=6, n=None):
    sc = base(rng, W, H, "shapes")
    s = math.sqrt(W * H) / 112
    n = n or rng.randint(1, nmax)
    u = rng.random()  # repeated attributes make counting questions worth asking
    cols = rng.sample(COLOR_NAMES, 2 if u < 0.25 else 8)
    shps = rng.sample(SHAPES, 2 if 0.15 < u < 0.4 else 7)
    taken = []
    for _ in range(n):
        r = rng.uniform(9.5, 14.5) * rng.uniform(1, max(1.0, s**0.8))
        p = place(rng, W, H, r, taken)
        if p:
            sc["objs"].append(
                dict(color=rng.choice(cols), shape=rng.choice(shps), cx=p[0], cy=p[1], r=r)
            )
    if rng.random() < 0.12 and W >= 168:
        t = rand_string(rng)
        size = rng.randint(18, 30)
        w = font(size).getlength(t)
        x, y = rng.uniform(4, max(5, W - w - 4)), rng.uniform(size * 0.7, H - size * 0.7)
        if all(
            abs(y - b) > c + size * 0.6 or x > a + c + 3 or x + w < a - c - 3 for a, b, c in taken
        ):
            add_text(sc, rng, t, size, text_color(rng, sc["bg"]), x, y)
    return sc


def scene_text(rng, W, H):
    sc = base(rng, W, H, "text")
    for half in range(rng.choice([1, 1, 2])):  # one line, or one above the other
        s = rand_string(rng)
        big = min(H * (0.3 if half else 0.34), 36)
        size = int(rng.uniform(16, big))
        while font(size).getlength(s) > W - 8 and size > 11:
            size -= 1
        w = font(size).getlength(s)
        x = rng.uniform(3, max(4, W - w - 3))
        sc.setdefault("_lines", []).append((s, size, x))
    lines = sc.pop("_lines")
    if len(lines) == 1:
        s, size, x = lines[0]
        add_text(
            sc,
            rng,
            s,
            size,
            text_color(rng, sc["bg"]),
            x,
            rng.uniform(size * 0.6 + 2, H - size * 0.6 - 2),
        )
    else:
        c1 = text_color(rng, sc["bg"])
        c2 = text_color(rng, sc["bg"])
        for i, (s, size, x) in enumerate(lines):
            lo, hi = (0, H / 2) if i == 0 else (H / 2, H)
            add_text(
                sc,
                rng,
                s,
                min(size, int(H * 0.36)),
                c1 if i == 0 else c2,
                x,
                rng.uniform(lo + size * 0.6 + 1, max(lo + size * 0.6 + 1.5, hi - size * 0.6 - 1)),
            )
    return sc


def scene_grid(rng, W, H):
    sc = base(rng, W, H, "grid", rng.choice(["white", "gray", "black"]))
    rows, cols = rng.randint(2, min(4, H // 36)), rng.randint(2, min(4, W // 36))
    m = 4
    cw, ch = (W - 2 * m) / cols, (H - 2 * m) / rows
    solid = rng.random() < 0.5
    line = (60, 60, 60) if sc["bg"] != "black" else (190, 190, 190)
    sc["rects"] = [(m + i * cw - 1, m, m + i * cw + 1, H - m, line) for i in range(cols + 1)]
    sc["rects"] += [(m, m + j * ch - 1, W - m, m + j * ch + 1, line) for j in range(rows + 1)]
    cells = {}
    for j in range(rows):
        for i in range(cols):
            if rng.random() < 0.2:
                continue
            cx, cy, col = m + (i + 0.5) * cw, m + (j + 0.5) * ch, rng.choice(COLOR_NAMES)
            if solid:
                q = min(5, cw * 0.08)
                o = dict(
                    color=col,
                    shape="cell",
                    cx=cx,
                    cy=cy,
                    r=min(cw, ch) / 2,
                    box=(cx - cw / 2 + q, cy - ch / 2 + q, cx + cw / 2 - q, cy + ch / 2 - q),
                )
            else:
                o = dict(
                    color=col,
                    shape=rng.choice(SHAPES),
                    cx=cx,
                    cy=cy,
                    r=min(cw, ch) * rng.uniform(0.3, 0.4),
                )
            sc["objs"].append(o)
            cells[(j + 1, i + 1)] = col if solid else f"{col} {o['shape']}"
    sc.update(rows=rows, cols=cols, cells=cells, solid=solid)
    return sc


def scene_chart(rng, W, H):
    sc = base(rng, W, H, "chart", rng.choice(["white", "black"]))
    n = rng.randint(2, min(5, W // 28))
    names = rng.sample(COLOR_NAMES, n)
    vals = [rng.randint(1, 9) for _ in names]
    line = (205, 205, 205) if sc["bg"] == "white" else (70, 70, 70)
    top, bot, left = 6, H - 8, 8
    unit = (bot - top) / 10
    sc["rects"] = [
        (left, bot - k * unit - 0.5, W - 4, bot - k * unit + 0.5, line) for k in range(1, 10)
    ]
    ink = (60, 60, 60) if sc["bg"] == "white" else (220, 220, 220)
    sc["rects"] += [(left - 2, top, left, bot + 2, ink), (left - 2, bot, W - 4, bot + 2, ink)]
    step = (W - left - 6) / n
    bw = min(step * rng.uniform(0.45, 0.8), 60)
    for i, (c, v) in enumerate(zip(names, vals)):
        cx = left + 2 + (i + 0.5) * step
        box = (cx - bw / 2, bot - v * unit, cx + bw / 2, bot)
        sc["objs"].append(
            dict(color=c, shape="bar", cx=cx, cy=bot - v * unit / 2, r=bw / 2, box=box, value=v)
        )
    return sc


SCENES = {"shapes": scene_shapes, "text": scene_text, "grid": scene_grid, "chart": scene_chart}


def make_scene(
    rng, W, H, kind=None, mix=(("shapes", 6), ("text", 2.6), ("grid", 1), ("chart", 1.2))
):
    kind = kind or rng.choices([m[0] for m in mix], [m[1] for m in mix])[0]
    return SCENES[kind](rng, W, H)


def clutter_scene(rng, W, H):
    """Dense scene for perception pre-training: many shapes and many characters."""
    sc = base(rng, W, H, "clutter")
    taken = []
    area = W * H / (112 * 112)
    for _ in range(int(rng.randint(0, 3) * area) + 1):
        r = rng.uniform(9, 16) * rng.choice([1, 1, 1.5])
        p = place(rng, W, H, r, taken, 12)
        if p:
            sc["objs"].append(
                dict(color=rng.choice(COLOR_NAMES), shape=rng.choice(SHAPES), cx=p[0], cy=p[1], r=r)
            )
    for _ in range(int(rng.randint(3, 8) * area) + 1):
        size = rng.randint(16, 32)
        s = "".join(rng.choice(CHARS) for _ in range(rng.randint(1, 5)))
        w = font(size).getlength(s)
        if w > W - 6:
            continue
        x, y = rng.uniform(2, W - w - 2), rng.uniform(size * 0.5 + 2, H - size * 0.5 - 2)
        hh = size * 0.5
        if all(abs(y - b) > c + hh or x > a + c + 2 or x + w < a - c - 2 for a, b, c in taken):
            add_text(sc, rng, s, size, text_color(rng, sc["bg"]), x, y)
            for k in range(0, int(w) + 1, max(6, int(hh))):
                taken.append((x + k, y, hh))
    return sc


# ------------------------------------------------------------------ dense labels (auxiliary loss)
def dense_labels(sc):
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
