"""A role loads its half of the weights, bit by bit, and refuses whatever it cannot serve."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from worker.identity.questions import SHAPES

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.model.checkpoint import open_checkpoint
from vlm_worker.model.loader import load_model
from vlm_worker.types import Stage

WEIGHTS = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n"
LM = (Stage.PREFILL, Stage.DECODE)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A copy of `shapes` to damage."""
    return Path(shutil.copytree(SHAPES, tmp_path / "model"))


@pytest.mark.parametrize("stages", [(Stage.ENCODER,), (Stage.PREFILL,), LM, tuple(Stage)], ids=str)
def test_a_role_holds_its_own_weights_and_no_others(stages: tuple[Stage, ...]) -> None:
    whole = load_model(SHAPES, tuple(Stage), packed_weights=False).model.state_dict()
    loaded = load_model(SHAPES, stages, packed_weights=False)
    own = loaded.model.state_dict()
    vision = {name for name in whole if "visual" in name}
    wanted = vision if loaded.has_encoder else set()
    wanted = wanted | (whole.keys() - vision if loaded.has_lm else set())
    assert own.keys() == wanted
    assert all(torch.equal(own[name], whole[name]) for name in own)
    shared = {"lm_head.weight"} & own.keys()  # tied to the embedding table, counted once
    assert loaded.weights_bytes == sum(own[name].nbytes for name in own.keys() - shared)


@pytest.mark.parametrize("stages", [(Stage.ENCODER,), LM, tuple(Stage)], ids=str)
def test_every_tensor_and_layer_of_a_start_is_reported(stages: tuple[Stage, ...]) -> None:
    steps: dict[str, list[tuple[int, int]]] = {}

    def report(step: str, done: int, total: int) -> None:
        steps.setdefault(step, []).append((done, total))

    loaded = load_model(SHAPES, stages, progress=report)
    assert list(steps) == ["reading weights", "packing weights"]
    read, packed = steps.values()
    assert [done for done, _ in read] == list(range(len(read)))
    assert {total for _, total in read} == {len(read)}
    assert packed == sorted(packed)
    assert len(packed) > loaded.packing.num_layers / 2  # joint layers are reported once
    assert all(0 <= done <= total for done, total in packed)
    assert packed[-1][0] > packed[-1][1] / 2


def test_the_half_that_is_not_loaded_fails_loudly() -> None:
    encoder = load_model(SHAPES, (Stage.ENCODER,)).model
    with pytest.raises(AssertionError, match="language_model is not loaded"):
        encoder.model.language_model(None)


def test_auto_is_the_type_of_the_checkpoint(model_dir: Path) -> None:
    assert load_model(model_dir, LM).dtype == torch.bfloat16
    edit(model_dir, lambda config: config.pop("dtype"))
    assert load_model(model_dir, LM).dtype == torch.bfloat16
    assert load_model(model_dir, LM, dtype="float32").dtype == torch.float32


def test_shards_are_read_as_one_checkpoint(model_dir: Path) -> None:
    tensors = load_file(model_dir / WEIGHTS)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, model_dir / file, {"format": "pt"})
    index = {name: file for file, part in shards.items() for name in part}
    (model_dir / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    (model_dir / WEIGHTS).unlink()
    assert len(open_checkpoint(model_dir).tensors) == len(names)
    whole, sharded = load_model(SHAPES, LM).model, load_model(model_dir, LM).model
    for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b)
    (model_dir / "b.safetensors").unlink()
    with pytest.raises(ModelConfigError, match=r"b\.safetensors: missing"):
        open_checkpoint(model_dir)


def edit(model_dir: Path, change: Callable[[dict], object]) -> None:
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def pickled(model_dir: Path) -> None:
    (model_dir / WEIGHTS).rename(model_dir / "pytorch_model.bin")


def cut_off(model_dir: Path) -> None:
    data = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(data[: len(data) // 2])


def without(name: str) -> Callable[[Path], None]:
    def damage(model_dir: Path) -> None:
        tensors = load_file(model_dir / WEIGHTS)
        del tensors[name]
        save_file(tensors, model_dir / WEIGHTS, {"format": "pt"})

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(shutil.rmtree, "no such directory; --model names", id="no directory"),
        pytest.param(
            lambda d: (d / "config.json").unlink(), r"config\.json: cannot be read", id="no config"
        ),
        pytest.param(
            lambda d: (d / "config.json").write_text("{"), "is not JSON", id="config is no JSON"
        ),
        pytest.param(
            lambda d: edit(d, lambda c: c.update(model_type="llama")),
            r"model_type is 'llama', .* use .*qwen2_5_vl.*docs/families\.md",
            id="another family",
        ),
        pytest.param(
            lambda d: edit(
                d, lambda c: c.update(model_type="internvl_chat", auto_map={"A": "x.Y"})
            ),
            r"'internvl_chat', which is not served; use the repository whose name ends in -HF",
            id="code in the model",
        ),
        pytest.param(
            lambda d: (d / WEIGHTS).unlink(), r"no \*\.safetensors; copy", id="no weights"
        ),
        pytest.param(pickled, r"pytorch_model\.bin: weights in pickle are never", id="pickle"),
        pytest.param(cut_off, r"cut off at \d+ of \d+ bytes", id="half a file"),
        pytest.param(
            lambda d: (d / WEIGHTS).write_bytes(b"\x08\0\0\0\0\0\0\0notjson!"),
            "no safetensors header",
            id="not safetensors",
        ),
        pytest.param(
            lambda d: (d / WEIGHTS).write_text(POINTER),
            rf"{WEIGHTS}: is a Git LFS pointer.*git lfs pull",
            id="LFS pointer",
        ),
        pytest.param(
            lambda d: (d / "config.json").write_text(POINTER),
            r"config\.json: is a Git LFS pointer",
            id="config is an LFS pointer",
        ),
        pytest.param(
            lambda d: (d / "config.json").write_text("[" * 100_000),
            r"config\.json: is not JSON",
            id="deep",
        ),
        pytest.param(
            lambda d: edit(d, lambda c: c["text_config"].update(hidden_act={})),
            "cannot be loaded: ",
            id="what transformers cannot read",
        ),
        pytest.param(
            lambda d: (d / WEIGHTS).write_bytes(b""), "no safetensors header", id="empty file"
        ),
        pytest.param(
            without("model.layers.3.mlp.up_proj.weight"),
            r"has no model\.language_model\.layers\.3\.mlp\.up_proj\.weight \(one of 1\)",
            id="a tensor is missing",
        ),
        pytest.param(
            lambda d: edit(d, lambda c: c["text_config"].update(intermediate_size=400)),
            r"does not fit config\.json .*mlp.* \(one of 15\)",
            id="another shape",
        ),
    ],
)
def test_an_unreadable_model_is_refused_with_path_and_fix(
    model_dir: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(model_dir)
    with pytest.raises(ModelConfigError, match=message) as caught:
        load_model(model_dir, LM)
    assert "config.json" in str(caught.value) or str(model_dir) in str(caught.value)


@pytest.mark.parametrize("stages", [(Stage.ENCODER,), LM, tuple(Stage)], ids=str)
def test_code_in_the_model_is_never_run(
    model_dir: Path, caplog: pytest.LogCaptureFixture, stages: tuple[Stage, ...]
) -> None:
    (model_dir / "modeling.py").write_text("raise SystemExit('run')")
    auto_map = {"AutoConfig": "modeling.A", "AutoModelForImageTextToText": "modeling.B"}
    edit(model_dir, lambda config: config.update(auto_map=auto_map))
    loaded = load_model(model_dir, stages)
    assert "auto_map names code that comes with the model; it is never run" in caplog.messages
    assert type(loaded.model).__module__.startswith("transformers.models.")


EXTRA = "model.language_model.layers.0.self_attn.q_norm.weight"


def add_tensor(model_dir: Path, name: str) -> None:
    tensors = load_file(model_dir / WEIGHTS)
    save_file({**tensors, name: torch.ones(4)}, model_dir / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("stages", [(Stage.ENCODER,), LM, tuple(Stage)], ids=str)
def test_code_of_a_model_that_uses_more_weights_is_refused(
    model_dir: Path, stages: tuple[Stage, ...]
) -> None:
    add_tensor(model_dir, EXTRA if Stage.DECODE in stages else "model.visual.merger.scale")
    load_model(model_dir, stages)
    edit(model_dir, lambda config: config.update(auto_map={"AutoConfig": "modeling.A"}))
    with pytest.raises(ModelConfigError, match=r"auto_map .* does not use .* \(one of 1 tensors\)"):
        load_model(model_dir, stages)


@pytest.mark.parametrize("part", [None, "text_config"])
@pytest.mark.parametrize(
    "method", ["awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors", "finegrained_fp8"]
)
def test_a_quantized_checkpoint_is_refused_naming_the_field(
    model_dir: Path, method: str, part: str | None
) -> None:
    def quantize(config: dict[str, Any]) -> None:
        fields = config if part is None else config[part]
        fields["quantization_config"] = {"quant_method": method, "bits": 4}

    edit(model_dir, quantize)
    with pytest.raises(
        ModelConfigError, match=rf"quantization_config: quant_method is '{method}'; .*bfloat16"
    ):
        load_model(model_dir, LM)


def test_a_half_needs_only_its_own_tensors(model_dir: Path) -> None:
    without("model.layers.3.mlp.up_proj.weight")(model_dir)
    load_model(model_dir, (Stage.ENCODER,))
    with pytest.raises(ModelConfigError):
        load_model(model_dir, tuple(Stage))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        pytest.param("tpu", "must be auto, cpu or cuda", id="unknown"),
        pytest.param("cuda:x", "must be auto, cpu or cuda", id="no number"),
        pytest.param("cuda:99", "torch finds .* CUDA devices here; give the pod", id="not there"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: str, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        load_model(SHAPES, LM, device=device)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("int4", "must be auto, float32"), ("float16", "float16 is not served on CPUs")],
)
def test_a_type_that_cannot_be_served_is_refused(dtype: str, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        load_model(SHAPES, LM, dtype=dtype)


def test_a_revision_names_the_content(model_dir: Path) -> None:
    original = open_checkpoint(SHAPES).revision()
    assert open_checkpoint(model_dir).revision() == original
    tensors = load_file(model_dir / WEIGHTS)
    tensors["model.norm.weight"][0] += 1
    with safe_open(SHAPES / WEIGHTS, "pt") as file:
        save_file(tensors, model_dir / WEIGHTS, file.metadata())
    assert open_checkpoint(model_dir).revision() != original
