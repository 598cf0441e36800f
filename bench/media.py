"""From the bytes of an image to its patches: the time of each part, and of simplejpeg.

    python bench/run.py media

One thread, in this process. JPEG decoding by Pillow and by the decode process run in turn and are
compared pixel by pixel. Then follow the parts for one image, by format and size.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "worker"))

from vlm_worker.core.families import load_family  # noqa: E402
from vlm_worker.errors import InvalidImageError  # noqa: E402
from vlm_worker.media.image_header import read_header  # noqa: E402
from vlm_worker.media.patches import image_key, make_patches  # noqa: E402
from vlm_worker.media.pixels import decode_rgb  # noqa: E402

FAMILY = load_family(ROOT / "examples" / "shapes" / "model")
ROUNDS = 9
SIZES = ((1024, 1024), (4000, 3000))


def photo(width: int, height: int) -> Image.Image:
    """A smooth image with grain, which compresses like a photograph."""
    rng = np.random.default_rng(3)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 64, width // 64, 3), dtype=np.uint8))
    fine = rng.integers(-12, 13, (height, width, 3))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    return Image.fromarray(np.clip(smooth + fine, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def milliseconds(work: Callable[[], Any]) -> float:
    """CPU time of one call, without other processes."""
    start = time.thread_time()
    work()
    return (time.thread_time() - start) * 1e3


def by_pillow(data: bytes) -> np.ndarray:
    """A JPEG's pixels, decoded by Pillow."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def jpeg(width: int, height: int) -> dict[str, object]:
    """Alternate between both decoders; their pixels must be equal."""
    data = encoded(photo(width, height), "JPEG", quality=85, subsampling="4:2:0")
    header = read_header(data, item=0)
    np.testing.assert_array_equal(decode_rgb(data, header), by_pillow(data))
    pairs = [
        (milliseconds(lambda: by_pillow(data)), milliseconds(lambda: decode_rgb(data, header)))
        for _ in range(ROUNDS)
    ]
    pillow, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "bench": "media",
        "what": f"JPEG {width}x{height}",
        "pillow_ms": round(pillow, 2),
        "ours_ms": round(ours, 2),
        "ratio": round(statistics.median(b / a for a, b in pairs), 3),
        "pixels": "equal",
    }


def parts(form: str, width: int, height: int) -> dict[str, object]:
    """Header, decoding, patches and key of one image."""
    data = encoded(photo(width, height), form)
    header, processor = read_header(data, item=0), FAMILY.processor
    rgb, geometry = decode_rgb(data, header), FAMILY.geometry(height, width)
    works: dict[str, Callable[[], Any]] = {
        "header_ms": lambda: read_header(data, item=0),
        "decode_ms": lambda: decode_rgb(data, header),
        "prepare_ms": lambda: make_patches(rgb, processor, geometry),
        "key_ms": lambda: image_key(rgb, processor, model_revision="r", salt=b""),
    }
    times = {name: [milliseconds(work) for _ in range(5)] for name, work in works.items()}
    medians = {name: round(statistics.median(one), 3) for name, one in times.items()}
    return {"bench": "media", "what": f"{form} {width}x{height}", "bytes": len(data), **medians}


def refusals() -> dict[str, object]:
    """Times to refuse headers, such as a file of a million empty chunks."""
    files = [
        b"\xff\xd8\xff" + b"\xfe\0\2\xff" * (1 << 20),
        b"\xff\xd8" + b"\xff" * (19 << 20),
        b"GIF89a\x10\0\x10\0\0\0\0!\xff" + b"\x01x" * (9 << 20),
        b"\x89PNG\r\n\x1a\n" + bytes(1 << 20),
        bytes(1 << 20),
    ]

    def refuse(data: bytes) -> None:
        try:
            read_header(data, item=0)
        except InvalidImageError:
            return
        raise AssertionError("it should have been refused")

    times = sorted(milliseconds(lambda: refuse(data)) for data in files * 40)  # noqa: B023
    p99 = times[round(0.99 * (len(times) - 1))]
    return {"bench": "media", "what": "header refused", "p99_ms": round(p99, 3), "goal_ms": 5}


def main() -> None:
    """Print every line."""
    for width, height in SIZES:
        print(json.dumps(jpeg(width, height)), flush=True)
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        print(json.dumps(parts(form, 1024, 1024)), flush=True)
    print(json.dumps(refusals()), flush=True)


if __name__ == "__main__":
    main()
