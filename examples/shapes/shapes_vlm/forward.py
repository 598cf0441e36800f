"""The training forward: a batched re-statement of the Hugging Face modules, same result.

All pictures of a batch have one size, so that windows are a batch dimension and the patch
convolution is a matrix product; `tests/examples/test_shapes.py` holds it against the modules' own
forward. Legend: n pictures, N patches, B sequences, T tokens.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WINDOW_PATCHES = 8  # 112 pixels
VISION_HEADS, VISION_WIDTH = 2, 128
QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
MROPE_SECTIONS = (4, 14, 14)
ROPE_THETA = 40.0
PROBED_LAYER = 2  # the position loss reads the hidden states that enter this layer


class Geometry(NamedTuple):
    """Tables of one patch grid.

    Attributes:
        order: [N] patch indices (in 2x2 merge order) in window order.
        inverse: [N / 4] window order of cells back to raster order.
        cos: [N, 64] rotary table in window order.
        sin: [N, 64] likewise.
        window: patches per window where all windows are alike, else 0.
        mask: [N, N] additive window mask where they are not, else None.
    """

    order: Tensor
    inverse: Tensor
    cos: Tensor
    sin: Tensor
    window: int
    mask: Tensor | None


@functools.cache
def geometry(grid_h: int, grid_w: int) -> Geometry:
    """Tables for a grid of patches."""
    h, w = grid_h // 2, grid_w // 2
    cells = torch.arange(h * w).view(h, w)
    half = WINDOW_PATCHES // 2
    windows = [
        cells[j : j + half, i : i + half].flatten()
        for j in range(0, h, half)
        for i in range(0, w, half)
    ]
    cell_order = torch.cat(windows)
    sizes = torch.tensor([4 * len(window) for window in windows])
    order = (cell_order[:, None] * 4 + torch.arange(4)).flatten()
    y = torch.arange(grid_h)[:, None].expand(grid_h, grid_w)
    x = torch.arange(grid_w)[None].expand(grid_h, grid_w)
    y, x = (t.reshape(h, 2, w, 2).transpose(1, 2).flatten()[order] for t in (y, x))
    inv = 1.0 / (10000.0 ** (torch.arange(0, 32, 2).float() / 32))
    freq = torch.cat([y[:, None] * inv, x[:, None] * inv], -1)
    freq = torch.cat([freq, freq], -1)
    alike = bool((sizes == sizes[0]).all())
    mask = None
    if not alike:
        window_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        same = window_of[:, None] == window_of[None]
        mask = torch.zeros(same.shape).masked_fill(~same, -1e9)
    window = int(sizes[0]) if alike else 0
    return Geometry(order, torch.argsort(cell_order), freq.cos(), freq.sin(), window, mask)


def vision_forward(tower: nn.Module, pixels: Tensor) -> Tensor:
    """uint8 [n, H, W, 3] -> merged visual tokens [n, cells, 256], raster order."""
    n, height, width, _ = pixels.shape
    grid = geometry(height // 14, width // 14)
    x_nNd = _patches(pixels)[:, grid.order]
    # both frames of a still image are equal, so the temporal axis of the kernel adds up
    x_nNd = F.linear(x_nNd, tower.patch_embed.proj.weight.sum(2).flatten(1))
    for index, block in enumerate(tower.blocks):
        full = index in tower.fullatt_block_indexes
        x_nNd = x_nNd + _vision_attention(block.attn, _rms(block.norm1, x_nNd), grid, full=full)
        h = _rms(block.norm2, x_nNd)
        x_nNd = x_nNd + block.mlp.down_proj(F.silu(block.mlp.gate_proj(h)) * block.mlp.up_proj(h))
    merger = tower.merger
    cells = merger.mlp(_rms(merger.ln_q, x_nNd).view(n, x_nNd.shape[1] // 4, 4 * VISION_WIDTH))
    return cells[:, grid.inverse]


def _patches(pixels: Tensor) -> Tensor:
    """uint8 [n, H, W, 3] -> [n, N, 588], in merge order."""
    n, h, w, _ = pixels.shape
    x = pixels.float().div_(127.5).sub_(1)
    x = x.view(n, h // 28, 2, 14, w // 28, 2, 14, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    return x.reshape(n, (h // 14) * (w // 14), 588)


def _vision_attention(attn: nn.Module, x: Tensor, grid: Geometry, *, full: bool) -> Tensor:
    n, num_patches, _ = x.shape
    qkv = attn.qkv(x).view(n, num_patches, 3, VISION_HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    q, k = _rotate(q, grid.cos, grid.sin), _rotate(k, grid.cos, grid.sin)
    if full or grid.window == num_patches:
        o = F.scaled_dot_product_attention(q, k, v)
    elif grid.window:
        count = num_patches // grid.window
        shape = (n, VISION_HEADS, count, grid.window, HEAD_DIM)
        q, k, v = (t.reshape(shape).transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v)
        o = o.view(n, count, VISION_HEADS, grid.window, HEAD_DIM).transpose(1, 2)
        o = o.reshape(n, VISION_HEADS, num_patches, HEAD_DIM)
    else:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=grid.mask)
    return attn.proj(o.transpose(1, 2).reshape(n, num_patches, VISION_WIDTH))


def language_forward(
    model: nn.Module, x_BTD: Tensor, positions_3BT: Tensor, mask_B1TT: Tensor
) -> tuple[Tensor, Tensor]:
    """Hidden states [B, T, 256] after the last layer, and those that enter PROBED_LAYER."""
    inv = 1.0 / (ROPE_THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    freq = (positions_3BT[..., None].float() * inv).split(MROPE_SECTIONS, -1)
    freq = torch.cat([section[axis] for axis, section in enumerate(freq)], -1)
    freq = torch.cat([freq, freq], -1)[:, None]
    cos, sin = freq.cos(), freq.sin()
    probed = x_BTD
    for index, layer in enumerate(model.layers):
        if index == PROBED_LAYER:
            probed = x_BTD
        h = _rms(layer.input_layernorm, x_BTD)
        x_BTD = x_BTD + _language_attention(layer.self_attn, h, cos, sin, mask_B1TT)
        h = _rms(layer.post_attention_layernorm, x_BTD)
        x_BTD = x_BTD + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
    return _rms(model.norm, x_BTD), probed


def _language_attention(
    attn: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
) -> Tensor:
    b, t, _ = x.shape
    q = _rotate(attn.q_proj(x).view(b, t, QUERY_HEADS, HEAD_DIM).transpose(1, 2), cos, sin)
    k = _rotate(attn.k_proj(x).view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2), cos, sin)
    v = attn.v_proj(x).view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return attn.o_proj(o.transpose(1, 2).reshape(b, t, QUERY_HEADS * HEAD_DIM))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _rms(norm: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
