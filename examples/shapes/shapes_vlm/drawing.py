"""How a scene is drawn: colours, shapes, text, and a little noise."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from shapes_vlm.style import PALETTES, PLAIN, Style, font

PATCH = 14  # ViT patch; one visual token = 2x2 patches = 28x28 pixels
CELL = 28

COLORS = PALETTES["plain"]
BGS = {
    "white": (246, 246, 246),
    "gray": (150, 150, 150),
    "black": (16, 16, 16),
    "brown": (110, 75, 45),
}
SHAPES = ["circle", "square", "triangle", "star", "diamond", "cross", "ring"]
CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOR_NAMES = list(COLORS)

N_AUX_COLOR = 1 + len(COLORS)  # 0 = background
N_AUX_SHAPE = 1 + len(SHAPES) + 2  # none, shapes, bar, cell
N_AUX_CHAR = 1 + len(CHARS)


@functools.cache
def _noise() -> np.ndarray:
    return np.random.RandomState(0).randn(1024, 1024, 1).astype(np.float32)


def _jitter(rgb, rng, k=12):
    return tuple(int(min(255, max(0, c + rng.randint(-k, k)))) for c in rgb)


def _draw_shape(d, shape, cx, cy, r, fill, s=1, line=None):
    cx, cy, r = cx * s, cy * s, r * s
    edge = {} if line is None else {"outline": line[0], "width": line[1] * s}
    if shape == "circle":
        d.ellipse((cx - r, cy - r, cx + r, cy + r), fill=fill, **edge)
    elif shape == "ring":
        d.ellipse((cx - r, cy - r, cx + r, cy + r), outline=fill, width=max(2, int(r * 0.38)))
    elif shape == "square":
        q = r * 0.86
        d.rectangle((cx - q, cy - q, cx + q, cy + q), fill=fill, **edge)
    elif shape == "diamond":
        points = [(cx, cy - r), (cx + r * 0.8, cy), (cx, cy + r), (cx - r * 0.8, cy)]
        d.polygon(points, fill=fill, **edge)
    elif shape == "triangle":
        points = [(cx, cy - r), (cx + r, cy + r * 0.85), (cx - r, cy + r * 0.85)]
        d.polygon(points, fill=fill, **edge)
    elif shape == "cross":
        q = r * 0.34
        d.rectangle((cx - r, cy - q, cx + r, cy + q), fill=fill)
        d.rectangle((cx - q, cy - r, cx + q, cy + r), fill=fill)
    elif shape == "star":
        pts = []
        for i in range(10):
            a, q = -math.pi / 2 + i * math.pi / 5, (r * 1.08 if i % 2 == 0 else r * 0.44)
            pts.append((cx + q * math.cos(a), cy + q * math.sin(a)))
        d.polygon(pts, fill=fill, **edge)


def _draw(sc: dict[str, Any], d: Any, s: int, style: Style, rng: random.Random) -> None:
    ink = (235, 235, 235) if sc["bg"] in ("black", "brown") else (40, 40, 40)
    line = (ink, style.outline) if style.outline else None
    for x0, y0, x1, y1, fill in sc.get("rects", ()):
        d.rectangle((x0 * s, y0 * s, x1 * s - 1, y1 * s - 1), fill=fill)
    for o in sc["objs"]:
        rgb = _jitter(style.colours[o["color"]], rng, style.jitter)
        if o["shape"] in SHAPES:
            _draw_shape(d, o["shape"], o["cx"], o["cy"], o["r"], rgb, s, line)
        else:  # bar or cell: a rectangle
            x0, y0, x1, y1 = o["box"]
            edge = {} if line is None else {"outline": line[0], "width": line[1] * s}
            d.rectangle((x0 * s, y0 * s, x1 * s - 1, y1 * s - 1), fill=rgb, **edge)
    for t in sc["texts"]:
        name = t["color"]
        rgb = _jitter(style.colours[name], rng, style.jitter) if name in COLORS else BGS[name]
        at = t["x"] * s, t["y"] * s
        d.text(at, t["s"], fill=rgb, font=font(t["size"] * s, style.font), anchor="lm")


def render(sc: dict[str, Any], rng: random.Random) -> np.ndarray:
    """Scene dict -> RGB uint8 array [H, W, 3]."""
    style: Style = sc.get("style", PLAIN)
    s = style.samples or (2 if rng.random() < 0.35 else 1)  # soft edges, or plain ones
    W, H = sc["W"], sc["H"]
    ground = _jitter(BGS[sc["bg"]], rng, 7)
    im = Image.new("RGB", (W * s, H * s), ground)
    _draw(sc, ImageDraw.Draw(im), s, style, rng)
    if style.angle:
        im = im.rotate(style.angle, Image.Resampling.BICUBIC, fillcolor=ground)
    if s > 1:
        im = im.reduce(s)
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
        y, x = rng.randint(0, 1024 - H), rng.randint(0, 1024 - W)
        a = a + _noise()[y : y + H, x : x + W] * rng.uniform(3, 13)
    return np.clip(a, 0, 255).astype(np.uint8)
