"""What every engine is asked: text, a PNG where there is an image, and how many tokens to answer.

All of it is made here from seeds, so that every engine reads the same characters and pixels; each
uses its own tokenizer and image processor on them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

SIDE = 448
WORDS = Path(__file__).with_name("words.txt")
BATCHES = (1, 4, 16)
NUM_DECODED = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One request; `image` is a file."""

    text: str
    num_output: int
    image: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Requests that are sent at once; `decode16.65` less `decode16.1` is 64 steps of 16."""

    name: str
    calls: tuple[Call, ...]


def cases(round_number: int, images: Path) -> list[Case]:
    """Everything that is asked in one round; nothing of it was asked before.

    Args:
        round_number: makes the seeds.
        images: a folder that PNGs are written to.
    """
    seeds = iter(range(round_number * 1_000, (round_number + 1) * 1_000))

    def call(num_words: int, num_output: int, *, has_image: bool = False) -> Call:
        seed = next(seeds)
        image = str(_image(images, seed)) if has_image else None
        return Call(_text(num_words, seed), num_output, image)

    found = [
        Case("ttft.image", (call(32, 1, has_image=True),)),
        Case("ttft.text", (call(290, 1),)),
        Case("prefill", (call(555, 1),)),
    ]
    for batch in BATCHES:
        for num_output in (1, 1 + NUM_DECODED):
            calls = tuple(call(64, num_output) for _ in range(batch))
            found.append(Case(f"decode{batch}.{num_output}", calls))
    return [*found, Case("trace", tuple(mixed_trace(call)))]


def mixed_trace(call: Callable[..., Call]) -> list[Call]:
    """16 requests, every second with an image; the shape of `bench/mixed_trace.py`."""
    rng = random.Random(1)
    calls = []
    for number in range(16):
        has_image = number % 2 == 0
        num_words = rng.choice([16, 32, 64]) if has_image else rng.choice([64, 128, 256])
        calls.append(call(num_words, rng.choice([32, 64, 96, 128]), has_image=has_image))
    return calls


def _text(num_words: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(WORDS.read_text().split(), k=num_words))


def _image(folder: Path, seed: int) -> Path:
    """Soft blots of colour, 448 x 448: what no two seeds share, and every processor keeps as is."""
    from PIL import Image

    rng = random.Random(seed)
    small = Image.frombytes("RGB", (28, 28), rng.randbytes(28 * 28 * 3))
    path = folder / f"{seed}.png"
    small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path)
    return path
