"""Muon: momentum orthogonalised by five Newton-Schulz steps, for matrices (Jordan et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM, WEIGHT_DECAY = 0.95, 0.02


class Muon:
    """Matrices of one shape are orthogonalised together; a fused qkv weight counts as three."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._groups: dict[tuple[int, int], list[tuple[Tensor, int]]] = {}
        for name, parameter in named:
            parts = 3 if name.endswith("attn.qkv.weight") else 1
            shape = (parameter.shape[0] // parts, parameter.shape[1])
            self._groups.setdefault(shape, []).append((parameter, parts))
        members = [p for group in self._groups.values() for p, _ in group]
        self._momentum = {p: torch.zeros_like(p) for p in members}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every matrix from its `.grad`."""
        for (rows, columns), members in self._groups.items():
            updates = []
            for p, parts in members:
                buffer = self._momentum[p]
                buffer.mul_(MOMENTUM).add_(p.grad, alpha=1 - MOMENTUM)
                updates.append(p.grad.lerp(buffer, MOMENTUM).view(parts, rows, columns))
            update = _orthogonalise(torch.cat(updates))
            scale, offset = 0.2 * math.sqrt(max(rows, columns)), 0
            for p, parts in members:
                piece = update[offset : offset + parts].reshape(p.shape)
                p.mul_(1 - lr * WEIGHT_DECAY).add_(piece, alpha=-lr * scale)
                offset += parts


def _orthogonalise(x: Tensor) -> Tensor:
    """[k, rows, columns] -> the nearest (semi-)orthogonal matrices, roughly."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x
