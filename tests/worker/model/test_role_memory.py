"""A role holds its own weights, once, whatever loading and packing did in between."""

from __future__ import annotations

import sys
from pathlib import Path

from worker.identity.questions import SHAPES
from worker.model.test_linear import needs_bfloat16

sys.path.append(str(Path(__file__).parents[3] / "bench"))

from memory import GOAL, measure
from random_vlm import SMALL, make_model


@needs_bfloat16
def test_a_role_holds_little_more_than_its_weights(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", SMALL)
    figures = measure(model_dir, "decode", after=[SHAPES])
    assert figures["weights_bytes"] > 60e6
    assert figures["packed_layers"] > 0
    assert figures["ratio"] <= GOAL, figures
    assert figures["peak_ratio"] <= 1.6, f"weights were in memory twice: {figures}"
