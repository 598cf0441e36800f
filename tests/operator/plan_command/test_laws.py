"""Laws of `vlm plan` for any model of a family, any load and any node classes."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from plan_command.models import GEMMA3_4B, LLAVA_7B, QWEN_7B, qwen_7b, write
from vlm_cli.plan import capacity, manifest, report
from vlm_cli.plan.facts import ModelFacts
from vlm_cli.plan.fields import PlanError
from vlm_cli.plan.load import Load
from vlm_cli.plan.manifest import ScalesRef, Service
from vlm_cli.plan.model import read_model
from vlm_cli.plan.nodes import Node, read_nodes
from vlm_cli.plan.pool import MAX_KV_OCCUPANCY, MAX_UTILIZATION, PoolPlan, Traffic
from vlm_cli.plan.speed import Speed, parse_device
from vlm_cli.preview import children
from vlm_operator.api import parse
from vlm_operator.api.enums import KvDType
from vlm_operator.names import Role
from vlm_operator.observe import node_class
from vlm_operator.reconcile.decisions import Options
from vlm_operator.state import NodeClassState

SHARES = (0.45, 0.65)
GIB = 1 << 30
SCALES = ScalesRef("scales", "scales.json", "0f" * 32)


@functools.cache
def model(name: str) -> ModelFacts:
    if name == "qwen":
        return read_model(QWEN_7B)
    config = {"llava": {**LLAVA_7B, "torch_dtype": "bfloat16"}, "gemma": GEMMA3_4B}[name]
    with tempfile.TemporaryDirectory() as directory:
        return read_model(write(Path(directory), config))


MODELS = st.sampled_from(["qwen", "llava", "gemma"]).map(model)
STAGE_SETS = st.sampled_from(
    [(Role.DECODE,), (Role.PREFILL, Role.DECODE), (Role.ENCODER, Role.PREFILL, Role.DECODE)]
)
BY_PART = "layers=int8", "layers=int4"  # parts that every family rounds
WEIGHTS = st.sampled_from(["auto", "int8", "int4", *BY_PART])


@st.composite
def loads(draw: st.DrawFn) -> Load:
    sizes = st.tuples(st.integers(28, 2000), st.integers(28, 2000))
    return Load(
        rate=draw(st.floats(0.01, 50)),
        images=tuple(draw(st.lists(sizes, max_size=3))),
        image_share=draw(st.floats(0, 1)),
        low_detail=draw(st.booleans()),
        prompt_tokens=draw(st.integers(1, 500)),
        output_tokens=draw(st.integers(1, 500)),
        ttft_ms=draw(st.none() | st.integers(200, 5000)),
        itl_ms=draw(st.none() | st.integers(10, 200)),
    )


def class_manifest(name: str, **spec: Any) -> dict[str, Any]:
    return {"kind": "VLMNodeClass", "metadata": {"name": name}, "spec": spec}


def gpu(name: str, *, memory: str, price: str) -> dict[str, Any]:
    accelerator = {"resourceName": "nvidia.com/gpu", "count": 1, "memory": memory}
    return class_manifest(name, accelerator=accelerator, cost={"perHour": price})


CLASSES = [
    gpu("h100", memory="80Gi", price="3.00"),
    gpu("l40s", memory="48Gi", price="1.00"),
    class_manifest("cpu", cost={"perHour": "0.20"}, roles=["encoder"]),
]


MORE_CLASSES = [*CLASSES, class_manifest("large", cost={"perHour": "6.00"})]
"""With CPUs for all roles."""
SPEEDS = {"cpu": parse_device("2:60"), "large": parse_device("8:600:512Gi")}


def nodes(*, classes: list[dict[str, Any]] = CLASSES) -> tuple[Node, ...]:
    names = [item["metadata"]["name"] for item in classes]
    return read_nodes(classes, {name: SPEEDS[name] for name in names if name in SPEEDS})


def planned(
    facts: ModelFacts,
    load: Load,
    service: Service,
    *,
    classes: list[dict[str, Any]] = CLASSES,
) -> report.Plan:
    request = report.Request(
        facts=facts,
        nodes=nodes(classes=classes),
        load=load,
        service=service,
        shares=SHARES,
        network_gbit=10,
    )
    return report.plan(request)


@given(
    facts=MODELS, stages=STAGE_SETS, weights=WEIGHTS, sizes=st.tuples(*[st.integers(1, 200)] * 2)
)
def test_more_memory_never_gives_less_concurrency(facts, stages, weights, sizes):
    less, more = sorted(sizes)
    fits = []
    for size in (less, more):
        memory = capacity.device_memory(facts, stages, size * GIB, weights=weights)
        token_bytes = capacity.kv_token_bytes(facts, "bfloat16")
        fits.append(capacity.concurrency(memory.kv, 1000, token_bytes=token_bytes, block_size=16))
    assert fits[0] <= fits[1]


@given(facts=MODELS, stages=STAGE_SETS, weights=WEIGHTS, size=st.integers(1, 200))
def test_the_parts_never_exceed_the_device(facts, stages, weights, size):
    memory = capacity.device_memory(facts, stages, size * GIB, weights=weights)
    fixed = memory.runtime + memory.weights + memory.activations + memory.encoder_cache
    assert memory.missing or fixed + memory.kv <= memory.total
    assert not (memory.missing and memory.kv)


def test_a_cpu_refuses_int4_only_of_parts_that_it_loads():
    cpu = next(node for node in nodes() if node.name == "cpu")
    refusal = functools.partial(cpu.refusal, model("qwen"), (Role.ENCODER,), Role.ENCODER)
    assert refusal(weights="layers=int4") is None
    assert "needs a GPU" in (refusal(weights="merger=int4") or "")
    assert "needs a GPU" in (refusal(weights="int4") or "")


def test_a_gpu_refuses_scales_that_its_worker_would_refuse():
    refused = {
        node.name: node.refusal(
            model("qwen"), (Role.ENCODER,), Role.ENCODER, weights="encoder=int8", has_scales=True
        )
        for node in nodes()
    }
    assert refused["cpu"] is None
    assert all("refuses scales" in why for name, why in refused.items() if name != "cpu")
    assert len(refused) > 1


def test_a_service_with_scales_is_planned_again_with_them():
    service = Service("a", "pvc://a", weights="encoder=int8,merger=int8", scales=SCALES)
    load = Load(
        rate=1.0, images=(), image_share=0.0, low_detail=False, prompt_tokens=50,
        output_tokens=50, ttft_ms=None, itl_ms=None,
    )  # fmt: skip
    candidate = planned(model("qwen"), load, Service("a", "pvc://a")).choice.recommended
    found = manifest.build(service, load, candidate)
    meta = {**found["metadata"], "namespace": "ns", "uid": "u", "generation": 1}
    weights = parse({**found, "metadata": meta}).spec.model.weights
    assert weights is not None
    assert weights.activation_scales is not None
    assert weights.activation_scales.sha256 == SCALES.sha256
    assert manifest.read_input("m", found) == (service, load)


LOAD = Load(
    rate=1.0, images=((640, 480),), image_share=0.5, low_detail=False, prompt_tokens=50,
    output_tokens=50, ttft_ms=None, itl_ms=None,
)  # fmt: skip


@pytest.mark.parametrize("kind", KvDType)
def test_each_kv_type_of_the_api_is_read_planned_and_written(kind: KvDType):
    candidate = planned(model("qwen"), LOAD, Service("a", "pvc://a")).choice.recommended
    written = manifest.build(Service("a", "pvc://a"), LOAD, candidate)
    written["spec"]["model"]["kvCacheDtype"] = kind.value
    service, load = manifest.read_input("m", written)
    assert (service.kv_dtype, load) == (kind.flag, LOAD)
    again = planned(model("qwen"), load, service, classes=MORE_CLASSES).manifest
    expected = {} if kind is KvDType.AUTO else {"kvCacheDtype": kind.value}
    assert {k: v for k, v in again["spec"]["model"].items() if k == "kvCacheDtype"} == expected
    meta = {**again["metadata"], "namespace": "ns", "uid": "u", "generation": 1}
    assert parse({**again, "metadata": meta}).spec.model.kv_cache_dtype is kind


def test_a_node_refuses_a_kv_type_that_its_worker_would_refuse():
    every = (Role.ENCODER, Role.PREFILL, Role.DECODE)
    refused = {
        (node.has_accelerator, kind.flag)
        for node in nodes(classes=MORE_CLASSES)
        for kind in KvDType
        if "--kv-dtype"
        in (
            node.refusal(model("qwen"), every, Role.DECODE, weights="auto", kv_dtype=kind.flag)
            or ""
        )
    }
    assert refused == {(False, "fp8"), *((True, mixed) for mixed in capacity.MIXED_KV)}


@pytest.mark.parametrize("kv_dtype", capacity.MIXED_KV)
@given(facts=MODELS, share=st.floats(0, 1))
def test_kv_of_two_types_has_the_bytes_of_its_tokens(kv_dtype, facts, share):
    none, one = (capacity.kv_token_bytes(facts, kv_dtype, edge) for edge in (0.0, 1.0))
    mean = share * one + (1 - share) * none
    assert mean <= capacity.kv_token_bytes(facts, kv_dtype, share) + 1e-6 < mean + 1.001
    assert capacity.kv_read_bytes(facts, kv_dtype, 10, share) <= 10 * max(none, one)


@pytest.mark.parametrize("weights", ["auto", "int8", "int4", "layers=int4"])
def test_scales_without_a_part_in_int8_are_refused(weights):
    with pytest.raises(PlanError, match=r"--weights: .*activationScales needs types by part"):
        Service("a", "pvc://a", weights=weights, scales=SCALES).check()


@given(facts=MODELS, kv_gib=st.integers(1, 100), num_tokens=st.integers(1, 4000))
def test_int8_kv_nearly_doubles_concurrency(facts, kv_gib, num_tokens):
    """Not quite: each key and value of a head has a scale of 4 bytes, 3 % for heads of 128."""
    wide = capacity.kv_token_bytes(facts, "bfloat16")
    narrow = capacity.kv_token_bytes(facts, "int8")
    gain = 2 * facts.head_dim / (facts.head_dim + 4)
    assert wide / narrow == gain
    fits = [
        capacity.concurrency(kv_gib * GIB, num_tokens, token_bytes=size, block_size=16)
        for size in (wide, narrow)
    ]
    assert fits[1] >= math.floor(gain * fits[0])
    assert fits[1] <= math.ceil(gain * (fits[0] + 2))


@given(facts=MODELS, weights=WEIGHTS)
def test_the_halves_of_a_model_are_the_whole(facts, weights):
    encoder, language = (Role.ENCODER,), (Role.PREFILL, Role.DECODE)
    halves = [capacity.weights_bytes(facts, stages, weights) for stages in (encoder, language)]
    assert sum(halves) == capacity.weights_bytes(facts, (*encoder, *language), weights)
    if weights == "auto":
        assert sum(halves) == facts.num_parameters * facts.item_bytes


@given(facts=MODELS, load=loads(), name=st.sampled_from(["h100", "l40s"]))
def test_more_pods_are_never_busier_nor_slower(facts, load, name):
    node = next(node for node in nodes() if node.name == name)
    stages = (Role.ENCODER, Role.PREFILL, Role.DECODE)
    numbers = Service("a", "pvc://a").numbers("bfloat16")
    speed = Speed(node.device, *SHARES)
    traffic = Traffic(1e6, 1e7, 1e9)
    pool = PoolPlan(Role.DECODE, stages, node, speed, facts, load, numbers, 16, traffic)
    few, many = pool.state(3), pool.state(4)
    assert many.utilization <= few.utilization
    assert many.num_running <= few.num_running or math.isinf(few.num_running)
    assert many.itl <= few.itl
    fewest = pool.fewest()
    if fewest.problem is None and fewest.replicas > 1:
        assert pool.state(fewest.replicas - 1).problem is not None


@given(facts=MODELS, load=loads())
def test_a_recommended_plan_meets_goals_and_targets(facts, load):
    choice = planned(facts, load, Service("a", "pvc://a")).choice
    assert choice is not None
    best = choice.recommended
    if best is None:
        assert all(one.problem for one in choice.candidates)
        assert len(choice.reasons) == len(choice.candidates)
        return
    assert load.ttft_ms is None or best.ttft * 1000 <= load.ttft_ms
    assert load.itl_ms is None or best.itl * 1000 <= load.itl_ms
    for _, state in best.pools.values():
        assert state.utilization <= MAX_UTILIZATION
        assert state.kv_occupancy <= MAX_KV_OCCUPANCY
        assert state.network <= MAX_UTILIZATION
        assert state.num_running <= capacity.STEP_ROWS
    simpler = [
        one.cost
        for one in choice.candidates
        if one.problem is None and len(one.pools) < len(best.pools)
    ]
    assert all(best.cost <= cost * 2 / 3 + 1e-9 for cost in simpler)


@given(
    facts=MODELS,
    load=loads(),
    kv_dtype=st.sampled_from([kind.flag for kind in KvDType]),
    weights=WEIGHTS,
)
def test_a_manifest_is_accepted_and_plans_to_itself(facts, load, kv_dtype, weights):
    before = Service("a", "hf://org/model", "main", None, kv_dtype, weights)
    assume("int4" not in weights or kv_dtype not in capacity.MIXED_KV)  # GPUs, and CPUs alone
    first = planned(facts, load, before, classes=MORE_CLASSES)
    if first.manifest is None:
        return
    text = yaml.safe_dump(first.manifest)
    read = yaml.safe_load(text)
    meta = {**read["metadata"], "namespace": "ns", "uid": "u", "generation": 1}
    service = parse({**read, "metadata": meta})
    states: dict[str, NodeClassState] = {
        item["metadata"]["name"]: node_class(item) for item in MORE_CLASSES
    }
    objects = children(service, states, Options())
    assert "block-size" in json.dumps(objects)
    for role in first.choice.recommended.pools:
        pool, state = first.choice.recommended.pools[role]
        planned_pool = service.spec.pools.of(role)
        assert planned_pool.scaling.replicas == state.replicas
        if pool.stages != (Role.ENCODER,):
            assert f'"--block-size={pool.block_size}"' in json.dumps(objects)
    again, load_again = manifest.read_input("m", read)
    assert (again, load_again) == (before, load)
    assert planned(facts, load_again, again, classes=MORE_CLASSES).manifest == first.manifest


@given(facts=MODELS, load=loads())
def test_a_class_that_costs_less_never_makes_the_plan_dearer(facts, load):
    def cost(price: str) -> float:
        classes = [CLASSES[0], gpu("l40s", memory="48Gi", price=price)]
        request = report.Request(
            facts=facts,
            nodes=nodes_of(classes),
            load=load,
            service=Service("a", "pvc://a"),
            shares=SHARES,
            network_gbit=10,
        )
        choice = report.plan(request).choice
        assert choice is not None
        return min((one.cost for one in choice.candidates if one.problem is None), default=math.inf)

    assert cost("0.80") <= cost("1.00") + 1e-9


def nodes_of(classes: list[dict[str, Any]]) -> tuple[Node, ...]:
    return read_nodes(classes, {})


def test_a_number_type_replaces_that_of_the_checkpoint():
    facts = read_model(QWEN_7B, dtype="float32")
    half = model("qwen")
    assert dataclasses.replace(facts, dtype="bfloat16") == half
    assert capacity.kv_token_bytes(facts, "float32") == 2 * capacity.kv_token_bytes(
        half, "bfloat16"
    )


def test_a_config_without_a_shared_table_has_a_larger_head():
    with tempfile.TemporaryDirectory() as directory:
        tied = read_model(write(Path(directory), qwen_7b(tie_word_embeddings=True)))
    own = model("qwen")
    assert own.num_parameters - tied.num_parameters == own.vocab_size * own.hidden_size
