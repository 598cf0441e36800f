"""Weights of int8 and int4 on a GPU: which layers are rounded, what they hold, and answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from worker.checkpoints import make_checkpoint

from vlm_kernels import gpu
from vlm_kernels.quantised_linear import dequantised
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.model.gpu.layers import QuantisedLinear, quantise_linears
from vlm_worker.model.loader import LoadedModel, load_model
from vlm_worker.types import Stage


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("quantised") / "model", "llava")


def loaded(model_dir: Path, weights: str, device: torch.device) -> LoadedModel:
    return load_model(
        model_dir, (Stage.DECODE,), dtype="float32", device=str(device), packed_weights=False,
        weights=weights,
    )  # fmt: skip


@pytest.mark.parametrize(("weights", "num_int8"), [("int8", 12), ("int4", 0)])
def test_the_layers_that_a_family_names_are_rounded(
    weights: str, num_int8: int, model_dir: Path, device: torch.device
) -> None:
    plain, rounded = (loaded(model_dir, kind, device) for kind in ("auto", weights))
    packing = rounded.packing
    assert (packing.num_layers, packing.num_int8_layers) == (12, num_int8)
    assert plain.weights_bytes - rounded.weights_bytes == packing.saved_bytes > 0
    model = rounded.model
    assert isinstance(model.lm_head, nn.Linear), "LLaVA's head is not to be rounded"
    before = dict(plain.model.get_decoder().named_modules())
    for name, after in model.get_decoder().named_modules():
        if isinstance(after, QuantisedLinear):
            x = torch.randn(3, 5, after.in_features, device=device)
            exact = nn.functional.linear(x, dequantised(after.weights), after.bias)
            torch.testing.assert_close(after(x), exact, atol=1e-4, rtol=1e-4)
            far = (dequantised(after.weights) - before[name].weight).abs().max()
            assert 0 < far <= before[name].weight.abs().max() / (254 if num_int8 else 14) * 1.001


def test_each_part_has_its_own_type(tmp_path: Path, device: torch.device) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "qwen2_5_vl")
    found = load_model(
        model_dir, tuple(Stage), dtype="float32", device=str(device), packed_weights=False,
        weights="encoder=int8,layers=int4",
    )  # fmt: skip
    model, packing = found.model, found.packing
    kinds: dict[str, set[str]] = {"encoder": set(), "merger": set(), "layers": set()}
    for name, module in model.model.named_modules():
        tower = "merger" if name.startswith("visual.merger") else "encoder"
        part = tower if name.startswith("visual") else "layers"
        if isinstance(module, QuantisedLinear):
            # of inputs that no group divides, int4 keeps eight bits
            fits = module.in_features % 32 == 0
            kinds[part].add("int4" if module.weights.is_int4 or not fits else "int8")
        elif isinstance(module, nn.Linear):
            kinds[part].add("exact")
    assert kinds == {"encoder": {"int8"}, "merger": {"exact"}, "layers": {"int4"}}
    assert isinstance(model.lm_head, nn.Linear)
    rounded = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert packing.num_layers == len(rounded)


def test_inputs_that_no_group_divides_stay_at_eight_bits(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(48, 8, device=device), nn.Linear(64, 8, device=device))
    packing = quantise_linears(model, [model], weights="int4")
    assert [part.weights.is_int4 for part in model] == [False, True]
    assert packing.num_int8_layers == 1


def test_a_head_that_is_the_table_of_embeddings_stays(device: torch.device) -> None:
    model = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 8)).to(device)
    model[1].weight = model[0].weight
    assert quantise_linears(model, [model], weights="int8").num_layers == 0


def test_int4_without_its_kernel_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "serves", lambda device: False)
    with pytest.raises(ModelConfigError, match="--weights=int4 needs a GPU, triton and a C comp"):
        loaded(model_dir, "int4", torch.device("cpu"))
