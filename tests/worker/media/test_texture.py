"""Texture: integers that follow the formulas of floats, whatever the bands and threads."""

from __future__ import annotations

import concurrent.futures
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_worker.errors import InvalidRequestError
from vlm_worker.media.texture import (
    CONTRAST,
    EDGE,
    LIGHTNESS,
    exact_tables,
    pixel_relevance,
    texture,
)


def image(rows: int, columns: int, seed: int, side: int = 28) -> np.ndarray:
    """Blocks of random colours, with noise."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns, 3)).repeat(side, 0).repeat(side, 1)
    noise = rng.integers(-9, 10, (rows * side, columns * side, 3))
    return np.clip(blocks + noise, 0, 255).astype(np.uint8)


def plain(*colour: int, cells: tuple[int, int] = (2, 3)) -> np.ndarray:
    shape = (*(28 * n for n in cells), 3)
    return np.broadcast_to(np.array(colour, np.uint8), shape).copy()


def test_no_table_entry_is_near_to_where_machines_may_round_apart() -> None:
    for table in exact_tables():
        assert np.abs(table % 1 - 0.5).min() > 1e-6


@pytest.mark.parametrize(
    ("colour", "wanted"),
    [
        ((0, 0, 0), (0, 0, 0)),
        ((255, 255, 255), (100, 0, 0)),
        ((255, 0, 0), (53.24, 80.09, 67.20)),
        ((0, 255, 0), (87.73, -86.18, 83.18)),
        ((0, 0, 255), (32.30, 79.19, -107.86)),
        ((119, 119, 119), (50.03, 0, 0)),
    ],
)
def test_lightness_and_colour_are_those_of_cie(
    colour: tuple[int, int, int], wanted: tuple[float, float, float]
) -> None:
    channels = texture(plain(*colour), (2, 3)).channels
    assert np.abs(channels[3:6].reshape(3, -1).T / 64 - wanted).max() < 0.2
    assert (16 * np.array(colour) == channels[:3].reshape(3, -1).T).all()
    assert not channels[[6, 7, EDGE, CONTRAST]].any()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_channels_follow_the_formulas(rows: int, columns: int, seed: int) -> None:
    pixels = image(rows, columns, seed)
    channels, histogram = texture(pixels, (rows, columns))
    assert channels.dtype == np.int16
    means = pixels.reshape(rows, 28, columns, 28, 3).mean((1, 3)).transpose(2, 0, 1)
    assert np.abs(channels[:3] / 16 - means).max() < 0.1
    grey = (pixels @ np.array([0.299, 0.587, 0.114])).reshape(14 * rows, 2, 14 * columns, 2)
    g = np.pad(4 * grey.mean((1, 3)), 1, mode="edge")
    x = g[:, 2:] - g[:, :-2]
    x = (x[:-2] + 2 * x[1:-1] + x[2:]) / 4
    y = g[2:] - g[:-2]
    y = (y[:, :-2] + 2 * y[:, 1:-1] + y[:, 2:]) / 4
    for channel, exact in ((6, x), (7, y)):
        wanted = exact.reshape(rows, 14, columns, 14).mean((1, 3))
        assert np.abs(channels[channel] - wanted).max() < 4
    length = np.hypot(x, y).reshape(rows, 14, columns, 14).mean((1, 3))
    assert np.abs(channels[EDGE] - length).max() < 4 + 0.08 * length.max()
    assert (histogram.sum(-1) == 14 * 14).all()
    mean_bin = (histogram * np.arange(8)).sum(-1) / (14 * 14)
    assert np.abs(channels[LIGHTNESS] / 801 - mean_bin - 0.5).max() < 0.51


def test_places_are_relative_to_the_image() -> None:
    y, x, eccentricity = texture(plain(9, 9, 9, cells=(3, 1)), (3, 1)).channels[9:12]
    assert y.ravel().tolist() == [5461, 16384, 27306]
    assert x.ravel().tolist() == [16384] * 3
    assert eccentricity.ravel().tolist() == [10923, 0, 10922]


def test_a_cell_of_another_colour_is_the_most_relevant_one() -> None:
    pixels = plain(200, 200, 200, cells=(4, 4))
    pixels[30:54, 60:80] = 255, 0, 0
    assert pixel_relevance(pixels, (4, 4)).argmax() == 4 + 2


@pytest.mark.parametrize("band", [1, 14 * 14 * 9, 1 << 30])
def test_bands_change_nothing(band: int) -> None:
    pixels = image(7, 9, 3)
    one, other = texture(pixels, (7, 9)), texture(pixels, (7, 9), band=band)
    assert (one.channels == other.channels).all()
    assert (one.histogram == other.histogram).all()


def test_threads_change_nothing() -> None:
    images = [image(6, 8, seed) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: pixel_relevance(one, (6, 8)).tobytes(), images))
    assert together == [pixel_relevance(one, (6, 8)).tobytes() for one in images]


def test_other_sides_of_cells_are_possible() -> None:
    assert pixel_relevance(image(3, 4, 1, side=32), (3, 4)).shape == (3, 4)


@pytest.mark.parametrize(
    ("shape", "cells"), [((28, 28), (1, 2)), ((27, 27), (1, 1)), ((56, 28), (1, 1))]
)
def test_cells_that_are_no_even_squares_are_refused(
    shape: tuple[int, int], cells: tuple[int, int]
) -> None:
    with pytest.raises(InvalidRequestError, match="square cells of an even side"):
        texture(np.zeros((*shape, 3), np.uint8), cells)


def test_the_relevance_is_the_same_on_every_machine() -> None:
    """A change of this digest is another selection: raise `reduction.VERSION` with it."""
    rows, columns = np.mgrid[0:140, 0:196]
    pixels = np.stack([rows * 7 + columns, rows * columns // 9, columns * 5 - rows], -1) % 256
    relevance = pixel_relevance(pixels.astype(np.uint8), (5, 7)).astype("<u2")
    assert hashlib.sha256(relevance.tobytes()).hexdigest()[:16] == "7e18d9861cb7c66b"
