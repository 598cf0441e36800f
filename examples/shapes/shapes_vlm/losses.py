"""Losses: answers to questions, what each patch shows, and where each visual token is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shapes_vlm import drawing
from shapes_vlm.batches import SHARED_BRANCH, Questions
from shapes_vlm.forward import language_forward

AUX_SIZES = [drawing.N_AUX_COLOR, drawing.N_AUX_SHAPE, 2, drawing.N_AUX_CHAR]
_BACKGROUND_WEIGHTS = (0.4, 0.4, 0.3, 0.08)
_LABEL_WEIGHTS = (1.0, 1.0, 1.0, 3.0)
NUM_CELLS = 16  # rows and columns that the position head tells apart


class Answers(NamedTuple):
    """Loss and token accuracy of the answers; of the positions where there are pictures."""

    loss: Tensor
    accuracy: float
    position_loss: Tensor
    position_accuracy: float


def answer_loss(
    model: nn.Module, visual: Tensor | None, batch: Questions, position_head: nn.Module | None
) -> Answers:
    """Cross entropy of the answers; branches see the shared prefix and themselves."""
    language = model.model.language_model
    weight = language.embed_tokens.weight
    prefix, ids, labels = map(torch.as_tensor, (batch.prefix, batch.ids, batch.labels))
    num_rows, num_prefix, num_tokens = len(ids), len(prefix), ids.shape[1]
    at_image = prefix == batch.image_token
    shared = weight[prefix][None].expand(num_rows, num_prefix, -1)
    if visual is not None:
        shared = shared.clone()
        shared[:, at_image] = visual.reshape(num_rows, -1, visual.shape[-1])
    x = torch.cat([shared, weight[ids]], 1)
    prefix_positions = torch.as_tensor(batch.prefix_positions)
    positions = torch.cat(
        [
            prefix_positions[:, None].expand(3, num_rows, num_prefix),
            torch.as_tensor(batch.positions)[None].expand(3, num_rows, num_tokens),
        ],
        -1,
    )
    hidden, probed = language_forward(language, x, positions, _branch_mask(batch))
    selected = labels != -100
    logits = hidden[:, num_prefix - 1 : -1][selected] @ weight.T
    targets, weights = labels[selected], torch.as_tensor(batch.weights)[selected]
    loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
    accuracy = (logits.argmax(-1) == targets).float().mean().item()
    if position_head is None or visual is None:
        return Answers(loss, accuracy, torch.zeros(()), 0.0)
    where = position_head(probed[:, :num_prefix][:, at_image])
    return Answers(loss, accuracy, *_position_loss(where, prefix_positions[:, at_image]))


def _branch_mask(batch: Questions) -> Tensor:
    """[rows, 1, T, T] additive: causal, inside one's own branch, plus the shared prefix."""
    num_rows, num_prefix = len(batch.ids), len(batch.prefix)
    shared = torch.full((num_rows, num_prefix), SHARED_BRANCH)
    branch = torch.cat([shared, torch.as_tensor(batch.branches)], 1)
    visible = (branch[:, :, None] == branch[:, None, :]) | (branch[:, None, :] == SHARED_BRANCH)
    visible &= torch.ones(branch.shape[1], branch.shape[1]).tril().bool()
    return torch.zeros(visible.shape).masked_fill_(~visible, -1e9)[:, None]


def _position_loss(where: Tensor, positions: Tensor) -> tuple[Tensor, float]:
    """After two layers every visual token should know its row and its column."""
    loss, accuracy = torch.zeros(()), 0.0
    for axis in (0, 1):
        target = (positions[axis + 1] - positions[0])[None].expand(len(where), -1).flatten()
        logits = where[..., NUM_CELLS * axis : NUM_CELLS * (axis + 1)].flatten(0, 1)
        loss = loss + F.cross_entropy(logits, target)
        accuracy += 0.5 * (logits.argmax(-1) == target).float().mean().item()
    return loss, accuracy


def patch_loss(head: nn.Module, cells: Tensor, labels: np.ndarray) -> tuple[Tensor, list[float]]:
    """What each of the four patches behind a visual token shows: colour, shape, centre, character.

    Returns:
        The weighted loss, and the accuracy over the patches that show something, per label.
    """
    outputs = head(cells).view(*cells.shape[:2], 4, sum(AUX_SIZES)).split(AUX_SIZES, -1)
    loss, accuracies = torch.zeros(()), []
    for index, output in enumerate(outputs):
        target = torch.as_tensor(labels[..., index]).reshape(-1)
        logits = output.reshape(len(target), -1)
        weights = torch.ones(AUX_SIZES[index])
        weights[0] = _BACKGROUND_WEIGHTS[index]
        loss = loss + _LABEL_WEIGHTS[index] * F.cross_entropy(logits, target, weights)
        shown = target > 0
        hits = (logits.argmax(-1)[shown] == target[shown]).float()
        accuracies.append(hits.mean().item() if len(hits) else float("nan"))
    return loss, accuracies
