"""Windows at several scales in one call: exact where they can be, and each image by itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker.checkpoints import make_checkpoint
from worker.identity.families import random_questions

from vlm_kernels.native_layers import has_layers
from vlm_worker.core.families import load_family
from vlm_worker.core.image_geometry import DynamicProcessor
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.core.pyramid import Window
from vlm_worker.core.window_cache import WindowCache
from vlm_worker.errors import EngineError, InvalidRequestError
from vlm_worker.media.patches import PLAIN_CUTTER
from vlm_worker.model.build import check_window_cache
from vlm_worker.model.loader import load_model
from vlm_worker.model.pyramid import PyramidEncoder, packed_windows, patch_places, tower_of
from vlm_worker.model.vision import Embedding, ImageEncoder
from vlm_worker.reduction import Cells, Method, Reduction
from vlm_worker.types import PreparedImage, Stage

CPU = torch.device("cpu")
ALL = Reduction(Method.ARRCOC_PYRAMID, 1000)
SHARES = (1000, 600, 300, 1)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen2_vl"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, request.param)


def checkpoint(tmp_path_factory: pytest.TempPathFactory, model_type: str) -> Path:
    """A model whose windows, if it has some, are those of the published ones: 112 pixels."""
    model_dir = make_checkpoint(tmp_path_factory.mktemp("pyramid") / model_type, model_type)
    file = model_dir / "config.json"
    config = json.loads(file.read_text())
    if "window_size" in config["vision_config"]:
        config["vision_config"]["window_size"] = 112
        file.write_text(json.dumps(config))
    return model_dir


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, "qwen2_5_vl")


def encoder_of(model_dir: Path, dtype: str = "float32") -> ImageEncoder:
    loaded = load_model(model_dir, [Stage.ENCODER], dtype=dtype)
    return ImageEncoder(loaded.model, loaded.family.processor, device=CPU)


def images_of(model_dir: Path, permille: int | None) -> list[PreparedImage]:
    """Four images of different sizes, whose windows are cut by their edges."""
    asked = random_questions(model_dir, load_family(model_dir), count=12, seed=0)
    found = {image.image_key: image for one in asked for image in one.prepared_images}
    assert len(found) == 4
    reduction = None if permille is None else Reduction(Method.ARRCOC_PYRAMID, permille)
    return [
        dataclasses.replace(image, reduction=reduction, relevance=relevance(image.cells))
        for image in found.values()
    ]


def relevance(cells: Cells) -> bytes:
    rng = np.random.default_rng(cells[0])
    return rng.integers(1, 65536, cells).astype(np.uint16).tobytes()


def encoded(encoder: ImageEncoder, images: Sequence[PreparedImage]) -> list[Embedding]:
    embeddings = encoder.encode(images)
    assert all(isinstance(one, Embedding) for one in embeddings), embeddings
    return embeddings  # type: ignore[return-value]


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_all_windows_at_scale_1_are_the_whole_image(model_dir: Path) -> None:
    encoder = encoder_of(model_dir)
    wholes = encoded(encoder, images_of(model_dir, None))
    for whole, pyramid in zip(wholes, encoded(encoder, images_of(model_dir, 1000)), strict=True):
        close(pyramid.rows, whole.rows)


@pytest.mark.parametrize("permille", SHARES)
def test_an_image_has_as_many_finite_rows_as_counted(model_dir: Path, permille: int) -> None:
    images = images_of(model_dir, permille)
    for image, one in zip(images, encoded(encoder_of(model_dir), images), strict=True):
        assert one.places is not None
        assert len(one.rows) == len(one.places) == image.kept_tokens
        assert one.rows.isfinite().all()
        assert len(one.rows.unique(dim=0)) == len(one.rows)


def test_images_are_encoded_together_as_alone_beside_whole_ones(model_dir: Path) -> None:
    encoder = encoder_of(model_dir)
    pairs = zip(images_of(model_dir, None), images_of(model_dir, 300), strict=True)
    mixed = list(itertools.chain(*pairs))
    for image, together in zip(mixed, encoded(encoder, mixed), strict=True):
        (alone,) = encoded(encoder, [image])
        close(together.rows, alone.rows)
        assert (together.places is None) == (image.reduction is None)


@pytest.mark.skipif(not has_layers(), reason="this CPU has no AVX512-BF16")
def test_in_one_native_call_images_have_the_same_bits_together_as_alone(model_dir: Path) -> None:
    encoder, images = encoder_of(model_dir, "bfloat16"), images_of(model_dir, 300)
    for image, together in zip(images, encoded(encoder, images), strict=True):
        assert torch.equal(together.rows, encoded(encoder, [image])[0].rows)


def test_window_layers_see_a_window_as_an_image_of_its_scale(windowed: Path) -> None:
    """States before the first full layer: of each window, and of an image of its pixels."""
    encoder = encoder_of(windowed)
    (image,) = (one for one in images_of(windowed, 500) if one.cells == (4, 4))
    tower, processor = tower_of(encoder._model), encoder._processor
    assert isinstance(processor, DynamicProcessor)
    first = tower.blocks[min(tower.fullatt_block_indexes)]
    assert first is not tower.blocks[0]
    seen: list[torch.Tensor] = []
    hook = first.register_forward_pre_hook(lambda _block, args: seen.append(args[0].clone()))
    for level, cells in ((0, (4, 4)), (1, (2, 2)), (2, (1, 1))):
        window = Window(0, 0, 4, 4, level)
        values = np.frombuffer(image.patches, np.float32)
        patches = packed_windows(values, (4, 4), [window], processor)
        PyramidEncoder(tower, processor).run(patches, [[window]])
        small = PreparedImage(
            bytes(32), (1, 2 * cells[0], 2 * cells[1]), cells[0] * cells[1], patches.data.cast("B")
        )
        encoded(encoder, [small])
        mine, wanted = seen
        close(mine, wanted)
        seen.clear()
    hook.remove()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_patches_of_a_level_are_those_of_the_averaged_pixels(windowed: Path, level: int) -> None:
    processor = load_family(windowed).processor
    assert isinstance(processor, DynamicProcessor)
    step, cells = 1 << level, (8, 12)
    bytes_ = np.random.default_rng(0).integers(0, 256, (8 * 28, 12 * 28, 3), dtype=np.uint8)
    blocks = bytes_[::step, ::step]  # each mean is a byte
    pixels = blocks.repeat(step, 0).repeat(step, 1)
    values = PLAIN_CUTTER.cut(pixels, processor, processor.geometry(*pixels.shape[:2]))
    windows = [Window(4, 8, 4, 4, level), Window(0, 4, 4, 4, level), Window(4, 0, 4, 4, level)]
    packed = packed_windows(values.ravel(), cells, windows, processor)
    (start,) = {0}
    for window in windows:
        rows, columns = window.shape
        top, left = (28 * one // step for one in (window.top, window.left))
        part = np.ascontiguousarray(blocks[top : top + 28 * rows, left : left + 28 * columns])
        wanted = PLAIN_CUTTER.cut(part, processor, geometry_of(part, processor))
        np.testing.assert_allclose(packed[start : start + len(wanted)], wanted, atol=1e-5)
        start += len(wanted)
    assert start == len(packed)


def geometry_of(pixels: np.ndarray, processor: DynamicProcessor) -> Any:
    """Of a size that the processor itself would enlarge."""
    return dataclasses.replace(processor, min_pixels=1).geometry(*pixels.shape[:2])


def test_an_edge_is_extended_by_its_last_pixels(windowed: Path) -> None:
    processor = load_family(windowed).processor
    assert isinstance(processor, DynamicProcessor)
    pixels = np.zeros((28, 3 * 28, 3), np.uint8)
    pixels[:, 2 * 28 :] = 255
    values = PLAIN_CUTTER.cut(pixels, processor, geometry_of(pixels, processor))
    packed = packed_windows(values.ravel(), (1, 3), [Window(0, 0, 1, 3, 2)], processor)
    left, right = packed.reshape(2, 2, 3, -1).transpose(1, 0, 2, 3)  # patches beside each other
    assert left.max(axis=(0, 2)) == pytest.approx(values.min(axis=0).reshape(3, -1).min(1))
    assert right.min(axis=(0, 2)) == pytest.approx(values.max(axis=0).reshape(3, -1).max(1))


def test_patches_are_where_their_pixels_are(windowed: Path) -> None:
    del windowed
    whole = patch_places(Window(4, 8, 4, 4, 1), 2, at_scale_1=True)
    assert whole[:4].tolist() == [[8.5, 16.5], [8.5, 18.5], [10.5, 16.5], [10.5, 18.5]]
    own = patch_places(Window(4, 8, 4, 4, 1), 2, at_scale_1=False)
    assert own[:5].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]
    assert patch_places(Window(4, 8, 2, 2, 0), 2, at_scale_1=True)[-1].tolist() == [11, 19]


def test_an_image_without_relevance_fails_alone(windowed: Path) -> None:
    good, bad, *_ = images_of(windowed, 300)
    bad = dataclasses.replace(bad, relevance=b"")
    first, second = encoder_of(windowed).encode([good, bad])
    assert isinstance(first, Embedding)
    assert isinstance(second, EngineError)
    assert "needs the relevance" in str(second)


def test_a_tower_without_dynamic_windows_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model_dir = make_checkpoint(tmp_path_factory.mktemp("pyramid") / "llava", "llava")
    image = PreparedImage(bytes(32), (1, 4, 4), 4, memoryview(b""), ALL)
    (result,) = encoder_of(model_dir).encode([image])
    assert isinstance(result, EngineError)
    assert "at several scales" in str(result)


def test_windows_of_another_size_are_refused_before_and_at_the_encoder(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model_dir = make_checkpoint(tmp_path_factory.mktemp("pyramid") / "56", "qwen2_5_vl")
    with pytest.raises(InvalidRequestError, match=r"windows of 4x4 visual tokens.* are 2x2"):
        load_family(model_dir).num_tokens((1, 4, 4), ALL)
    image = PreparedImage(bytes(32), (1, 4, 4), 4, memoryview(b""), ALL)
    (result,) = encoder_of(model_dir).encode([image])
    assert isinstance(result, EngineError)
    assert "windows of 112 pixels in the vision tower, not 56" in str(result)


# the cache of windows


def cached_encoder(
    model_dir: Path, dtype: str = "float32", max_bytes: int = 1 << 30
) -> tuple[ImageEncoder, WindowCache]:
    loaded = load_model(model_dir, [Stage.ENCODER], dtype=dtype)
    cache = WindowCache(max_bytes=max_bytes, ttl_seconds=600.0)
    processor = loaded.family.processor
    return ImageEncoder(loaded.model, processor, device=CPU, windows=cache), cache


@pytest.mark.parametrize("permille", [None, 1000, 300])
def test_rows_are_the_same_with_and_without_the_cache(windowed: Path, permille: int | None) -> None:
    images = images_of(windowed, permille)
    encoder, cache = cached_encoder(windowed)
    plain = encoded(encoder_of(windowed), images)
    for _ in range(2):
        for one, other in zip(encoded(encoder, images), plain, strict=True):
            close(one.rows, other.rows)
    num_windows = cache.num_misses
    assert cache.num_hits == num_windows > len(images)
    assert cache.num_bytes > 0


@pytest.mark.skipif(not has_layers(), reason="this CPU has no AVX512-BF16")
def test_a_window_from_the_cache_has_the_bits_of_a_computed_one(windowed: Path) -> None:
    encoder, _ = cached_encoder(windowed, "bfloat16")
    images = images_of(windowed, None)
    first = encoded(encoder, images)
    for order in ([0, 1, 2, 3], [3], [2, 0]):
        for number, one in zip(order, encoded(encoder, [images[i] for i in order]), strict=True):
            assert torch.equal(one.rows, first[number].rows)


def test_images_share_windows_of_equal_pixels_within_a_tenant(windowed: Path) -> None:
    """The upper windows of two images, and the same image of another tenant."""
    processor = load_family(windowed).processor
    assert isinstance(processor, DynamicProcessor)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    pixels[1, :112] = pixels[0, :112]
    images = [
        PreparedImage(bytes([n]) * 32, (1, 16, 16), 64, cut.data.cast("B"), salt=b"a")
        for n, one in enumerate(pixels)
        for cut in [PLAIN_CUTTER.cut(one, processor, geometry_of(one, processor))]
    ]
    encoder, cache = cached_encoder(windowed)
    encoded(encoder, images[:1])
    assert (cache.num_hits, cache.num_misses) == (0, 4)
    encoded(encoder, images[1:])
    assert (cache.num_hits, cache.num_misses) == (2, 6)
    encoded(encoder, [dataclasses.replace(images[0], salt=b"b")])
    assert (cache.num_hits, cache.num_misses) == (2, 10)


def test_a_full_cache_changes_no_row(windowed: Path) -> None:
    images = images_of(windowed, 300)
    encoder, cache = cached_encoder(windowed, max_bytes=20_000)
    for _ in range(2):
        for one, other in zip(
            encoded(encoder, images), encoded(encoder_of(windowed), images), strict=True
        ):
            close(one.rows, other.rows)
    assert 0 < cache.num_bytes <= 20_000


def test_only_a_tower_with_layers_over_windows_first_has_the_cache(
    windowed: Path, tmp_path: Path
) -> None:
    check_window_cache(load_model(windowed, [Stage.ENCODER], dtype="float32"))
    for model_type in ("qwen2_vl", "qwen2_5_vl", "llava"):  # this Qwen2.5-VL has other windows
        model_dir = make_checkpoint(tmp_path / model_type, model_type)
        with pytest.raises(ModelConfigError, match=f"--window-cache-bytes: {model_type} has no"):
            check_window_cache(load_model(model_dir, [Stage.ENCODER], dtype="float32"))
