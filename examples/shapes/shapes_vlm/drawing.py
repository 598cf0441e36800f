"""How a scene is drawn: colours, shapes, text, and a little noise."""

from __future__ import annotations

import functools
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

N_AUX_COLOR = 1 + len(COLORS)  # 0 = background
N_AUX_SHAPE = 1 + len(SHAPES) + 2  # none, shapes, bar, cell
N_AUX_CHAR = 1 + len(CHARS)


@functools.cache
def font(size: int) -> Any:
    """The font embedded in Pillow, so that no font file is needed."""
    return ImageFont.load_default(size)


@functools.cache
def _noise() -> np.ndarray:
    return np.random.RandomState(0).randn(1024, 1024, 1).astype(np.float32)


def _jitter(rgb, rng, k=12):
    return tuple(int(min(255, max(0, c + rng.randint(-k, k)))) for c in rgb)


def _draw_shape(d, shape, cx, cy, r, fill, s=1):
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


def render(sc: dict[str, Any], rng: random.Random) -> np.ndarray:
    """Scene dict -> RGB uint8 array [H, W, 3]."""
    W, H = sc["W"], sc["H"]
    s = 2 if rng.random() < 0.35 else 1  # supersampled (soft edges) or plain
    im = Image.new("RGB", (W * s, H * s), _jitter(BGS[sc["bg"]], rng, 7))
    d = ImageDraw.Draw(im)
    for x0, y0, x1, y1, fill in sc.get("rects", ()):
        d.rectangle((x0 * s, y0 * s, x1 * s - 1, y1 * s - 1), fill=fill)
    for o in sc["objs"]:
        rgb = _jitter(COLORS[o["color"]], rng)
        if o["shape"] in SHAPES:
            _draw_shape(d, o["shape"], o["cx"], o["cy"], o["r"], rgb, s)
        else:  # bar or cell: a rectangle
            x0, y0, x1, y1 = o["box"]
            d.rectangle((x0 * s, y0 * s, x1 * s - 1, y1 * s - 1), fill=rgb)
    for t in sc["texts"]:
        rgb = _jitter(COLORS[t["color"]], rng) if t["color"] in COLORS else BGS[t["color"]]
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
        y, x = rng.randint(0, 1024 - H), rng.randint(0, 1024 - W)
        a = a + _noise()[y : y + H, x : x + W] * rng.uniform(3, 13)
    return np.clip(a, 0, 255).astype(np.uint8)
