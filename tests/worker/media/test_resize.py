"""Resizing and cutting in C++: Pillow's bytes, numpy's values, whatever the instructions."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from worker.media.files import encode, noise
from worker.media.pooling import FAMILY, spec_of

from vlm_kernels.cpu import libraries
from vlm_worker.core.image_geometry import DynamicProcessor, Geometry
from vlm_worker.media.patches import PatchExtractor
from vlm_worker.media.pool import AT_ONCE_BYTES, MediaPool, MediaSettings
from vlm_worker.media.resize import Resizer, taps

SIDES = st.integers(1, 160)
WORKER = Path(__file__).parents[3] / "worker"


@pytest.fixture(scope="session", params=[variant.name for variant in libraries.VARIANTS])
def library(request: pytest.FixtureRequest) -> str:
    found = {variant.name: variant for variant in libraries.supported()}
    if request.param not in found:
        pytest.skip(f"this CPU cannot run {request.param}")
    places = libraries.Places.of(os.environ)  # noqa: TID251  as the kernels find them
    return str(libraries.build(found[request.param], places))


@pytest.fixture(scope="session")
def resizer(library: str) -> Resizer:
    return Resizer(library)


def pillow(rgb: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    return np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling(resample)))


@settings(max_examples=80)
@given(
    sides=st.tuples(SIDES, SIDES, SIDES, SIDES),
    resample=st.sampled_from([2, 3]),
    seed=st.integers(0, 99),
    harsh=st.booleans(),
)
def test_every_size_is_resized_to_the_bytes_of_pillow(
    resizer: Resizer, sides: tuple[int, int, int, int], resample: int, seed: int, harsh: bool
) -> None:
    height, width, new_height, new_width = sides
    rgb = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if harsh:  # overshoots on both sides, so that sums are clipped
        rgb = (rgb > 127) * np.uint8(255)
    found = resizer.resize(rgb, new_height, new_width, resample=resample)
    np.testing.assert_array_equal(found, pillow(rgb, new_height, new_width, resample))
    assert found.flags.c_contiguous


def test_a_photograph_too(resizer: Resizer) -> None:
    rgb = np.random.default_rng(1).integers(0, 256, (1200, 1601, 3), dtype=np.uint8)
    for resample in (2, 3):
        found = resizer.resize(rgb, 448, 392, resample=resample)
        np.testing.assert_array_equal(found, pillow(rgb, 448, 392, resample))


def test_a_long_one_whose_columns_come_first(resizer: Resizer) -> None:
    rgb = np.random.default_rng(4).integers(0, 256, (2999, 203, 3), dtype=np.uint8)
    found = resizer.resize(rgb, 600, 101, resample=3)
    np.testing.assert_array_equal(found, pillow(rgb, 600, 101, 3))


@given(num_in=st.integers(1, 20_000), num_out=st.integers(1, 2_000), resample=st.integers(2, 3))
def test_no_weight_is_more_than_its_three_digits_hold(
    num_in: int, num_out: int, resample: int
) -> None:
    assert np.abs(taps(num_in, num_out, resample).weights).max() < 1.9 * 2**22


@settings(max_examples=40)
@given(
    tokens=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    patch=st.sampled_from([1, 14, 16]),
    merge=st.integers(1, 3),
    times=st.integers(1, 3),
)
def test_patches_are_those_that_numpy_cuts(
    library: str, tokens: tuple[int, int], patch: int, merge: int, times: int
) -> None:
    assert isinstance(FAMILY.processor, DynamicProcessor)
    processor = dataclasses.replace(
        FAMILY.processor, patch_size=patch, merge_size=merge, temporal_patch_size=times
    )
    rows, columns = (each * merge for each in tokens)
    geometry = Geometry(rows * patch, columns * patch, (1, rows, columns), tokens[0] * tokens[1])
    shape = (geometry.height, geometry.width, 3)
    rgb = np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)
    for image in (rgb, rgb[::-1]):
        found = PatchExtractor(library).cut(image, processor, geometry)
        np.testing.assert_array_equal(found, PatchExtractor().cut(image, processor, geometry))


def test_views_are_resized_as_what_they_show(resizer: Resizer) -> None:
    rgb = np.random.default_rng(2).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    for view in (rgb[::-1], rgb[:, ::-1], rgb.swapaxes(0, 1)):
        found = resizer.resize(view, 33, 44, resample=3)
        np.testing.assert_array_equal(found, pillow(np.ascontiguousarray(view), 33, 44, 3))


@pytest.mark.parametrize("resample", [0, 2, 3])
def test_an_image_of_the_wanted_size_stays_as_it_is(resizer: Resizer, resample: int) -> None:
    rgb = np.random.default_rng(4).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    assert resizer.resize(rgb, 50, 60, resample=resample) is rgb
    np.testing.assert_array_equal(rgb, pillow(rgb, 50, 60, resample))


@pytest.mark.parametrize("resample", [0, 1, 4, 5])
def test_other_filters_are_pillows_own(resizer: Resizer, resample: int) -> None:
    rgb = np.random.default_rng(3).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    found = resizer.resize(rgb, 20, 30, resample=resample)
    np.testing.assert_array_equal(found, pillow(rgb, 20, 30, resample))


BOUND = """
import resource, sys
import numpy as np
from vlm_worker.media.resize import Resizer, taps

resizer, rgb = Resizer(sys.argv[1]), np.zeros((2, 2_000_000, 3), np.uint8)
resizer.resize(rgb[:9, :9], 5, 5, resample=2)
taps(2_000_000, 1_999_999, 2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)  # for the answer alone
try:
    resizer.resize(rgb, 3, 1_999_999, resample=2)
except MemoryError as error:
    print(error)
"""


def test_an_image_that_memory_is_bounded_for_is_an_error_and_ends_no_process() -> None:
    places = libraries.Places.of(os.environ)  # noqa: TID251  as above
    library = str(libraries.build(libraries.supported()[0], places))
    done = subprocess.run(
        [sys.executable, "-c", BOUND, library], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(WORKER)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "resizing 2000000x2 to 1999999x3\n"), done.stderr


async def test_the_library_changes_no_patches_wherever_they_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encode(noise(900, 700), "JPEG")
    places = libraries.Places.of(os.environ)  # noqa: TID251  as above
    library = str(libraries.build(libraries.supported()[0], places))
    prepared = []
    for known, at_once in ((None, AT_ONCE_BYTES), (library, AT_ONCE_BYTES), (library, 0)):
        monkeypatch.setattr("vlm_worker.media.pool.AT_ONCE_BYTES", at_once)
        pool = MediaPool(
            FAMILY.processor,
            model_revision="r",
            settings=MediaSettings(num_children=1),
            native_library=known,
        )
        await pool.start()
        prepared.append(await pool.prepare(data, spec_of(data)))
        await pool.close()
    assert prepared[0] == prepared[1] == prepared[2]
