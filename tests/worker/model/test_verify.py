"""A start refuses what it does not compute as transformers does, and says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worker.identity.engines import make_runner
from worker.unlisted_checkpoints import make_unlisted, unlist

from vlm_worker.attends import Attends
from vlm_worker.core.families import Family, ModelConfigError
from vlm_worker.core.families import generic as families
from vlm_worker.core.families.generic import MODEL_TYPES
from vlm_worker.core.probe import NUM_ANSWER
from vlm_worker.model import generic, runner
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.loader import load_model
from vlm_worker.types import Stage

LM = (Stage.PREFILL, Stage.DECODE)
MASKS = {
    "qwen3_vl": Attends.CAUSAL,
    "gemma3": Attends.IMAGES,
    "gemma4": Attends.IMAGES_SLIDING,
    "paligemma2": Attends.PREFIX,
}


@pytest.fixture(autouse=True)
def only_unlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    unlist(monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def made(name: str) -> Path:
        return root / name if (root / name).exists() else make_unlisted(root / name, name)

    return made


def start(path: Path, *stages: Stage) -> runner.ModelRunner:
    return make_runner(path, *(stages or LM), block_size=4, kv_memory_bytes=1 << 22)


@pytest.mark.parametrize(("name", "mask"), MASKS.items())
def test_each_mask_is_found(models: Callable[[str], Path], name: str, mask: Attends) -> None:
    found = start(models(name)).verification
    assert found is not None
    assert found.attends is mask
    assert found.difference < 1e-5


Plan = Callable[..., Any]


def without_spans(plan: Plan, *args: Any, **how: Any) -> Any:
    return plan(*args, **how | {"spans": ()})


def with_all_in_one_span(plan: Plan, *args: Any, **how: Any) -> Any:
    ends = args[1] + args[0][1:] - args[0][:-1]  # context and queries of each sequence
    return plan(*args, **how | {"spans": tuple(((0, int(end)),) for end in ends)})


def with_shorter_spans(plan: Plan, *args: Any, **how: Any) -> Any:
    spans = [tuple((start, end - 1) for start, end in own) for own in how["spans"]]
    return plan(*args, **how | {"spans": tuple(spans)})


def with_wider_windows(plan: Plan, *args: Any, **how: Any) -> Any:
    window = how["window"]
    return plan(*args, **how | {"window": None if window is None else window + 1})


def with_windows_inside_spans(plan: Plan, *args: Any, **how: Any) -> Any:
    return plan(*args, **how | {"spans_exceed_window": False})


BROKEN = [
    ("qwen3_vl", with_all_in_one_span),
    ("gemma3", without_spans),
    ("gemma3", with_shorter_spans),
    ("gemma3", with_wider_windows),
    ("gemma4", without_spans),
    ("gemma4", with_shorter_spans),
    ("gemma4", with_wider_windows),
    ("paligemma2", without_spans),
    ("paligemma2", with_shorter_spans),
    ("paligemma2", with_wider_windows),
    ("paligemma2", with_windows_inside_spans),
]


@pytest.mark.parametrize(("name", "broken"), BROKEN)
def test_a_broken_mask_is_refused(
    models: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    broken: Callable[..., Any],
) -> None:
    plan = runner.plan_attention
    monkeypatch.setattr(runner, "plan_attention", lambda *args, **how: broken(plan, *args, **how))
    with pytest.raises(ModelConfigError, match=r"finds no mask .* causal \d\.\de"):
        start(models(name))


def test_wrong_positions_of_images_are_refused(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Family.positions_of

    def wrong(self: Family, num_tokens: int, items: Any) -> Any:
        positions, delta = right(self, num_tokens, items)
        positions[1] += positions[2] - positions[1]  # rows as columns
        return positions, delta

    monkeypatch.setattr(Family, "positions_of", wrong)
    with pytest.raises(ModelConfigError, match="finds no mask"):
        start(models("qwen3_vl"))


@pytest.mark.parametrize("name", ["qwen3_vl", "paligemma2"])
def test_an_encoder_in_another_order_answers_otherwise_than_generate(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rows_of = generic.rows_of
    monkeypatch.setattr(generic, "rows_of", lambda output: rows_of(output).flip(0))
    with pytest.raises(ModelConfigError, match=r"otherwise than generate\(\): \d"):
        start(models(name), *Stage)


def test_an_answer_to_an_image_takes_the_logits_of_its_own_rows_alone(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt with an image can have a thousand rows of a quarter of a million tokens each."""
    logits, steps = runner.ModelRunner.logits, []

    def counted(self: runner.ModelRunner, inputs: Any) -> torch.Tensor:
        made = logits(self, inputs)
        steps.append((len(inputs.token_ids), len(made)))
        return made

    monkeypatch.setattr(runner.ModelRunner, "logits", counted)
    start(models("paligemma2"), *Stage)
    (num_prompt, num_rows), *answer = steps[-1 - NUM_ANSWER :]
    assert num_prompt > 10
    assert (num_rows, answer) == (1, [(1, 1)] * NUM_ANSWER)


def test_levels_that_are_lost_are_refused(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = generic.GenericModel._encoded

    def without_levels(self: generic.GenericModel, rows: torch.Tensor) -> Any:
        width = rows.shape[-1] // 3
        return encoded(self, torch.cat([rows[:, :width], 0 * rows[:, width:]], dim=-1))

    path = models("qwen3_vl")
    monkeypatch.setattr(generic.GenericModel, "_encoded", without_levels)
    with pytest.raises(ModelConfigError, match=r"otherwise than generate"):
        start(path, *Stage)


def test_the_attention_of_the_model_is_its_own_only_meanwhile(
    models: Callable[[str], Path],
) -> None:
    path = models("gemma3")
    before = load_model(path, LM, dtype="float32").model.get_decoder()
    after = start(path)._model.get_decoder()
    for one, other in zip(before.modules(), after.modules(), strict=True):
        for name in ("sliding_window", "config"):
            assert getattr(one, name, None) == getattr(other, name, None)


def changed(models: Callable[[str], Path], tmp_path: Path, name: str, change: Any) -> Path:
    """A checkpoint of `name` with another config.json."""
    for file in models(name).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def without_sections(config: dict[str, Any]) -> None:
    del config["text_config"]["rope_parameters"]["mrope_section"]


def test_default_sections_of_positions_are_computed(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    runner = start(changed(models, tmp_path, "qwen3_vl", without_sections), *Stage)
    assert runner.verification is not None
    assert runner.verification.difference < 1e-5
    assert runner.family.num_position_rows == 3


def test_a_reference_knows_grids_whatever_the_positions_are(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "MROPE_TYPES", frozenset())
    with pytest.raises(ModelConfigError, match="finds no mask"):
        start(models("qwen3_vl"))


def with_dynamic_positions(config: dict[str, Any]) -> None:
    """As InternVL 3 is published."""
    text = config["text_config"]
    del text["rope_parameters"]
    text |= {"rope_theta": 1e6, "rope_scaling": {"factor": 2.0, "rope_type": "dynamic"}}


def test_positions_that_grow_behind_the_longest_sequence_are_served(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    path = changed(models, tmp_path, "internvl", with_dynamic_positions)
    rotary = load_model(path, LM, dtype="float32").model.get_decoder().rotary_emb
    assert rotary.rope_type == "dynamic"
    before = rotary.inv_freq.clone()
    rotary(torch.ones(1), torch.tensor([[rotary.config.max_position_embeddings - 1]]))
    assert torch.equal(rotary.inv_freq, before)
    found = start(path, *Stage).verification
    assert found is not None
    assert found.difference < 1e-5


REFUSED = [
    (
        lambda config: config.update(model_type="mllama"),
        r"model_type is 'mllama', .* takes no mm_encoder_outputs",
    ),
    (
        lambda config: config.update(model_type="qwen9_vl"),
        r"model_type is 'qwen9_vl', for which this transformers has no",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_type_that_transformers_cannot_compute_apart_is_refused(
    models: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    message: str,
) -> None:
    for name in ("mllama", "qwen9_vl"):
        monkeypatch.setitem(MODEL_TYPES, name, (None,))  # type: ignore[arg-type]
    with pytest.raises(ModelConfigError, match=message):
        start(changed(models, tmp_path, "qwen3_vl", change))


def test_layers_with_kv_of_several_shapes_are_refused(tmp_path: Path) -> None:
    path = make_unlisted(tmp_path / "gemma4", "gemma4_wide")
    with pytest.raises(ModelConfigError, match="finds layers whose KV has several shapes"):
        start(path)


@pytest.mark.parametrize("weights", ["int8", "layers=int8"])
def test_unlisted_weights_are_not_rounded(models: Callable[[str], Path], weights: str) -> None:
    settings = RunnerSettings(models("qwen3_vl"), LM, dtype="float32", weights=weights)
    with pytest.raises(ModelConfigError, match=r"--weights=.*leave the flag out"):
        build_runner(settings)


IN_16_BITS = [
    "qwen3_vl", "qwen3_vl_moe", "gemma3", "paligemma2", "glm4v", "glm4v_moe", "internvl",
]  # fmt: skip


@pytest.mark.parametrize("name", IN_16_BITS)
def test_the_start_finds_the_same_mask_in_bfloat16(
    models: Callable[[str], Path], name: str
) -> None:
    settings = RunnerSettings(
        models(name), tuple(Stage), dtype="bfloat16", block_size=4, kv_memory_bytes=1 << 22
    )
    found = build_runner(settings).verification
    assert found is not None
    print(f"{name}: {found}")
    assert found.attends is MASKS.get(name, Attends.CAUSAL)
