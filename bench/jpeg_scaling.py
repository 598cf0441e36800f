"""Accuracy with `--jpeg-scaling=dct`: pixels, embeddings and answers of `shapes`.

    python bench/jpeg_scaling.py --questions 48        about a minute

Held-out images are enlarged, get some grain, and become JPEGs of quality 90. The model needs their
original size, so they are decoded at 1/2, 1/4 and 1/8. Compared with full size: the difference of
pixels in levels of a byte, the difference of embedding rows relative to their length, the share of
right answers, and the share of equal tokens. Computed in float32. One JSON line per divisor.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import int8_accuracy  # finds the worker and the tests
import media
import numpy as np
from PIL import Image

from vlm_worker.core.image_geometry import DynamicProcessor
from vlm_worker.media.image_header import read_header
from vlm_worker.media.patches import make_patches
from vlm_worker.media.pixels import decode_rgb
from vlm_worker.types import PreparedImage

ENLARGED = {2: 2.5, 4: 5.0, 8: 9.0}
GRAIN = 12
"""Levels by which pixels of the enlarged image differ from their neighbours, at most."""


def main() -> None:
    """Measure, and print one JSON line for each divisor."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--questions", type=int, default=48)
    args = parser.parse_args()
    from worker.identity.questions import questions

    asked = [question for question in questions() if question.prepared_images][: args.questions]
    runner = int8_accuracy.runner_of({"dtype": "float32"})
    processor = runner.family.processor
    assert isinstance(processor, DynamicProcessor)
    for divisor, factor in ENLARGED.items():
        exact, scaled = [], []
        for question in asked:
            files = [enlarged(image, factor) for image in question.images]
            grids = [image.grid_thw for image in question.prepared_images]
            pairs = [both(*one, processor) for one in zip(files, grids, strict=True)]
            exact.append(dataclasses.replace(question, prepared_images=tuple(a for a, _ in pairs)))
            scaled.append(dataclasses.replace(question, prepared_images=tuple(b for _, b in pairs)))
        figures = {
            "bench": "jpeg_scaling",
            "divisor": divisor,
            "images": sum(len(question.prepared_images) for question in asked),
            **differences(exact, scaled, processor, runner),
            **answers(exact, scaled, runner),
        }
        print(json.dumps(figures), flush=True)


def enlarged(image: Image.Image, factor: float) -> bytes:
    """A JPEG of the image, larger, with grain."""
    size = (round(image.width * factor), round(image.height * factor))
    smooth = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC), np.int16)
    grain = np.random.default_rng(0).integers(-GRAIN, GRAIN + 1, smooth.shape)
    grainy = Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))
    return media.encoded(grainy, "JPEG", quality=90, subsampling="4:2:0")


def both(
    data: bytes, grid: tuple[int, int, int], processor: DynamicProcessor
) -> tuple[PreparedImage, PreparedImage]:
    """The image prepared for this grid, decoded at full size and scaled."""
    header = read_header(data, item=0)
    height, width = grid[1] * processor.patch_size, grid[2] * processor.patch_size
    geometry = processor.geometry(height, width)
    assert geometry.grid_thw == grid
    size = (header.height, header.width)
    made = []
    for number, enough in enumerate((None, (height, width))):
        rgb = decode_rgb(data, header, enough=enough)
        patches = make_patches(rgb, processor, geometry, size=size)
        key = bytes([number]) * 32
        made.append(PreparedImage(key, grid, geometry.num_tokens, patches.data))
    return made[0], made[1]


def differences(
    exact: list[Any], scaled: list[Any], processor: DynamicProcessor, runner: Any
) -> dict[str, float]:
    """Differences of pixels in levels, and of embeddings relative to the length of the rows."""
    level = processor.rescale_factor / np.array(processor.image_std).mean()
    pixels, rows = [], []
    for question, other in zip(exact, scaled, strict=True):
        for a, b in zip(question.prepared_images, other.prepared_images, strict=True):
            patches = [np.frombuffer(one.patches, np.float32) for one in (a, b)]
            pixels.append(np.abs(patches[0] - patches[1]) / level)
        encoded = (runner.encode(one.prepared_images) for one in (question, other))
        for a, b in zip(*encoded, strict=True):
            rows.append(float((a.rows - b.rows).norm() / a.rows.norm()))
    return {
        "mean_levels": round(float(np.mean([one.mean() for one in pixels])), 3),
        "max_levels": round(float(max(one.max() for one in pixels)), 1),
        "embedding_mean": round(float(np.mean(rows)), 4),
        "embedding_max": round(max(rows), 4),
    }


def answers(exact: list[Any], scaled: list[Any], runner: Any) -> dict[str, float]:
    """The shares of right answers of both, and of equal tokens."""
    tokens = [int8_accuracy.answers_of(runner, one) for one in (exact, scaled)]
    right = [int8_accuracy.share_right(exact, one) for one in tokens]
    return {
        "right_exact": right[0],
        "right_dct": right[1],
        "same_tokens": int8_accuracy.share(*tokens),
    }


if __name__ == "__main__":
    main()
