"""Calibration: what is counted, which scale it gives, and what a worker computes with it."""

from __future__ import annotations

import dataclasses
import math
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

from vlm_kernels.packed_weights import InputScale
from vlm_worker.core.activation_scales import ActivationScales, processor_hash
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.calibrate import VALUES_PER_CALL, Calibrator, InputCounts, load_unpacked
from vlm_worker.model.linear import GatedLinear, JointLinear, PackedLinear
from vlm_worker.model.loader import load_model
from vlm_worker.model.rounding import linears_of
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import PreparedImage, Stage
from vlm_worker.weights import PARTS, Part

ANSWER = list(range(10, 18))
ASKED = [question for question in questions() if len(question.prepared_images) == 1]

VALUES = st.lists(
    st.floats(-1000, 1000, width=16).filter(lambda x: abs(x) > 1e-3), min_size=1, max_size=200
)


@given(VALUES, st.sampled_from([60.0, 99.0, 100.0]), st.floats(0.5, 2))
def test_the_largest_code_is_the_percentile_of_the_sizes(
    values: list[float], percentile: float, margin: float
) -> None:
    x = torch.tensor(values).to(torch.bfloat16)
    counts = InputCounts("a")
    counts.add(x)
    scale, zero = counts.codes(percentile=percentile, margin=margin)
    sizes = np.sort(np.abs(x.float().numpy()))
    if zero == 128:
        largest = sizes[max(0, int(np.ceil(len(sizes) * percentile / 100)) - 1)]
        assert scale == pytest.approx(largest * margin / 127)
    else:
        assert 0 <= zero <= 25, "small values of the other sign alone"


def test_values_of_one_sign_get_a_zero_of_their_own_and_half_the_scale() -> None:
    torch.manual_seed(0)
    x = torch.rand(5000)
    gelu = nn.functional.gelu(torch.randn(5000) * 4)
    for values in (x, gelu):
        counts = InputCounts("a")
        counts.add(values)
        scale, zero = counts.codes(percentile=100, margin=1)
        low, high = min(0.0, float(values.min())), float(values.max())
        assert scale == pytest.approx((high - low) / 255, rel=0.01)
        assert zero == pytest.approx(-low / scale, abs=0.6)
    counts.add(-values)
    assert counts.codes(percentile=100, margin=1).zero == 128


def test_a_call_is_sampled_alike_in_every_run_and_bounded() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1024)
    found = []
    for _ in range(2):
        counts = InputCounts("layer")
        counts.add(x)
        counts.add(x)
        found.append(counts.codes(percentile=99, margin=1))
        assert (counts.num_calls, counts.num_values) == (2, 2 * VALUES_PER_CALL)
    assert found[0] == found[1]
    exact = float(x.abs().quantile(0.99)) / 127
    assert found[0].scale == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0.0, "inputs are 0 .* more images"),
        (float("nan"), "not finite"),
        (-torch.inf, "not finite"),
    ],
)
def test_inputs_without_a_scale_name_their_layer(value: float, problem: str) -> None:
    counts = InputCounts("visual.3")
    counts.add(torch.full((4,), value))
    with pytest.raises(ModelConfigError, match=rf"visual\.3: .*{problem}"):
        counts.codes(percentile=99, margin=1)


@pytest.fixture(scope="module")
def scales() -> ActivationScales:
    """Of all parts of `shapes`, from 8 images that no test asks about."""
    return calibrated(SHAPES, ASKED[20:28], PARTS)


def calibrated(
    model_dir: Path, asked: Sequence[Question], parts: Sequence[Part]
) -> ActivationScales:
    loaded = load_unpacked(model_dir)
    most = max(len(question.token_ids) for question in asked)
    calibrator = Calibrator(loaded, parts=parts, max_tokens=most)
    for question in asked:
        (image,), (item,) = question.prepared_images, question.items
        calibrator.read(question.token_ids, image, item.offset)
    return ActivationScales(
        model=loaded.checkpoint.revision(),
        processor=processor_hash(loaded.family.processor),
        percentile=99.99,
        margin=1.0,
        images=len(asked),
        parts=calibrator.scales(percentile=99.99, margin=1.0),
    )


def test_every_layer_of_a_part_is_counted_and_no_hook_stays() -> None:
    loaded = load_unpacked(SHAPES)
    calibrator = Calibrator(loaded, parts=("encoder", "layers"), max_tokens=400)
    linears = linears_of(loaded.model, loaded.family.spec)
    (image,), (item,) = ASKED[0].prepared_images, ASKED[0].items
    calibrator.read(ASKED[0].token_ids, image, item.offset)
    found = calibrator.scales(percentile=99.99, margin=1.0)
    assert list(found) == ["encoder", "layers"]
    for part, layers in found.items():
        assert layers.keys() == linears[part].keys()
        assert all(one.calls == 1 and one.scale > 0 for one in layers.values())
    assert not any(module._forward_pre_hooks for module in loaded.model.modules())


@pytest.mark.parametrize("stages", [(Stage.ENCODER,), (Stage.DECODE,), tuple(Stage)])
def test_every_layer_that_a_role_rounds_gets_its_scale(
    stages: tuple[Stage, ...], scales: ActivationScales, tmp_path: Path
) -> None:
    model = loaded_with(scales, tmp_path, stages=stages).model
    rounded = {
        name: module.packed.inputs
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear | JointLinear | GatedLinear)
        and module.packed is not None
        and module.packed.is_int8
    }
    assert rounded
    want = {name: one for layers in scales.parts.values() for name, one in layers.items()}
    for name, inputs in rounded.items():
        assert inputs == (want[name].scale, want[name].zero), name


def test_a_part_without_scales_takes_them_from_each_row(
    scales: ActivationScales, tmp_path: Path
) -> None:
    encoder = dataclasses.replace(scales, parts={"encoder": scales.parts["encoder"]})
    model: Any = loaded_with(encoder, tmp_path).model
    assert model.model.visual.blocks[0].qkv.packed.inputs.is_known
    assert not model.model.language_model.layers[0].qkv.packed.inputs.is_known


def test_a_batch_answers_as_its_questions_do_alone_to_the_bit(
    scales: ActivationScales, tmp_path: Path
) -> None:
    runner = runner_with(scales, tmp_path)
    asked = ASKED[:4]
    together = logits_of(runner, asked)
    for question, some in zip(asked, together, strict=True):
        np.testing.assert_array_equal(logits_of(runner, [question])[0], some)
    tokens = answers_of(runner, asked)
    assert tokens == [answers_of(runner, [question])[0] for question in asked]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.floats(1e-3, 0.1))
@settings(max_examples=20)
def test_chunks_of_rows_are_the_whole_to_the_bit(lengths: list[int], scale: float) -> None:
    """The scale is of no row, so a cut changes no code; sums are integers."""
    torch.manual_seed(sum(lengths))
    plain = nn.Linear(48, 40, dtype=torch.bfloat16)
    x = torch.randn(sum(lengths), 48, dtype=torch.bfloat16)
    with torch.inference_mode():
        linear = PackedLinear(plain, int8=True, inputs=InputScale(scale))
        chunks = [linear(part) for part in x.split(lengths)]
        assert torch.equal(torch.cat(chunks), linear(x))


def test_an_image_is_encoded_alone_as_among_others_to_the_bit(
    scales: ActivationScales, tmp_path: Path
) -> None:
    runner = runner_with(scales, tmp_path)
    images = [question.prepared_images[0] for question in ASKED[:5]]
    together = [one.rows for one in runner.encode(images)]  # type: ignore[union-attr]
    for image, rows in zip(images, together, strict=True):
        (alone,) = runner.encode([image])
        assert torch.equal(alone.rows, rows)  # type: ignore[union-attr]


def test_the_logits_stay_near_those_of_bfloat16_and_differ_from_dynamic_ones(
    scales: ActivationScales, tmp_path: Path
) -> None:
    asked = ASKED[:3]
    exact, dynamic = (np.concatenate(logits_of(runner_of(w), asked)) for w in ("auto", "int8"))
    tower = dataclasses.replace(scales, parts={"encoder": scales.parts["encoder"]})
    static = np.concatenate(logits_of(runner_with(tower, tmp_path), asked))
    assert np.abs(static - dynamic).max() > 0, "the scales took effect"
    assert np.sqrt(((static - exact) ** 2).mean()) < 0.15 * exact.std()


@pytest.mark.parametrize("family_name", ["gemma3", "llava", "qwen2_vl", "qwen2_5_vl"])
def test_every_family_is_calibrated_in_the_parts_that_it_rounds(
    family_name: str, tmp_path: Path
) -> None:
    model_dir = make_checkpoint(tmp_path / "model", family_name)
    loaded = load_unpacked(model_dir)
    parts = tuple(part for part in PARTS if part in loaded.family.spec.int8)
    ids, image, offset = prompt_of(loaded.family)
    calibrator = Calibrator(loaded, parts=parts, max_tokens=len(ids))
    calibrator.read(ids, image, offset)
    found = calibrator.scales(percentile=99.99, margin=1.0)
    assert tuple(found) == parts
    scales = ActivationScales(
        loaded.checkpoint.revision(), processor_hash(loaded.family.processor), 99.99, 1.0, 1, found
    )
    model = loaded_with(scales, tmp_path, model_dir=model_dir).model
    known = [
        module.packed.inputs.is_known
        for module in model.modules()
        if isinstance(module, PackedLinear | JointLinear | GatedLinear)
        and module.packed is not None
        and module.packed.is_int8
    ]
    assert known
    assert all(known)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [("auto", "no part of the model is in int8"), ("head=int8", "scales of encoder alone")],
)
def test_scales_that_nothing_reads_end_the_start(
    weights: str, problem: str, scales: ActivationScales, tmp_path: Path
) -> None:
    encoder = dataclasses.replace(scales, parts={"encoder": scales.parts["encoder"]})
    with pytest.raises(ModelConfigError, match=problem):
        loaded_with(encoder, tmp_path, weights=weights)


def test_a_part_with_scales_of_some_layers_alone_ends_the_start(
    scales: ActivationScales, tmp_path: Path
) -> None:
    layers = dict(scales.parts["layers"])
    name, _ = layers.popitem()
    some = dataclasses.replace(scales, parts={"layers": layers})
    with pytest.raises(ModelConfigError, match=f"parts.layers: has none for {name}"):
        loaded_with(some, tmp_path)


def test_scales_of_another_model_end_the_start(scales: ActivationScales, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "model", "qwen2_5_vl")
    with pytest.raises(ModelConfigError, match=f"is of model {scales.model}, and this is model"):
        loaded_with(scales, tmp_path, model_dir=other)


def test_scales_for_a_gpu_are_refused(
    scales: ActivationScales, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_worker.model.rounding.gpu.serves", lambda _: True)
    with pytest.raises(ModelConfigError, match="on a GPU do not round what they multiply"):
        loaded_with(scales, tmp_path)


def prompt_of(family: Any) -> tuple[tuple[int, ...], PreparedImage, int]:
    """A prompt with one image of noise, and the offset of its placeholders."""
    geometry = family.geometry(112, 112)
    num_values = math.prod(geometry.grid_thw) * family.processor.patch_dim
    patches = np.random.default_rng(0).standard_normal(num_values, np.float32)
    image = PreparedImage(bytes(32), geometry.grid_thw, geometry.num_tokens, patches.data)
    text = [10, 11, 12]
    return (*text, *[family.image_token_id] * geometry.num_tokens, *text), image, len(text)


def written(scales: ActivationScales, directory: Path) -> Path:
    path = directory / "scales.json"
    path.write_text(scales.to_json())
    return path


def loaded_with(
    scales: ActivationScales,
    directory: Path,
    *,
    stages: tuple[Stage, ...] = tuple(Stage),
    model_dir: Path = SHAPES,
    weights: str = "int8",
) -> Any:
    return load_model(
        model_dir,
        stages,
        dtype="bfloat16",
        device="cpu",
        weights=weights,
        activation_scales=written(scales, directory),
    )


def runner_with(scales: ActivationScales, directory: Path) -> ModelRunner:
    return runner_of("int8", activation_scales=written(scales, directory))


def runner_of(weights: str, **options: Any) -> ModelRunner:
    return build_runner(
        RunnerSettings(
            SHAPES,
            tuple(Stage),
            dtype="bfloat16",
            weights=weights,
            kv_memory_bytes=1 << 26,
            **options,
        )
    )


def logits_of(runner: ModelRunner, asked: Sequence[Question]) -> list[np.ndarray]:
    stepper = Stepper(runner)
    sequences = [stepper.start(question, (), max_tokens=len(ANSWER) + 1) for question in asked]
    return stepper.forced_logits(sequences, [ANSWER] * len(asked), chunk=64)


def answers_of(runner: ModelRunner, asked: Sequence[Question]) -> list[tuple[int, ...]]:
    stepper = Stepper(runner)
    sequences = [stepper.start(question, (), max_tokens=12) for question in asked]
    stepper.generate(sequences, max_tokens=12, chunk=64, eos=2)
    return [tuple(sequence.answer) for sequence in sequences]
