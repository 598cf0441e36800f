"""Patches of images and merged visual tokens in Triton equal their definitions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

from vlm_kernels import merge_tokens, resize_patches
from vlm_kernels.merge_tokens import merge_tokens_reference
from vlm_kernels.resize_patches import Cut, bicubic_taps, resize_patches_reference

CASES = [
    pytest.param((90, 61), Cut(56, 28, 14, 2, 2), id="smaller, Qwen2-VL's patches"),
    pytest.param((20, 33), Cut(32, 64, 16, 2, 1), id="larger"),
    pytest.param((90, 20), Cut(6, 6, 6, 1, 1), id="much smaller one way"),
]


def image_of(height: int, width: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(height)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=rng)


def table(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(256) / 255 - 0.5)[None] * torch.tensor([[1.0], [2], [3]])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "cut"), CASES)
def test_an_image_becomes_its_patches(
    size: tuple[int, int], cut: Cut, dtype: torch.dtype, device: torch.device
) -> None:
    rgb = image_of(*size)
    got = resize_patches(rgb.to(device), cut, table(dtype).to(device)).cpu().float()
    want = resize_patches_reference(rgb, cut, table(dtype)).float()
    differing = got != want  # a sum that ends at a half may round either way
    assert differing.float().mean() < 1e-2
    assert (got - want).abs().max() <= 3 / 255 * 1.01


@pytest.mark.parametrize(("size", "cut"), CASES)
def test_a_byte_differs_from_torchs_own_resize_by_at_most_one(
    size: tuple[int, int], cut: Cut, device: torch.device
) -> None:
    rgb = image_of(*size)
    bytes_ = torch.arange(256).float().repeat(3, 1)
    got = resize_patches(rgb.to(device), cut, bytes_.to(device)).cpu()
    p, m = cut.patch, cut.merge
    grid = (cut.height // p // m, cut.width // p // m, m, m, 3, cut.times, p, p)
    patches = got.view(grid)
    assert (patches[..., :1, :, :] == patches).all(), "times differ"
    image = patches[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6).reshape(3, cut.height, cut.width)
    theirs = functional.interpolate(
        rgb.permute(2, 0, 1)[None], (cut.height, cut.width), mode="bicubic", antialias=True
    )[0]
    off = (image - theirs.float()).abs()
    assert off.max() <= 1
    assert off.mean() <= 0.25


def test_taps_are_those_of_torch() -> None:
    for num_in, num_out in ((7, 19), (64, 64), (100, 13)):
        taps = bicubic_taps(num_in, num_out)
        assert np.allclose(taps.weights.sum(axis=1), 1)
        assert (np.diff(taps.starts) >= 0).all()
        line = torch.randn(num_in)
        want = functional.interpolate(
            line[None, None, None], (1, num_out), mode="bicubic", antialias=True
        )[0, 0, 0]
        at = np.minimum(taps.starts[:, None] + np.arange(taps.weights.shape[1]), num_in - 1)
        got = (line.numpy()[at] * taps.weights).sum(axis=1)
        assert np.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_merged_tokens_are_the_means_of_their_sources(
    weighted: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 1100).to(dtype)[:, 50:]
    sources, edges = torch.tensor([3, 0, 8, 8, 1, 7]), torch.tensor([0, 1, 4, 6])
    weights = torch.rand(6) + 0.1 if weighted else None
    got = merge_tokens(x.to(device), sources, edges, weights).cpu()
    want = merge_tokens_reference(x, sources, edges, weights)
    tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_one_source_each_is_a_gather(device: torch.device) -> None:
    x = torch.randn(12, 33).to(device)
    best = torch.randn(12).topk(5).indices
    assert torch.equal(merge_tokens(x, best, torch.arange(6)), x[best.to(device)])


def test_what_does_not_fit_raises_before_anything_runs(device: torch.device) -> None:
    x, edges = torch.zeros(4, 8, device=device), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="a source is not in 0 to 3"):
        merge_tokens(x, torch.tensor([0, 4]), edges)
    with pytest.raises(ValueError, match="edges must rise from 0 to 2"):
        merge_tokens(x, torch.tensor([0, 1]), torch.tensor([0, 2, 2]))
    for weights in (torch.tensor([1.0, 0]), torch.ones(2).double()):
        with pytest.raises(ValueError, match="weights must be positive float32"):
            merge_tokens(x, torch.tensor([0, 1]), edges, weights)
    for name, sources, rising in (
        ("sources", torch.tensor([0, 1]).int(), edges),
        ("sources", torch.tensor([[0, 1]]), edges),
        ("edges", torch.tensor([0, 1]), edges.int()),
    ):
        with pytest.raises(ValueError, match=f"{name} are .*must be int64 in one axis, on the CPU"):
            merge_tokens(x, sources, rising)
    with pytest.raises(ValueError, match=r"x is torch.float64"):
        merge_tokens(x.double(), torch.tensor([0, 1]), edges)
    rgb, cut, values = image_of(9, 9).to(device), Cut(28, 28, 14, 2, 1), table().to(device)
    with pytest.raises(ValueError, match=r"rgb is torch\.float32"):
        resize_patches(rgb.float(), cut, values)
    with pytest.raises(ValueError, match="the table is"):
        resize_patches(rgb, cut, values[:2])
    with pytest.raises(ValueError, match="whole merged tokens of 28 pixels"):
        resize_patches(rgb, dataclasses.replace(cut, width=14), values)
    with pytest.raises(ValueError, match="whole merged tokens of 0 pixels"):
        resize_patches(rgb, dataclasses.replace(cut, merge=0), values)
