"""Damaged images by the thousand, through real decode children: an image, or one typed error.

make test        5,000          make test-full   100,000
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
import re
import time

import numpy as np
import pytest
from worker.media.files import OF_SIZE, small_files
from worker.media.pooling import FAMILY, Heard, proc, spec_of, works

from vlm_worker.errors import InvalidImageError, InvalidRequestError
from vlm_worker.media.image_header import ImageLimits, read_header
from vlm_worker.media.pixels import UndecodableError, decode_rgb
from vlm_worker.media.pool import DECODE_MEMORY_BYTES, REFUSALS, MediaPool, MediaSettings

FILES = small_files()
# What the child meets must be able to hurt it: small images alone would never be slow.
LARGER = {f"{fmt} 700x500": make(700, 500) for fmt, make in OF_SIZE.items()}
HEADER_SECONDS = 0.005
LONG = (pytest.mark.full, pytest.mark.timeout(3600))
LEAKS = re.compile(r"0x[0-9a-f]{6,}\b(?! pixels)|PIL|/|Error")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The same with some damage: bytes, a cut, a piece twice, a piece gone, zeros, a big number."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out))
        size = rng.randint(1, 16)
        match rng.randrange(7):
            case 0 | 1:
                out[at] = rng.randrange(256)
            case 2:
                out[at] ^= 1 << rng.randrange(8)
            case 3:
                del out[max(at, 1) :]
            case 4:
                out[at:at] = out[at : at + size]
            case 5:
                del out[max(at, 1) : at + size]
            case 6:
                out[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff"])
    return bytes(out)


@dataclasses.dataclass
class Tally:
    """What became of the files."""

    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    header_seconds: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0

    async def meet(self, pool: MediaPool, data: bytes) -> None:
        """One file, from its header to its end."""
        start = time.perf_counter()
        try:
            read_header(data, item=2)
        except InvalidImageError as error:
            self.header_seconds.append(time.perf_counter() - start)
            self._refused("header", error)
            return
        try:
            spec = spec_of(data)
        except InvalidRequestError:
            self.ended["no geometry"] += 1
            return
        try:
            prepared = await pool.prepare(data, spec)
        except InvalidImageError as error:
            self._refused("child", error)
            return
        patches = np.frombuffer(prepared.patches, np.float32)
        assert patches.size == math.prod(prepared.grid_thw) * FAMILY.processor.patch_dim
        assert np.isfinite(patches).all()
        self.ended["an image"] += 1

    def _refused(self, where: str, error: InvalidImageError) -> None:
        assert error.code in REFUSALS
        assert not LEAKS.search(str(error)), error
        self.ended[f"{where}: {error.code}"] += 1


async def storm(num_files: int, seed: int) -> tuple[Tally, Heard]:
    rng, tally, heard = random.Random(seed), Tally(), Heard()
    pool = MediaPool(
        FAMILY.processor,
        model_revision="r",
        settings=MediaSettings(num_children=1),
        observer=heard,
    )
    await pool.start()
    sources = [*FILES.values()] * 9 + [*LARGER.values()]
    idle = {pid: _status(pid, "VmHWM") for pid in pool.pids}
    try:
        for _ in range(num_files):
            await tally.meet(pool, mutated(rng.choice(sources), rng))
        await works(pool)
        for pid in pool.pids & idle.keys():
            tally.peak_bytes = max(tally.peak_bytes, _status(pid, "VmHWM") - idle[pid])
    finally:
        await pool.close()
    return tally, heard


def _status(pid: int, name: str) -> int:
    lines = (proc(pid, "status") or b"").decode().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize("num_files", [5_000, pytest.param(100_000, marks=LONG)], ids="{:,}".format)
async def test_a_damaged_file_is_an_image_or_one_typed_error(num_files: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    tally, heard = await storm(num_files, seed)
    header = sorted(tally.header_seconds)
    p99 = header[int(0.99 * len(header))]
    print(f"{num_files:,} files: {dict(tally.ended.most_common())}")
    print(f"refused at the header in {p99 * 1e3:.2f} ms (p99, promised {HEADER_SECONDS * 1e3:g})")
    print(f"the child grew by {tally.peak_bytes >> 20} MiB")
    assert tally.ended.total() == num_files
    assert tally.ended["an image"] > num_files / 20
    assert tally.ended["child: invalid_image"] > num_files / 20
    assert len(header) > num_files / 20
    assert len(heard.times) == tally.ended["an image"] + 1
    assert tally.peak_bytes <= DECODE_MEMORY_BYTES
    assert p99 <= 3 * HEADER_SECONDS


@pytest.mark.parametrize("name", FILES)
def test_a_cut_off_file_is_never_a_grey_image(name: str) -> None:
    """Without its very end it may still hold all pixels; then they are the right ones."""
    whole = FILES[name]
    wanted = decode_rgb(whole, read_header(whole, item=0))
    num_refused = 0
    for cut in range(len(whole)):
        try:
            pixels = decode_rgb(whole[:cut], read_header(whole[:cut], item=0))
        except (InvalidImageError, UndecodableError):
            num_refused += 1
            continue
        np.testing.assert_array_equal(pixels, wanted)
    assert num_refused >= len(whole) - 4


@pytest.mark.parametrize("fmt", OF_SIZE)
@pytest.mark.parametrize(
    ("width", "height", "code"),
    [
        (1, 1, None), (1, 200, None), (200, 1, None), (1, 201, "image_aspect_ratio"),
        (8192, 41, None), (8192, 40, "image_aspect_ratio"), (27, 29, None), (28, 28, None),
        (447, 449, None), (8193, 8193, "image_too_large"),
    ],
)  # fmt: skip
async def test_every_shape_has_patches_or_a_reason(
    pool: MediaPool, fmt: str, width: int, height: int, code: str | None
) -> None:
    data = OF_SIZE[fmt](width, height)
    if code is not None:
        with pytest.raises(InvalidImageError) as caught:
            read_header(data, item=0)
        assert caught.value.code == code
        return
    prepared = await pool.prepare(data, spec_of(data))
    most = FAMILY.processor.max_pixels // FAMILY.processor.patch_size**2
    assert 1 <= prepared.num_tokens <= math.prod(prepared.grid_thw) <= most
    assert len(prepared.patches) == math.prod(prepared.grid_thw) * 4 * FAMILY.processor.patch_dim
    assert np.isfinite(np.frombuffer(prepared.patches, np.float32)).all()


def test_the_limits_are_those_of_the_page() -> None:
    assert ImageLimits() == ImageLimits(20 << 20, 4096 * 4096, 8192)
