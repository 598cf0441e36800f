"""A JPEG file to normalised patches, against Pillow's decoding and resizing and numpy.

    python bench/run.py image

One thread, CPU time, both in turn. Memory for pixels is reused between images, as in a decode
process. The goal is at most 0.35 of Pillow's time at both sizes, and a mean difference of at most
1e-3 in normalised units; it is 0. `parts` are the times of decoding, resizing and making patches.
`dct` is the same with `--jpeg-scaling=dct`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import media
import numpy as np
from PIL import Image

sys.path.insert(0, str(media.ROOT / "kernels"))

from vlm_kernels.cpu import libraries
from vlm_worker.core.image_geometry import DynamicProcessor, Geometry
from vlm_worker.media.image_header import ImageHeader, read_header
from vlm_worker.media.patches import PatchExtractor, make_patches
from vlm_worker.media.pixels import Canvas, decode_rgb
from vlm_worker.media.resize import Resizer

SIDE = 448
ROUNDS = 9
GOAL, GOAL_DIFFERENCE = 0.35, 1e-3


class Tools(NamedTuple):
    """What a decode child reuses for every image."""

    resizer: Resizer
    canvas: Canvas


def main() -> None:
    """Print both sizes."""
    variant = libraries.supported()[0]
    places = libraries.Places.of(os.environ)  # noqa: TID251  as the kernels find them
    library = str(libraries.build(variant, places))
    tools = Tools(Resizer(library), Canvas())
    cutter = PatchExtractor(library)
    shipped = media.FAMILY.processor
    assert isinstance(shipped, DynamicProcessor)
    processor = dataclasses.replace(shipped, max_pixels=SIDE * SIDE, resample=3)
    for width, height in media.SIZES:
        figures = measure(width, height, processor, tools, cutter)
        print(json.dumps({"bench": "image", "kernel": variant.name, **figures}), flush=True)


def measure(
    width: int, height: int, processor: DynamicProcessor, tools: Tools, cutter: PatchExtractor
) -> dict[str, Any]:
    """One line of the report."""
    data = media.encoded(media.photo(width, height), "JPEG", quality=85, subsampling="4:2:0")
    header, geometry = read_header(data, item=0), processor.geometry(height, width)
    rgb = decode_rgb(data, header)
    new = (geometry.height, geometry.width)
    works: dict[str, Callable[[], Any]] = {
        "pillow": lambda: by_pillow(data, processor, geometry),
        "ours": lambda: patches_of(data, header, processor, geometry, tools, cutter),
        "dct": lambda: patches_of(data, header, processor, geometry, tools, cutter, is_scaled=True),
        "decode": lambda: decode_rgb(data, header, canvas=tools.canvas),
        "resize": lambda: tools.resizer.resize(rgb, *new, resample=processor.resample),
    }
    exact = make_patches(rgb, processor, geometry)
    difference = float(np.abs(works["ours"]() - exact).mean())
    scaled_difference = np.abs(works["dct"]() - exact)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            times[name].append(media.milliseconds(work))
    medians = {name: round(statistics.median(one), 2) for name, one in times.items()}
    ratio = ratio_of(times["ours"], times["pillow"])
    return {
        "what": f"JPEG {width}x{height} to {new[1]}x{new[0]}",
        "ms": {name: medians[name] for name in ("pillow", "ours")},
        "parts": {name: medians[name] for name in ("decode", "resize")},
        "ratio": ratio,
        "goal": GOAL,
        "mean_difference": difference,
        "met": ratio <= GOAL and difference <= GOAL_DIFFERENCE,
        "dct": {
            "ms": medians["dct"],
            "ratio": ratio_of(times["dct"], times["pillow"]),
            "mean_difference": round(float(scaled_difference.mean()), 5),
            "max_difference": round(float(scaled_difference.max()), 3),
        },
    }


def ratio_of(some: list[float], others: list[float]) -> float:
    """The median over the rounds."""
    return round(statistics.median(a / b for a, b in zip(some, others, strict=True)), 3)


def patches_of(
    data: bytes,
    header: ImageHeader,
    processor: DynamicProcessor,
    geometry: Geometry,
    tools: Tools,
    cutter: PatchExtractor,
    *,
    is_scaled: bool = False,
) -> np.ndarray:
    """Patches as a worker makes them; `is_scaled`: with `--jpeg-scaling=dct`."""
    size = (header.height, header.width)
    enough = processor.resized(*size) if is_scaled else None
    rgb = decode_rgb(data, header, enough=enough, canvas=tools.canvas)
    return make_patches(rgb, processor, geometry, resizer=tools.resizer, cutter=cutter, size=size)


def by_pillow(data: bytes, processor: DynamicProcessor, geometry: Geometry) -> np.ndarray:
    """Normalised pixels `[3, height, width]`, by Pillow and numpy."""
    with Image.open(io.BytesIO(data)) as image:
        size = (geometry.width, geometry.height)
        resized = image.convert("RGB").resize(size, Image.Resampling(processor.resample))
    mean, std = (np.array(v, np.float32) for v in (processor.image_mean, processor.image_std))
    scaled = np.asarray(resized).astype(np.float32) * np.float32(processor.rescale_factor)
    return np.ascontiguousarray(((scaled - mean) / std).transpose(2, 0, 1))


if __name__ == "__main__":
    main()
