"""`--weights=int8`: which layers are rounded, what they hold, how far the logits go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from worker.checkpoints import make_checkpoint
from worker.identity.questions import SHAPES, Question, questions
from worker.identity.stepper import Stepper

from vlm_kernels.packed_linear import has_kernel
from vlm_kernels.packed_weights import PackedWeights
from vlm_worker.core.families import FAMILIES
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.model import linear
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.linear import (
    GatedLinear,
    JointLinear,
    PackedLinear,
    can_pack,
    pack_linears,
)
from vlm_worker.model.loader import load_model
from vlm_worker.model.runner import ModelRunner
from vlm_worker.model.vision import Embedding
from vlm_worker.serve.loading import load
from vlm_worker.settings import WorkerSettings, parse
from vlm_worker.types import PreparedImage, Stage
from vlm_worker.weights import PARTS

ANSWER = list(range(10, 18))


@given(st.integers(1, 6), st.integers(1, 70), st.integers(1, 70), st.booleans())
@settings(max_examples=25)
def test_a_layer_in_int8_is_the_plain_one_up_to_its_levels(
    rows: int, num_in: int, num_out: int, bias: bool
) -> None:
    torch.manual_seed(num_in * 100 + num_out)
    plain = nn.Linear(num_in, num_out, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(rows, num_in, dtype=torch.bfloat16)
    with torch.inference_mode():
        want, got = plain(x), PackedLinear(plain, int8=True)(x)
    level = x.abs().amax(1, keepdim=True) * plain.weight.abs().amax(1)[None] / 127
    assert ((want - got).abs() <= level * (num_in + 1) + 2e-2).all()


class Halves(nn.Module):
    """Two parts of one form."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.rounded = (
            nn.ModuleList([
                JointLinear([nn.Linear(16, 32, bias=False, dtype=torch.bfloat16)]),
                GatedLinear(
                    nn.Linear(16, 8, bias=False, dtype=torch.bfloat16),
                    nn.Linear(16, 8, bias=False, dtype=torch.bfloat16),
                ),
                nn.Linear(16, 4, dtype=torch.bfloat16),
            ])
            for _ in range(2)
        )  # fmt: skip


def test_only_the_named_parts_are_rounded_and_counted() -> None:
    model = Halves().requires_grad_(False)
    bytes_of_half = sum(w.nbytes for w in model.rounded.parameters() if w.dim() == 2)
    packing = pack_linears(model, int8=[model.rounded])
    assert packing.num_int8_layers == 4
    assert packing.saved_bytes == bytes_of_half // 2
    # a CPU that does not multiply bfloat16 packs no layer in bfloat16
    packed_bytes = bytes_of_half * can_pack(torch.bfloat16, torch.device("cpu"))
    assert packing.num_bytes == packed_bytes + bytes_of_half // 2
    for part in model.rounded:
        assert _is_int8(part)
    for part in model.kept:
        assert not _is_int8(part)


def test_a_cpu_without_products_of_bfloat16_packs_the_rounded_parts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "has_kernel", lambda: False)
    monkeypatch.setattr(linear, "_onednn_has_bfloat16", lambda: False)
    model = Halves().requires_grad_(False)
    packing = pack_linears(model, int8=[model.rounded])
    assert (packing.num_layers, packing.num_int8_layers, packing.backend) == (4, 4, "none")
    assert type(model.kept[2]) is nn.Linear


@pytest.mark.parametrize("stage", [Stage.ENCODER, Stage.DECODE])
def test_a_role_rounds_what_its_family_names_and_holds_fewer_bytes(stage: Stage) -> None:
    plain = load_model(SHAPES, (stage,), dtype="bfloat16")
    rounded = load_model(SHAPES, (stage,), dtype="bfloat16", weights="int8")
    assert plain.packing.num_int8_layers == 0
    assert rounded.packing.num_int8_layers > 0
    assert rounded.weights_bytes == plain.weights_bytes - rounded.packing.saved_bytes
    assert rounded.weights_bytes < 0.8 * plain.weights_bytes


def test_what_a_family_keeps_out_stays_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_model(SHAPES, (Stage.DECODE,)).family.spec
    name = next(name for name, one in FAMILIES.items() if one == spec)
    only_layers = dataclasses.replace(spec, int8=frozenset({"layers"}))
    monkeypatch.setitem(FAMILIES, name, only_layers)
    model = load_model(SHAPES, tuple(Stage), dtype="bfloat16", weights="int8").model
    kinds = {
        kind: "int8" in repr(part)
        for kind, part in (
            ("encoder", model.model.visual),
            ("layers", model.model.language_model),
            ("head", model.lm_head),
        )
    }
    assert kinds == {"encoder": False, "layers": True, "head": False}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"dtype": "float32"}, "cpu, float32 and auto"),
        ({"packed_weights": False}, "cpu, bfloat16 and off"),
    ],
)
def test_what_int8_is_not_for_is_refused(changed: dict[str, object], found: str) -> None:
    options: dict[str, object] = {"dtype": "bfloat16", "weights": "int8"}
    with pytest.raises(ModelConfigError, match=f"--weights=int8 needs .* this is {found}"):
        load_model(SHAPES, (Stage.DECODE,), **(options | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "told"),
    [(("--dtype=float32",), "float32"), (("--dtype=bfloat16", "--weights=int8"), "int8")],
)
def test_a_worker_tells_what_its_weights_are(flags: tuple[str, ...], told: str) -> None:
    command = ["encoder", f"--model={SHAPES}", "--served-name=m", "--bind=127.0.0.1", *flags]
    told_to = parse(command, {})
    assert isinstance(told_to, WorkerSettings)
    assert load(told_to, lambda _: None).facts.weights == told


def test_a_batch_in_int8_answers_as_its_questions_do_alone() -> None:
    """Codes are of one row: no other row, and no chunk, changes them."""
    runner = _runner("int8")
    asked = [question for question in questions() if len(question.prepared_images) == 1][:3]
    together = _logits(runner, asked)
    alone = [_logits(runner, [question])[0] for question in asked]
    for some, one in zip(together, alone, strict=True):
        np.testing.assert_allclose(some, one, atol=0.25, rtol=0)
        assert np.abs(some - one).mean() < 0.02


def test_the_logits_stay_near_those_of_bfloat16() -> None:
    asked = [question for question in questions() if len(question.prepared_images) == 1][:3]
    exact, rounded = (np.concatenate(_logits(_runner(w), asked)) for w in ("auto", "int8"))
    assert np.abs(rounded - exact).max() > 0, "int8 took effect"
    assert np.sqrt(((rounded - exact) ** 2).mean()) < 0.15 * exact.std()


ALL_PARTS = "encoder=int8,merger=int8,layers=int8,head=int8"


def test_all_parts_in_int8_answer_as_int8_does_to_the_bit() -> None:
    asked = [question for question in questions() if len(question.prepared_images) == 1][:2]
    whole, parts = _runner("int8"), _runner(ALL_PARTS)
    assert parts.weights_bytes == whole.weights_bytes
    for want, got in zip(_logits(whole, asked), _logits(parts, asked), strict=True):
        np.testing.assert_array_equal(got, want)


def test_all_parts_in_auto_answer_as_auto_does_to_the_bit() -> None:
    asked = [question for question in questions() if len(question.prepared_images) == 1][:2]
    off, parts = _runner("auto"), _runner("merger=auto,encoder=auto,layers=auto,head=auto")
    assert parts.weights_bytes == off.weights_bytes
    for want, got in zip(_logits(off, asked), _logits(parts, asked), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("family_name", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_alone_changes_its_own_weights_only(
    part: str, family_name: str, tmp_path: Path
) -> None:
    model_dir = make_checkpoint(tmp_path / "model", family_name)
    off = load_model(model_dir, tuple(Stage), dtype="bfloat16").model
    one = load_model(model_dir, tuple(Stage), dtype="bfloat16", weights=f"{part}=int8").model
    every = load_model(model_dir, tuple(Stage), dtype="bfloat16", weights="int8").model
    was, got, want = (_weights_by_name(model) for model in (off, one, every))
    assert got.keys() == want.keys()
    inside = {name for name in want if _part_of(name) == part and name in _rounded(every)}
    assert inside
    assert _rounded(one) == inside
    for name, weight in got.items():
        if name in inside:
            assert torch.equal(weight, want[name]), name
        elif name in was:  # a CPU without products of bfloat16 packs only what is in int8
            assert torch.equal(weight, was[name]), name


@pytest.mark.parametrize(
    ("weights", "changes"),
    [("encoder=int8", True), ("merger=int8", True), ("layers=int8,head=int8", False)],
)
def test_embeddings_change_only_with_the_encoders_parts(weights: str, changes: bool) -> None:
    images = questions()[0].prepared_images or questions()[1].prepared_images
    want, got = (_rows(_runner(one), images) for one in ("auto", weights))
    assert torch.equal(want, got) != changes


@pytest.mark.parametrize(
    ("stage", "weights"),
    [
        (Stage.DECODE, "encoder=int8,merger=int8"),
        (Stage.DECODE, "encoder=int4"),
        (Stage.ENCODER, "layers=int8,head=int8"),
        (Stage.ENCODER, "layers=int4"),
    ],
)
def test_a_role_ignores_the_types_of_parts_that_it_does_not_load(
    stage: Stage, weights: str
) -> None:
    off = load_model(SHAPES, (stage,), dtype="bfloat16")
    loaded = load_model(SHAPES, (stage,), dtype="bfloat16", weights=weights)
    assert loaded.packing.num_int8_layers == 0
    assert loaded.weights_bytes == off.weights_bytes


def test_parts_of_other_roles_need_no_bfloat16() -> None:
    load_model(SHAPES, (Stage.ENCODER,), dtype="float32", weights="layers=int8")
    with pytest.raises(ModelConfigError, match="needs --dtype=bfloat16"):
        load_model(SHAPES, (Stage.DECODE,), dtype="float32", weights="layers=int8")


@pytest.mark.parametrize("stage", [Stage.ENCODER, Stage.DECODE])
@pytest.mark.parametrize("weights", ["auto", "encoder=int8", "merger=int8,layers=int8", "int8"])
def test_the_bytes_that_a_role_tells_are_those_that_it_holds(stage: Stage, weights: str) -> None:
    if not has_kernel() and weights != "int8":
        pytest.skip("oneDNN's layout is opaque")
    loaded = load_model(SHAPES, (stage,), dtype="bfloat16", weights=weights)
    held = sum(parameter.nbytes for parameter in set(loaded.model.parameters()))
    held += sum(packed.panels.nbytes for packed in _packed(loaded.model).values())
    told = loaded.weights_bytes + loaded.packing.copied_bytes
    assert held == pytest.approx(told, rel=0.002)  # panels are padded to 32 outputs


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ("merger=int8", "this family rounds layers alone; remove merger=int8"),
        ("layers=int8,head=int8", "this family rounds layers alone; remove head=int8"),
    ],
)
def test_a_part_that_the_family_does_not_round_is_refused(
    weights: str, told: str, tmp_path: Path
) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "llava")
    with pytest.raises(ModelConfigError, match=f"--weights={weights}: {told}"):
        load_model(model_dir, (Stage.DECODE,), dtype="bfloat16", weights=weights)


def test_int4_of_a_part_needs_a_gpu() -> None:
    with pytest.raises(
        ModelConfigError, match=r"--weights=layers=int4 needs a GPU, .* because of int4"
    ):
        load_model(SHAPES, (Stage.DECODE,), dtype="bfloat16", device="cpu", weights="layers=int4")


def test_a_head_that_cannot_be_rounded_is_refused_if_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "MAX_COPY_SHARE", 0.0)
    load_model(SHAPES, (Stage.DECODE,), dtype="bfloat16", weights="int8")
    load_model(SHAPES, (Stage.ENCODER,), dtype="bfloat16", weights="head=int8")
    with pytest.raises(ModelConfigError, match=r"shares its weights .* remove head="):
        load_model(SHAPES, (Stage.DECODE,), dtype="bfloat16", weights="head=int8")


def _packed(model: nn.Module) -> dict[str, PackedWeights]:
    """What the linear layers of a model hold, by name."""
    modules = model.named_modules()
    found = {name: getattr(module, "packed", None) for name, module in modules}
    return {name: packed for name, packed in found.items() if packed is not None}


def _weights_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    packed = {name: one.panels for name, one in _packed(model).items()}
    return {**dict(model.named_parameters()), **packed}


def _rounded(model: nn.Module) -> set[str]:
    return {name for name, packed in _packed(model).items() if packed.is_int8}


def _part_of(name: str) -> str:
    if name.startswith("model.visual."):
        return "merger" if name.startswith("model.visual.merger.") else "encoder"
    return "head" if name.startswith("lm_head") else "layers"


def _rows(runner: ModelRunner, images: Sequence[PreparedImage]) -> torch.Tensor:
    rows = [one.rows for one in runner.encode(images) if isinstance(one, Embedding)]
    assert len(rows) == len(images) > 0
    return torch.cat(rows)


def _is_int8(part: Any) -> bool:
    packed = getattr(part, "packed", None)
    return packed is not None and packed.is_int8


def _runner(weights: str) -> ModelRunner:
    return build_runner(
        RunnerSettings(
            SHAPES, tuple(Stage), dtype="bfloat16", kv_memory_bytes=32 << 20, weights=weights
        )
    )


def _logits(runner: ModelRunner, asked: Sequence[Question]) -> list[np.ndarray]:
    stepper = Stepper(runner)
    sequences = [stepper.start(question, (), max_tokens=len(ANSWER)) for question in asked]
    return stepper.forced_logits(sequences, [ANSWER] * len(asked), chunk=64)
