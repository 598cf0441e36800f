"""Weights of linear layers in panels, the layout that `packed_linear` multiplies.

    pack(W)            32 outputs per panel, inputs in groups side by side
    pack_gated(G, U)   16 rows of G and the same 16 rows of U per panel

In bfloat16 a group is two inputs, `[panels, K / 2, 32, 2]`. In int8 it is four,
`[panels, K / 4, 32, 4]`, and each output has a scale:  W_nk ~ s_n q_nk,  s_n = max_k |W_nk| / 127.
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import torch
from torch.nn import functional

PANEL = 32
LEVELS = 127
"""Codes of int8 are -127 to 127: symmetric, so that a product of two fits 14 bits and a sign."""

MAX_INPUTS = 1 << 16
"""Maximum inputs for int8: a sum of products with unsigned codes then fits 32 bits."""

LEAST_SCALED = 1e-30
"""A row whose values are all smaller has codes of 0."""

SYMMETRIC: Final = 128
"""The code of 0 where codes of inputs are of either sign."""

MAX_CODE: Final = 255


class InputScale(NamedTuple):
    """How the inputs of an int8 layer become codes:  x ~ scale (c - zero),  0 <= c <= 255.

    Values beyond the codes are clipped. A symmetric zero leaves out code 0, so that both signs have
    127 levels. A scale of 0 stands for one of each row, from its largest value.
    """

    scale: float
    zero: int = SYMMETRIC

    @property
    def is_known(self) -> bool:
        """Whether all rows have this scale."""
        return self.scale > 0


BY_ROW: Final = InputScale(0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights in panels, padded with zeros beyond N and K.

    Attributes:
        panels: `[ceil(N / 32), ceil(K / 2), 32, 2]` bfloat16 or `[.., ceil(K / 4), 32, 4]` int8;
            gated weights have 2 N rows in panels.
        num_outputs: N.
        num_inputs: K.
        is_gated: whether the panels hold two matrices.
        scales: for int8, float32 `[panels * 32]`, in the order of panels.
        offsets: for int8, int32 `[panels * 32]`: 128 times the sum of each row's codes.
        inputs: for int8, how the inputs become codes.
    """

    panels: torch.Tensor
    num_outputs: int
    num_inputs: int
    is_gated: bool = False
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    inputs: InputScale = BY_ROW

    @property
    def is_int8(self) -> bool:
        """Whether the weights are int8 codes with scales."""
        return self.scales is not None

    @property
    def num_biases(self) -> int:
        """Length of a bias: one value per output, or per row of panels."""
        return len(self.panels) * PANEL if self.is_gated else self.num_outputs

    def calibrated(self, inputs: InputScale) -> PackedWeights:
        """The same int8 weights with a scale of the inputs that is known.

        Raises:
            ValueError: the weights are not int8, or scale or zero are out of range.
        """
        if not self.is_int8:
            raise ValueError("pack: only int8 weights have a scale of their inputs")
        if not (LEAST_SCALED <= inputs.scale < float("inf") and 0 <= inputs.zero <= MAX_CODE):
            raise ValueError(f"pack: {inputs} must have a positive scale and a zero of 0 to 255")
        return dataclasses.replace(self, inputs=inputs)

    def rows(self) -> torch.Tensor:
        """Float32 `[panels * 32, K]`: the values, in the order of panels."""
        rows = self.panels.transpose(1, 2).flatten(2).flatten(0, 1).float()
        return rows[:, : self.num_inputs]


def pack(weight_NK: torch.Tensor, *, int8: bool = False) -> PackedWeights:
    """Pack bfloat16 weights into panels, rounded to int8 if requested; a copy."""
    _check_type(weight_NK)
    rows_RK = _padded(weight_NK, num_rows=-len(weight_NK) % PANEL)
    return _in_panels(rows_RK, len(weight_NK), is_gated=False, int8=int8)


def pack_gated(gate_NK: torch.Tensor, up_NK: torch.Tensor, *, int8: bool = False) -> PackedWeights:
    """Pack the two matrices of a gated layer into shared panels; a copy."""
    _check_type(gate_NK)
    if gate_NK.shape != up_NK.shape:
        raise ValueError(f"pack: gate {tuple(gate_NK.shape)} and up {tuple(up_NK.shape)} differ")
    return _in_panels(_mixed(gate_NK, up_NK), len(gate_NK), is_gated=True, int8=int8)


def mix_biases(gate_N: torch.Tensor, up_N: torch.Tensor) -> torch.Tensor:
    """The two biases of a gated layer, `[panels * 32]`, in the order of `pack_gated`."""
    return _mixed(gate_N[:, None], up_N[:, None])[:, 0].contiguous()


def quantise(x_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integer codes of each row, float32 `[R, K]`, and its scale `[R, 1]`.

    If a row is not finite, its codes are 0 and its scale is NaN.
    """
    wide = x_RK.float()
    most = wide.abs().amax(dim=1, keepdim=True)
    is_finite = most.isfinite()
    most = most.clamp_min(LEAST_SCALED).where(is_finite, torch.nan)
    # divides two tensors: for a scalar, torch multiplies by the reciprocal, which rounds twice
    codes = (wide * (torch.full_like(most, LEVELS) / most)).round()
    return codes.where(is_finite, 0.0), most / LEVELS


def clip(x_RK: torch.Tensor, inputs: InputScale) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of each row by a known scale, less their zero, as `quantise` returns them."""
    wide, scale = x_RK.float(), torch.tensor(inputs.scale, dtype=torch.float32)
    is_finite = wide.isfinite().all(dim=1, keepdim=True)
    least = (1 if inputs.zero == SYMMETRIC else 0) - inputs.zero
    levels = (wide * (torch.ones_like(scale) / scale)).clamp(least, MAX_CODE - inputs.zero)
    return levels.round().where(is_finite, 0.0), scale.where(is_finite, torch.nan)


def _mixed(gate_NK: torch.Tensor, up_NK: torch.Tensor) -> torch.Tensor:
    """Alternate 16 rows of each matrix, padded to whole panels."""
    half, num_inputs = PANEL // 2, gate_NK.shape[1]
    padded = (_padded(w, num_rows=-len(w) % half) for w in (gate_NK, up_NK))
    parts = [w.reshape(-1, half, num_inputs) for w in padded]
    return torch.cat(parts, dim=1).view(-1, num_inputs)


def _in_panels(
    rows_RK: torch.Tensor, num_outputs: int, *, is_gated: bool, int8: bool
) -> PackedWeights:
    """Pack rows, which must be whole panels."""
    num_inputs = rows_RK.shape[1]
    if not int8:
        return PackedWeights(_grouped(rows_RK), num_outputs, num_inputs, is_gated)
    if num_inputs > MAX_INPUTS:
        raise ValueError(f"pack: {num_inputs} inputs, the limit of int8 is {MAX_INPUTS}")
    codes_RK, scales = quantise(rows_RK)
    return PackedWeights(
        _grouped(codes_RK.to(torch.int8)),
        num_outputs,
        num_inputs,
        is_gated,
        scales[:, 0].contiguous(),
        128 * codes_RK.sum(dim=1).to(torch.int32),
    )


def _grouped(rows_RK: torch.Tensor) -> torch.Tensor:
    """`[R / 32, K / group, 32, group]`; a group has 4 bytes, which are moved as one."""
    group = 4 // rows_RK.element_size()
    rows_RK = _padded(rows_RK, num_columns=-rows_RK.shape[1] % group)
    words = rows_RK.contiguous().view(torch.int32)
    panels = words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()
    return panels.view(rows_RK.dtype).view(*panels.shape, group)


def _padded(x: torch.Tensor, *, num_rows: int = 0, num_columns: int = 0) -> torch.Tensor:
    """Pad with zeros at the end; returns x itself if there are none, without torch's copy."""
    return functional.pad(x, (0, num_columns, 0, num_rows)) if num_rows or num_columns else x


def _check_type(weight: torch.Tensor) -> None:
    if weight.dtype != torch.bfloat16:
        raise ValueError(f"pack: weights are {weight.dtype}, not bfloat16")
