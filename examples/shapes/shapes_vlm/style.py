"""How a scene looks: font, colours, edges, and the parts of grids and charts.

`PLAIN` is the first style. `Trained` draws styles for training. `held_out` draws styles that
training never shows: fonts and palette of matplotlib, with edges softer than those of training.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import ImageFont

Colour = tuple[int, int, int]

PALETTES: dict[str, dict[str, Colour]] = {
    "plain": {
        "red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220),
        "yellow": (240, 220, 50), "orange": (245, 140, 30), "purple": (140, 60, 180),
        "pink": (250, 150, 190), "cyan": (60, 200, 220),
    },
    "css": {
        "red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0),
        "orange": (255, 165, 0), "purple": (128, 0, 128), "pink": (255, 182, 193),
        "cyan": (0, 255, 255),
    },
    "soft": {
        "red": (229, 57, 53), "green": (102, 187, 106), "blue": (66, 133, 244),
        "yellow": (255, 238, 88), "orange": (255, 167, 38), "purple": (171, 71, 188),
        "pink": (244, 143, 177), "cyan": (77, 208, 225),
    },
    "dark": {
        "red": (170, 20, 20), "green": (20, 100, 40), "blue": (20, 40, 150),
        "yellow": (215, 195, 20), "orange": (220, 105, 10), "purple": (90, 30, 120),
        "pink": (230, 110, 160), "cyan": (20, 160, 175),
    },
    "tab10": {
        "red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 119, 180),
        "yellow": (255, 221, 87), "orange": (255, 127, 14), "purple": (148, 103, 189),
        "pink": (227, 119, 194), "cyan": (23, 190, 207),
    },
}  # fmt: skip
TRAINED_PALETTES = ("plain", "css", "soft", "dark")
HELD_OUT_FONTS = (
    "DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf",
)  # fmt: skip
"""Of matplotlib, so that the evaluation runs wherever the tests do."""


@dataclasses.dataclass(frozen=True)
class Style:
    """How one scene is drawn.

    Attributes:
        font: path of a font file; "" is the font inside Pillow.
        palette: a key of PALETTES.
        jitter: largest change of a colour's channels from object to object.
        samples: pixels drawn per pixel and side; 0 draws 1 or 2.
        angle: degrees by which the scene is turned.
        outline: width of a line around shapes and bars, in pixels.
        chart_lines: whether a chart has a line for each unit.
        axes: whether a chart has axes.
        line: width of the lines of grids and charts, in pixels.
    """

    font: str = ""
    palette: str = "plain"
    jitter: int = 12
    samples: int = 0
    angle: float = 0.0
    outline: int = 0
    chart_lines: bool = True
    axes: bool = True
    line: int = 2

    @property
    def colours(self) -> dict[str, Colour]:
        return PALETTES[self.palette]


PLAIN = Style()


@functools.cache
def font(size: int, path: str = "") -> Any:
    """A font of `size` pixels; the one inside Pillow needs no file."""
    return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training draws from: `share_plain` of the scenes are PLAIN; `fonts` are paths."""

    fonts: tuple[str, ...] = ()
    share_plain: float = 1.0

    def draw(self, rng: random.Random) -> Style:
        """The style of the next scene."""
        if self.share_plain == 1 or rng.random() < self.share_plain:
            return PLAIN
        return _trained(rng, self.fonts)


def _trained(rng: random.Random, fonts: Sequence[str]) -> Style:
    return Style(
        font=rng.choice(fonts) if fonts and rng.random() < 0.8 else "",
        palette=rng.choice(TRAINED_PALETTES),
        jitter=rng.choice([6, 12, 18]),
        samples=rng.choice([0, 1, 2, 3]),
        angle=rng.uniform(-3, 3) if rng.random() < 0.25 else 0.0,
        outline=rng.choice([0, 0, 0, 1, 2]),
        chart_lines=rng.random() < 0.7,
        axes=rng.random() < 0.85,
        line=rng.choice([1, 2, 2, 3]),
    )


def held_out(rng: random.Random) -> Style:
    """A style that training never shows."""
    return Style(
        font=rng.choice(held_out_fonts()),
        palette="tab10",
        jitter=8,
        samples=4,
        angle=rng.uniform(-2, 2) if rng.random() < 0.3 else 0.0,
        outline=rng.choice([0, 0, 1]),
        chart_lines=rng.random() < 0.5,
        line=rng.choice([1, 2]),
    )


@functools.cache
def held_out_fonts() -> tuple[str, ...]:
    """Paths of the fonts that training never shows.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return tuple(str(held_out_folder() / name) for name in HELD_OUT_FONTS)


def held_out_folder() -> Path:
    """The folder of matplotlib's fonts."""
    import matplotlib as mpl

    return Path(mpl.get_data_path()) / "fonts" / "ttf"


def fonts_in(folder: Path, characters: str) -> list[str]:
    """Paths of the font files below a folder that have each of `characters`."""
    found = []
    for path in sorted((*folder.rglob("*.ttf"), *folder.rglob("*.otf"))):
        face = ImageFont.truetype(str(path), 24)
        masks = [bytes(face.getmask(one)) for one in characters]
        missing = bytes(face.getmask("\U000f0000"))
        if all(any(mask) and mask != missing for mask in masks):
            found.append(str(path))
    return found
