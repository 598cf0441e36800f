"""What tests of the media pool share: images, what a gateway says of them, other processes."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from worker.media.files import encode, noise

from vlm_worker.core.families import load_family
from vlm_worker.media.image_header import ImageLimits, read_header
from vlm_worker.media.pool import ImageSpec, MediaPool, MediaTimes

MODEL = Path(__file__).parents[3] / "examples" / "shapes" / "model"
FAMILY = load_family(MODEL)
UNLIMITED = ImageLimits(max_bytes=1 << 30, max_pixels=1 << 40, max_side=1 << 20)


class Heard:
    """What a pool tells of its images."""

    def __init__(self) -> None:
        self.times: list[MediaTimes] = []
        self.refused: list[str] = []

    def image_prepared(self, times: MediaTimes) -> None:
        self.times.append(times)

    def image_refused(self, code: str) -> None:
        self.refused.append(code)


def spec_of(data: bytes, *, max_pixels: int = 0, salt: bytes = b"") -> ImageSpec:
    """What a gateway would say of the file; hostile sizes included."""
    header = read_header(data, item=2, limits=UNLIMITED)
    geometry = FAMILY.geometry(header.height, header.width, max_pixels=max_pixels)
    return ImageSpec(
        2, header.format, header.width, header.height, geometry.num_tokens, max_pixels, salt
    )


def proc(pid: int, name: str) -> bytes | None:
    """A file of a process, None where the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except FileNotFoundError:
        return None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # another process's state announces itself to nobody


async def works(pool: MediaPool) -> None:
    data = encode(noise(seed=99))
    prepared = await pool.prepare(data, spec_of(data))
    assert prepared.num_tokens > 0
