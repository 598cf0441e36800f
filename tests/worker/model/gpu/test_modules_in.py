"""Weights of a module that was replaced are free before the next one is met."""

from __future__ import annotations

import weakref

from torch import nn

from vlm_worker.model.gpu.layers import modules_in


def test_every_module_is_met_and_what_was_replaced_is_gone() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
    replaced: list[weakref.ref[nn.Parameter]] = []
    for parent, name, child in modules_in(model):
        assert all(weight() is None for weight in replaced)
        if isinstance(child, nn.Linear):
            replaced.append(weakref.ref(child.weight))
            setattr(parent, name, nn.Sequential(nn.Identity()))
    assert len(replaced) == 3
    assert [type(module) for module in model.modules()].count(nn.Identity) == 3
