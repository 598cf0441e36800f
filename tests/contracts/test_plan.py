"""`vlm plan` computes what the worker does: visual tokens, parameters, KV, memory of a step.

The planner shares no Python with the worker, so it has the formulas a second time.
"""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from worker.checkpoints import make_processor

from vlm_cli.plan import capacity, facts
from vlm_cli.plan.facts import ModelFacts
from vlm_cli.plan.fields import PlanError
from vlm_cli.plan.images import LARGE_SIDE
from vlm_cli.plan.model import families, read_model
from vlm_cli.plan.topology import STAGES
from vlm_kernels.quantised_linear import GROUPS, quantise_weights
from vlm_operator.api import topology
from vlm_operator.api.pool import Pools, stages
from vlm_operator.names import Role
from vlm_worker import weights as weights_of_worker
from vlm_worker.core.families import FAMILIES, Family, load_family
from vlm_worker.core.families.family import LOW_DETAIL_PIXELS
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.engine.settings import MAX_ENCODE_TOKENS
from vlm_worker.errors import InvalidRequestError
from vlm_worker.model.memory import (
    DEFAULT_PERCENT,
    WorkSizes,
    device_work_bytes,
    encode_bytes,
    make_kv_layout,
    num_kv_blocks,
    step_bytes,
)
from vlm_worker.settings import EncoderCacheSettings, WorkerSettings
from vlm_worker.types import EmbedLayout, Stage

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "examples" / "plan" / "qwen2.5-vl-7b"
SIDES = st.integers(1, 20_000)


@dataclasses.dataclass(frozen=True)
class Both:
    """One model as the worker and as the planner see it; `module` has no data."""

    family: Family
    facts: ModelFacts
    module: Any


_CACHE: dict[str, Both] = {}


def of(model_type: str, directory: Path) -> Both:
    if model_type not in _CACHE:
        path = directory / model_type
        make_processor(path, model_type)
        _CACHE[model_type] = read(path)
    return _CACHE[model_type]


def read(path: Path) -> Both:
    family = load_family(path)
    model_class = getattr(importlib.import_module(family.spec.module), family.spec.model_class)
    config = model_class.config_class.from_dict(json.loads((path / "config.json").read_text()))
    with torch.device("meta"):
        module = model_class(config)
    return Both(family, read_model(path, dtype="bfloat16"), module)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return of(request.param, tmp_path_factory.mktemp("models"))


def test_both_have_the_same_families():
    assert list(families()) == sorted(FAMILIES)


@given(width=SIDES, height=SIDES, low=st.booleans())
def test_an_image_has_the_visual_tokens_that_the_gateway_counts(both, width, height, low):
    cap = both.family.max_pixels_of("low" if low else "auto")
    try:
        real = both.family.geometry(height, width, max_pixels=cap)
    except InvalidRequestError:
        with pytest.raises(PlanError):
            both.facts.sizing.count(width, height, low_detail=low)
        return
    planned = both.facts.sizing.count(width, height, low_detail=low)
    assert (planned.height, planned.width) == (real.height, real.width)
    assert planned.num_tokens == real.num_tokens
    assert planned.num_patches == real.grid_thw[1] * real.grid_thw[2]


@given(width=st.integers(28, 9000), height=st.integers(28, 9000))
def test_the_published_shape_has_the_same_visual_tokens(width, height):
    family, facts = load_family(PUBLISHED), read_model(PUBLISHED)
    if max(width, height) <= 200 * min(width, height):
        found = facts.sizing.count(width, height).num_tokens
        assert found == family.geometry(height, width).num_tokens


def children(both: Both, names: tuple[str, ...]) -> list[nn.Module]:
    return [getattr(both.module.model, name) for name in names]


def num_parameters(modules: list[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def test_each_stage_has_the_parameters_of_transformers_modules(both: Both):
    facts, spec = both.facts, both.family.spec
    encoder = num_parameters(children(both, spec.encoder_children))
    assert facts.encoder.num_parameters + facts.projector.num_parameters == encoder
    language = num_parameters(children(both, spec.lm_children))
    assert facts.layers.num_parameters + facts.table.num_parameters == language
    assert facts.num_parameters == sum(p.numel() for p in set(both.module.parameters()))


def test_the_published_shape_has_its_published_parameters():
    both = read(PUBLISHED)
    assert both.facts.num_parameters == 8_292_166_656
    assert both.facts.num_parameters == sum(p.numel() for p in set(both.module.parameters()))


def rounded_bytes(linear: nn.Linear, weights: str) -> int:
    """Bytes of a layer's codes and scales, from the worker's own rounding."""
    groups = [size for size in GROUPS if linear.in_features % size == 0]
    group = max(groups, default=None) if weights == "int4" else None
    matrix = torch.zeros(linear.weight.shape, dtype=torch.bfloat16)
    found = quantise_weights(matrix, group=group)
    return found.codes.nbytes + found.scales.nbytes


def linears_of(both: Both, part: str) -> set[nn.Module]:
    spec = both.family.spec
    merger = set(both.module.model.get_submodule(spec.merger).modules())
    tower = {m for child in children(both, spec.encoder_children) for m in child.modules()}
    modules = {
        "encoder": tower - merger,
        "merger": merger,
        "layers": {m for child in children(both, spec.lm_children) for m in child.modules()},
        "head": set() if both.facts.is_head_tied else {both.module.lm_head},
    }
    return {module for module in modules[part] if type(module) is nn.Linear}


def test_planner_and_worker_know_the_same_parts_and_types(both: Both):
    assert (facts.PARTS, facts.WEIGHT_TYPES) == (weights_of_worker.PARTS, weights_of_worker.TYPES)
    assert both.facts.rounded == both.family.spec.int8


@given(
    st.dictionaries(
        st.sampled_from((*facts.PARTS, "tower")), st.sampled_from((*facts.WEIGHT_TYPES, "int3"))
    )
    .map(lambda types: ",".join(f"{part}={kind}" for part, kind in types.items()))
    .map(lambda text: text or "int8")
    | st.text(max_size=12)
)
def test_planner_and_worker_understand_the_same_values(text: str):
    try:
        canonical = weights_of_worker.canonical(text)
    except ValueError:
        with pytest.raises(PlanError):
            facts.check_weights(text)
        return
    facts.check_weights(text)
    assert {part: facts.type_of(part, text) for part in facts.PARTS} == {
        part: facts.type_of(part, canonical) for part in facts.PARTS
    }


@pytest.mark.parametrize(
    "weights",
    ["int8", "int4", "encoder=int8", "merger=int4", "encoder=int8,layers=int4", "head=int8"],
)
def test_rounded_weights_have_the_workers_bytes(both: Both, weights: str):
    spec = both.family.spec
    try:
        types = weights_of_worker.rounded_types(weights, spec.int8)
    except ValueError:
        with pytest.raises(PlanError, match="alone; remove"):
            both.facts.check_rounded(weights)
        return
    both.facts.check_rounded(weights)
    saved = sum(
        2 * linear.weight.numel() - rounded_bytes(linear, kind)
        for part, kind in types.items()
        for linear in linears_of(both, part)
    )
    exact = sum(2 * p.numel() for p in set(both.module.parameters()))
    assert capacity.weights_bytes(both.facts, tuple(Role), weights) == exact - saved


@pytest.mark.parametrize("modality", ["vision", "text"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_kv_of_one_modality_in_int8_has_the_workers_bytes_per_token(
    both: Both, modality: str, dtype: str
):
    planned = capacity.mixed_kv_token_bytes(dataclasses.replace(both.facts, dtype=dtype))
    text, wide = both.module.config.get_text_config(), getattr(torch, dtype)

    def layout():
        kind = f"{modality}=int8"
        return make_kv_layout(text, "r", dtype=wide, kv_dtype=kind, block_size=16)

    if planned is None:
        with pytest.raises(ModelConfigError, match="not built beside float16"):
            layout()
        return
    narrow, other = planned
    assert (narrow * 16, other) == (layout().block_bytes, layout().token_bytes)
    facts = dataclasses.replace(both.facts, dtype=dtype)
    kinds = [capacity.kv_token_bytes(facts, f"{modality}=int8", share) for share in (0.0, 1.0)]
    assert kinds == ([narrow, other] if modality == "text" else [other, narrow])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_visual_kv_in_4_bits_has_the_workers_bytes_per_token(both: Both, dtype: str):
    planned = capacity.kivi4_token_bytes(dataclasses.replace(both.facts, dtype=dtype))
    text, wide = both.module.config.get_text_config(), getattr(torch, dtype)

    def layout():
        return make_kv_layout(text, "r", dtype=wide, kv_dtype="vision=kivi4", block_size=32)

    if planned is None:
        with pytest.raises(ModelConfigError, match="not built beside float16"):
            layout()
        return
    narrow, other = planned
    assert (narrow * 32, other) == (layout().block_bytes, layout().token_bytes)
    facts = dataclasses.replace(both.facts, dtype=dtype)
    kinds = [capacity.kv_token_bytes(facts, "vision=kivi4", share) for share in (0.0, 1.0)]
    assert kinds == [other, narrow]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8", "fp8"])
def test_kv_and_embeddings_have_the_workers_bytes_per_token(both: Both, kv_dtype: str):
    text = both.module.config.get_text_config()
    layout = make_kv_layout(text, "r", dtype=torch.bfloat16, kv_dtype=kv_dtype, block_size=16)
    assert capacity.kv_token_bytes(both.facts, kv_dtype) == layout.token_bytes
    handoff = capacity.handoff_bytes(both.facts, kv_dtype, 33, block_size=16)
    assert handoff == 3 * layout.block_bytes
    rows = EmbedLayout("r", both.family.hidden_size, 0, "bfloat16")
    assert capacity.embedding_bytes(both.facts, 7) == 7 * rows.row_bytes


def test_activations_are_the_workers_estimate(both: Both):
    config = both.module.config
    step = step_bytes(
        config.get_text_config(),
        num_tokens=capacity.STEP_TOKENS,
        num_rows=capacity.STEP_ROWS,
        element_bytes=2,
    )
    encode = encode_bytes(
        config.vision_config, both.family, num_tokens=MAX_ENCODE_TOKENS, element_bytes=2
    )
    assert capacity.activation_bytes(both.facts, (Role.DECODE,)) == step
    assert capacity.activation_bytes(both.facts, (Role.ENCODER,)) == encode
    assert capacity.activation_bytes(both.facts, tuple(Role)) == step + encode


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("extra", [1 << 30, 3 << 30, 40 << 30])
def test_the_kv_of_a_device_is_what_the_worker_chooses(
    both: Both, name: str, extra: int, monkeypatch: pytest.MonkeyPatch
):
    sizes = WorkSizes(
        num_tokens=capacity.STEP_TOKENS,
        num_rows=capacity.STEP_ROWS,
        num_visual_tokens=MAX_ENCODE_TOKENS,
        embedding_cache_bytes=capacity.ENCODER_CACHE_BYTES,
    )
    config = both.module.config
    for roles in STAGES[name].values():
        own = {Stage(role.value) for role in roles}
        if own == {Stage.ENCODER}:
            continue
        work = device_work_bytes(config, both.family, own, sizes, element_bytes=2)
        loaded = capacity.weights_bytes(both.facts, roles, "auto")
        total = capacity.RUNTIME_BYTES + loaded + work + extra
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, n=work + extra: (n, n))
        layout = make_kv_layout(
            config.get_text_config(), "r", dtype=torch.bfloat16, kv_dtype="auto", block_size=16
        )
        blocks = num_kv_blocks(layout, torch.device("cuda"), work_bytes=work)
        planned = capacity.device_memory(both.facts, roles, total, weights="auto").kv
        assert abs(planned - blocks * layout.block_bytes) < max(1 << 20, layout.block_bytes)


def test_constants_are_the_workers_defaults():
    defaults = {field.name: field.default for field in dataclasses.fields(WorkerSettings)}
    assert defaults["max_batched_tokens"] == capacity.STEP_TOKENS == MAX_ENCODE_TOKENS
    assert defaults["max_requests"] == capacity.STEP_ROWS
    assert EncoderCacheSettings().embedding_cache_bytes == capacity.ENCODER_CACHE_BYTES
    assert DEFAULT_PERCENT["cuda"] == capacity.KV_PERCENT
    assert set(GROUPS) == set(capacity.INT4_GROUPS)
    assert LARGE_SIDE == 1 << 14
    assert LOW_DETAIL_PIXELS == 512 * 512


def test_stages_of_pods_are_the_operators():
    for name, roles in STAGES.items():
        pool = {"scaling": {"mode": "Manual", "replicas": 1}}
        pools = Pools.model_validate({role.value: pool for role in roles})
        assert topology(pools) == name
        assert {role: stages(pools, role) for role in pools.present} == roles
