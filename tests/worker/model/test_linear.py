"""A packed layer is the plain one, and a packed model holds its weights once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from worker.identity.questions import SHAPES, questions
from worker.identity.stepper import Stepper

from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.linear import MAX_COPY_SHARE, PackedLinear, can_pack, pack_linears
from vlm_worker.model.loader import load_model
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import Stage

CPU = torch.device("cpu")
HAS_BFLOAT16 = can_pack(torch.bfloat16, CPU)

# two answers of the same sum in float32, rounded to bfloat16 each: half a unit in the last place
ATOL, RTOL = 1e-5, 2 * 2.0**-8

needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="this CPU has no fast bfloat16")


@needs_bfloat16
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 70),
    st.integers(1, 70),
    st.booleans(),
)
@settings(max_examples=40)
def test_a_packed_layer_equals_the_plain_one(
    leading: list[int], num_in: int, num_out: int, bias: bool
) -> None:
    torch.manual_seed(num_in * 100 + num_out)
    plain = nn.Linear(num_in, num_out, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(*leading, num_in, dtype=torch.bfloat16)
    with torch.inference_mode():
        want, got = plain(x), PackedLinear(plain)(x)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=ATOL, rtol=RTOL)


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 4, 16, 300])
def test_the_order_of_the_weights_fits_any_number_of_rows(rows: int) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(1408, 512, dtype=torch.bfloat16)
    x = torch.randn(rows, 1408, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(x), plain(x), atol=ATOL, rtol=RTOL)


class Tied(nn.Module):
    """A table whose weights are the head's too, beside layers of their own."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32, dtype=torch.bfloat16)
        self.head = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList(
            nn.Linear(32, 64, bias=False, dtype=torch.bfloat16) for _ in range(num_layers)
        )


@needs_bfloat16
@pytest.mark.parametrize("num_layers", [2, 20])
def test_a_tied_head_is_packed_where_its_copy_is_small(num_layers: int) -> None:
    model = Tied(num_layers).requires_grad_(False)
    rows = model.table.weight.clone()
    is_small = 1 / (1 + num_layers) <= MAX_COPY_SHARE
    packing = pack_linears(model)
    assert packing.num_layers == num_layers + is_small
    assert packing.copied_bytes == is_small * rows.nbytes
    assert isinstance(model.head, PackedLinear) == is_small
    assert torch.equal(model.table(torch.arange(64)), rows), "the table is read by rows"
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    torch.testing.assert_close(model.head(x), x @ rows.T, atol=ATOL, rtol=RTOL)


@needs_bfloat16
@pytest.mark.parametrize("stages", [(Stage.ENCODER,), (Stage.DECODE,)], ids=str)
def test_nothing_stays_mapped_from_the_files_of_a_packed_model(stages: tuple[Stage, ...]) -> None:
    mapped = str(SHAPES / "model.safetensors")
    plain = load_model(SHAPES, stages, packed_weights=False)
    assert mapped in Path("/proc/self/maps").read_text(), "a plain model is read where it lies"
    del plain
    packed = load_model(SHAPES, stages)
    assert packed.packing.num_layers > 0
    assert packed.packing.backend in {"native", "onednn"}
    assert mapped not in Path("/proc/self/maps").read_text()


def test_other_types_and_devices_stay_plain() -> None:
    assert not can_pack(torch.float32, CPU)
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))
    loaded = load_model(SHAPES, tuple(Stage), dtype="float32")
    assert loaded.packing.num_layers == 0
    assert loaded.packing.backend == "none"
    assert not any(isinstance(module, PackedLinear) for module in loaded.model.modules())


@needs_bfloat16
def test_a_packed_model_computes_what_a_plain_one_does() -> None:
    question = next(question for question in questions() if len(question.prepared_images) == 1)
    answer = list(range(10, 18))

    def logits(runner: ModelRunner) -> np.ndarray:
        stepper = Stepper(runner)
        sequence = stepper.start(question, (), max_tokens=len(answer))
        return stepper.forced_logits([sequence], [answer], chunk=64)[0]

    plain, packed, exact = (
        logits(build_runner(RunnerSettings(
            SHAPES, tuple(Stage), dtype=dtype, kv_memory_bytes=32 << 20, packed_weights=is_packed,
        )))
        for dtype, is_packed in (("bfloat16", False), ("bfloat16", True), ("float32", False))
    )  # fmt: skip
    assert np.abs(packed - exact).max() <= 2 * np.abs(plain - exact).max()
