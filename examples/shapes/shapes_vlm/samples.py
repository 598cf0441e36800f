"""Draw a few pictures and print their questions.

python -m shapes_vlm.samples --out samples --n 8 --seed 1
"""

from __future__ import annotations
import argparse
import random
from pathlib import Path
from PIL import Image
from shapes_vlm.questions import questions
from shapes_vlm.scenes import clutter_scene, make_scene, render


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="samples")
    ap.add_argument("--n", type=int, default=8)
    ap.add_argument("--seed", type=int, default=1)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    rng = random.Random(a.seed)
    for i in range(a.n):
        W, H = rng.choice([112, 168, 224, 336]), rng.choice([112, 168, 224, 336])
        sc = make_scene(rng, W, H) if i % 5 else clutter_scene(rng, W, H)
        Image.fromarray(render(sc, rng)).save(os.path.join(a.out, f"{i}.png"))
        print(i, sc["kind"], f"{W}x{H}", questions(sc, rng, 5) if sc["kind"] != "clutter" else "")


if __name__ == "__main__":
    main()
