"""From an image's bytes to a vision tower's patches: resize, normalise and cut, in one kernel.

    narrow_rx = byte(sum_c Wx_xc rgb_rc)         antialiased bicubic, a = -0.5
    byte_yx = byte(sum_r Wy_yr narrow_rx)        byte(v) = round(min(max(v, 0), 255))
    patches[n, (channel, time, y, x)] = table[channel, byte_yx]

Shapes: an image `[H, W, 3]`, N patches of P x P pixels, rows grouped by merged token, the layout of
Qwen's towers. Wy and Wx are banded: `Taps` holds the start and the few weights of each row, as
torch's antialiased resize computes them. A table has 256 normalised values per channel, computed
with the processor's arithmetic.

Weights are float32; torch's resize of bytes and Pillow use integers. A byte differs from theirs by
at most 1. Triton on GPUs, elsewhere torch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from vlm_kernels import gpu


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The parameters of the result.

    Attributes:
        height: height of the resized image in pixels, in whole merged tokens.
        width: width of the resized image in pixels, in whole merged tokens.
        patch: pixels along a patch.
        merge: patches along a merged token.
        times: repetitions of each patch along the time axis.
    """

    height: int
    width: int
    patch: int
    merge: int
    times: int

    @property
    def num_patches(self) -> int:
        """Number of patches, N."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def patch_dim(self) -> int:
        """Number of values of a patch."""
        return 3 * self.times * self.patch**2


@dataclasses.dataclass(frozen=True, slots=True)
class Taps:
    """A banded matrix `[num_out, num_in]`.

    Attributes:
        starts: int32 `[num_out]`, nondecreasing.
        weights: float32 `[num_out, K]`, padded with zeros.
    """

    starts: np.ndarray
    weights: np.ndarray


def bicubic_taps(num_in: int, num_out: int) -> Taps:
    """The matrix of torch's antialiased bicubic resize along one axis."""
    scale = num_in / num_out
    stretch = max(scale, 1.0)
    support = 2 * stretch
    centre = scale * (np.arange(num_out) + 0.5)
    starts = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    ends = np.minimum((centre + support + 0.5).astype(np.int64), num_in)
    at = starts[:, None] + np.arange((ends - starts).max())
    x = np.abs((at - centre[:, None] + 0.5) / stretch)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = np.where(x < 1, near, np.where(x < 2, far, 0)) * (at < ends[:, None])
    weights /= weights.sum(axis=1, keepdims=True)
    return Taps(starts.astype(np.int32), weights.astype(np.float32))


def resize_patches_reference(rgb: torch.Tensor, cut: Cut, table: torch.Tensor) -> torch.Tensor:
    """The definition: whole matrices, float32."""
    planes = rgb.permute(2, 0, 1).float()
    rows, columns = (_dense(n, m) for n, m in zip(rgb.shape, (cut.height, cut.width), strict=False))
    narrow = _to_bytes(planes @ columns.to(rgb.device).T)
    bytes_ = _to_bytes(rows.to(rgb.device) @ narrow).long()
    values = torch.stack([table[channel][bytes_[channel]] for channel in range(3)])
    p, m = cut.patch, cut.merge
    # [c, row/m, m, y, column/m, m, x] -> [row/m, column/m, m, m, c, y, x]
    tiles = values.view(3, cut.height // p // m, m, p, cut.width // p // m, m, p)
    patches = tiles.permute(1, 4, 2, 5, 0, 3, 6).reshape(cut.num_patches, 3, 1, p * p)
    return patches.expand(-1, -1, cut.times, -1).reshape(cut.num_patches, cut.patch_dim)


def resize_patches(rgb: torch.Tensor, cut: Cut, table: torch.Tensor) -> torch.Tensor:
    """Resize, normalise and cut one image.

    Args:
        rgb: uint8 `[H, W, 3]`, contiguous.
        cut: parameters of the result.
        table: `[3, 256]`, contiguous, on the same device, of the output's type.

    Returns:
        `[N, 3 * times * P * P]`, every element written.

    Raises:
        ValueError: a shape, type or device is wrong.
    """
    if rgb.dtype != torch.uint8 or rgb.dim() != 3 or rgb.shape[2] != 3 or not rgb.numel():
        raise ValueError(f"resize_patches: rgb is {rgb.dtype} {tuple(rgb.shape)}")
    if table.shape != (3, 256) or not table.is_contiguous() or table.device != rgb.device:
        raise ValueError(f"resize_patches: the table is {tuple(table.shape)} on {table.device}")
    whole = cut.patch * cut.merge
    if (
        min(cut.height, cut.width, cut.patch, cut.merge, cut.times) < 1
        or cut.height % whole
        or cut.width % whole
    ):
        raise ValueError(f"resize_patches: {cut} is not of whole merged tokens of {whole} pixels")
    if not gpu.serves(rgb.device):
        return resize_patches_reference(rgb, cut, table)
    from vlm_kernels.gpu.resize_patches import resize_patches as launch

    taps = (bicubic_taps(n, m) for n, m in zip(rgb.shape, (cut.height, cut.width), strict=False))
    return launch(rgb.contiguous(), cut, table, *taps)


def _to_bytes(values: torch.Tensor) -> torch.Tensor:
    """Round and clamp to 0 to 255, still as float32."""
    return (values.clamp(0, 255) + 0.5).floor()


def _dense(num_in: int, num_out: int) -> torch.Tensor:
    taps = bicubic_taps(num_in, num_out)
    matrix = np.zeros((num_out, num_in + taps.weights.shape[1]), np.float32)
    at = taps.starts[:, None] + np.arange(taps.weights.shape[1])
    np.put_along_axis(matrix, at, taps.weights, axis=1)
    return torch.from_numpy(matrix[:, :num_in])
