"""Draw a few pictures and print their questions.

python -m shapes_vlm.samples --out samples --count 8 --seed 1
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from PIL import Image

from shapes_vlm.drawing import render
from shapes_vlm.questions import questions
from shapes_vlm.scenes import clutter_scene, make_scene


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("samples"))
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(arguments.seed)
    for number in range(arguments.count):
        width, height = rng.choices([112, 168, 224, 336], k=2)
        clutter = number % 5 == 0
        scene = (clutter_scene if clutter else make_scene)(rng, width, height)
        Image.fromarray(render(scene, rng)).save(arguments.out / f"{number}.png")
        asked = [] if clutter else questions(scene, rng, 5)
        print(f"{number}.png {scene['kind']} {width}x{height}", *asked, sep="\n  ")


if __name__ == "__main__":
    main()
