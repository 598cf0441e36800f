"""`vlm plan` from files, from a cluster, and from its own manifests; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from plan_command.models import GEMMA3_4B, LLAVA_7B, NODES, QWEN_7B, qwen_7b, with_text, write
from vlm_cli.offline import read_documents, render
from vlm_cli.output import CliError, Format
from vlm_cli.plan.command import plan

LOAD: dict[str, Any] = {
    "rate": 4.0,
    "image": ["1280x720"],
    "prompt_tokens": 200,
    "output_tokens": 200,
    "ttft_ms": 1500,
    "itl_ms": 50,
}


async def data(capsys: pytest.CaptureFixture[str], *args: Any, **options: Any) -> dict[str, Any]:
    options.setdefault("nodes", [NODES])
    await plan(*args, output=Format.JSON, **options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


async def refusal(*args: Any, **options: Any) -> str:
    options.setdefault("nodes", [NODES])
    with pytest.raises(CliError) as refused:
        await plan(*args, **options)
    return refused.value.problem


async def test_without_a_load_the_report_has_no_pools(capsys):
    found = await data(capsys, QWEN_7B)
    assert found["recommended"] is None
    assert found["manifest"] is None
    assert found["model"]["kvPerToken"] == {"value": 57344, "unit": "B"}
    assert not {"pools", "topologies", "transfers"} & found.keys()


async def test_a_load_gives_pools_reasons_cost_and_a_manifest(capsys):
    found = await data(capsys, QWEN_7B, **LOAD)
    assert found["recommended"] == "PrefillDecode"
    assert {row["pool"]: row["class"] for row in found["pools"]} == {
        "prefill": "l40s",
        "decode": "l40s",
    }
    assert "PrefillDecode costs 33% less than Decode." in found["reasons"]
    assert found["transfers"]["eToPBytes"]["value"] == 1196 * 3584 * 2
    assert set(found["manifest"]["spec"]["pools"]) == {"prefill", "decode"}


async def test_light_traffic_needs_no_separate_pools(capsys):
    found = await data(capsys, QWEN_7B, **{**LOAD, "rate": 0.5})
    assert found["recommended"] == "Decode"
    assert found["reasons"][0].startswith("Monolithic serving is enough")


def figures(value: Any) -> list[dict[str, Any]]:
    """Every number of a report."""
    if isinstance(value, dict):
        if "unit" in value:
            return [value]
        return [figure for item in value.values() for figure in figures(item)]
    return [figure for item in value for figure in figures(item)] if isinstance(value, list) else []


async def test_every_number_has_its_unit_and_with_explain_its_formula(capsys):
    found = await data(capsys, QWEN_7B, explain=True, **LOAD)
    found.pop("manifest")
    numbers = figures(found)
    assert len(numbers) > 100
    assert all(number["formula"] for number in numbers)
    ratios = [number for number in numbers if not number["unit"]]
    assert ratios == [found["transfers"]["pToDPerEToP"]]
    assert figures(await data(capsys, QWEN_7B, **LOAD)) == [
        {name: number[name] for name in ("value", "unit")} for number in numbers
    ]


async def test_a_manifest_renders_and_plans_to_itself(tmp_path: Path, capsys):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    await plan(
        QWEN_7B, nodes=[NODES], name="demo", uri="hf://org/name", revision="main",
        kv_dtype="int8", weights="int8", write=first, **LOAD,
    )  # fmt: skip
    await plan(QWEN_7B, nodes=[NODES], again=first, write=second)
    assert first.read_text() == second.read_text()
    both = tmp_path / "both.yaml"
    classes = [path.read_text() for path in sorted(NODES.glob("*.yaml"))]
    both.write_text("---\n".join([first.read_text(), *classes]))
    service = read_documents(both).service
    assert service.spec.model.to_dict()["kvCacheDtype"] == "Int8"
    assert service.spec.pools.decode.engine.extra_args == ["--weights=int8"]
    capsys.readouterr()
    await render(both)
    kinds = [item["kind"] for item in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds.count("Deployment") == 1 + len(service.spec.pools.present)  # and the gateway


async def test_weights_by_part_are_in_the_model_of_a_manifest(tmp_path: Path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    weights = "layers=int8,merger=auto,encoder=int8"
    await plan(QWEN_7B, nodes=[NODES], weights=weights, write=first, **LOAD)
    await plan(QWEN_7B, nodes=[NODES], again=first, write=second)
    assert first.read_text() == second.read_text()
    spec = yaml.safe_load(first.read_text())["spec"]
    assert spec["model"]["weights"] == {"encoder": "Int8", "layers": "Int8"}
    assert all("engine" not in pool for pool in spec["pools"].values())


async def test_flags_replace_what_a_manifest_says(tmp_path: Path, capsys):
    path = tmp_path / "plan.yaml"
    await plan(QWEN_7B, nodes=[NODES], write=path, **LOAD)
    capsys.readouterr()
    found = await data(capsys, QWEN_7B, again=path, rate=0.5, name="other")
    assert found["manifest"]["metadata"]["name"] == "other"
    (text,) = found["manifest"]["metadata"]["annotations"].values()
    assert json.loads(text)["requestsPerSecond"] == 0.5
    assert json.loads(text)["images"] == ["1280x720"]


async def test_limits_grow_with_the_load(capsys):
    found = await data(capsys, QWEN_7B, rate=0.1, image=["5000x5000"] + ["100x100"] * 5)
    limits = found["manifest"]["spec"]["model"]["limits"]
    assert limits == {"imagesPerRequest": 6, "pixelsPerImage": 25_000_000}


async def test_node_classes_come_from_the_cluster(api, kubeconfig, capsys):
    for path in NODES.glob("*.yaml"):
        item = yaml.safe_load(path.read_text())
        api.add("/apis/triptych.dev/v1alpha1/vlmnodeclasses", item)
    found = await data(capsys, QWEN_7B, nodes=None, kubeconfig=kubeconfig, **LOAD)
    assert {row["class"] for row in found["concurrency"]} == {"h100", "l40s"}


async def test_the_price_of_lending_is_the_decoder_and_its_kv_on_each_encoder_pod(capsys):
    found = await data(capsys, QWEN_7B)
    weights = {row["stages"]: row["weights"]["value"] for row in found["weights"]}
    whole = {row["class"]: row for row in found["concurrency"] if row["pod"] == "all stages"}
    assert len(found["lending"]) == len(whole) == 2
    for row in found["lending"]:
        decoder = weights["encoder, prefill, decode"] - weights["encoder"]
        assert row["decoderWeights"]["value"] == decoder
        assert 0.33 < row["kv"]["value"] / whole[row["class"]]["kv"]["value"] < 0.36


async def test_goals_that_nothing_meets_end_with_an_error_and_the_table(capsys):
    problem = await refusal(QWEN_7B, **{**LOAD, "ttft_ms": 15})
    assert problem == "no topology of these node classes meets the goals"
    assert "without any wait, goal 15 ms" in capsys.readouterr().out


async def test_a_table_has_a_formula_below_each_column_with_explain(capsys):
    await plan(QWEN_7B, nodes=[NODES], explain=True)
    lines = capsys.readouterr().out.splitlines()
    assert any("KV per token" in line and "2 · 28 layers · 4 KV heads" in line for line in lines)
    assert any(line.startswith("  REQUESTS = whole blocks of 16 tokens") for line in lines)


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (without(qwen_7b(), "model_type"), "model_type is missing"),
        ({**qwen_7b(), "model_type": "gpt2"}, "model_type is 'gpt2'; planned are gemma3, llava"),
        (with_text(qwen_7b(), num_key_value_heads=None), "num_key_value_heads is missing"),
        (with_text(qwen_7b(), num_key_value_heads=5), "num_key_value_heads is 5: 28 heads do not"),
        (with_text(qwen_7b(), vocab_size="many"), "vocab_size must be an integer of at least 1"),
        (without(qwen_7b(), "torch_dtype"), "dtype is missing; give --dtype"),
        ({**qwen_7b(), "torch_dtype": "float8"}, "torch_dtype is 'float8'; planned are float32"),
        (
            {**qwen_7b(), "quantization_config": {"quant_method": "awq"}},
            "quantization_config has quant_method 'awq'; the worker refuses",
        ),
        ({**GEMMA3_4B, "mm_tokens_per_image": 255}, "mm_tokens_per_image is 255: 64 patches"),
        (with_text(LLAVA_7B, model_type="mistral"), "text_config: model_type is 'mistral'"),
        (
            {**LLAVA_7B, "vision_config": {"model_type": "clip_vision_model"}},
            "vision_config: hidden_size is missing",
        ),
    ],
)
async def test_a_field_of_a_config_is_named_with_its_file(tmp_path: Path, config, said: str):
    problem = await refusal(write(tmp_path / "m", config))
    assert problem.startswith(str(tmp_path / "m" / "config.json"))
    assert said in problem


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": 0.0}, "--rate: must be above 0"),
        ({"rate": float("nan")}, "--rate: must be above 0"),
        ({"rate": 1.0, "image": ["big"]}, "--image: 'big' is no size; write WIDTHxHEIGHT"),
        ({"rate": 1.0, "image": ["3000x10"]}, "one side may be at most 200 times the other"),
        ({"rate": 1.0, "image": ["9x9"] * 65}, "a request has at most 64"),
        ({"rate": 1.0, "image_share": 1.5}, "--image-share: is 1.5"),
        ({"rate": 1.0, "detail": "tiny"}, "--detail: is 'tiny'; there are auto, low"),
        ({"rate": 1.0, "prompt_tokens": 128_000}, "max_position_embeddings of "),
        ({"kv_dtype": "fp16"}, "--kv-dtype: is 'fp16'; there are auto"),
        ({"weights": "int2"}, "--weights: is 'int2'"),
        ({"weights": "tower=int8"}, "for each of encoder, merger, layers, head"),
        ({"weights": "head=fp8"}, "--weights: is 'head=fp8'"),
        ({"weights": "head=int8,head=int8"}, "--weights: is 'head=int8,head=int8'"),
        ({"device": ["h100"]}, "--device: 'h100' names no class"),
        ({"device": ["h100=abacus"]}, "--device: 'abacus' is unknown; write TFLOPS:GBPS"),
        ({"device": ["h100=0:5"]}, "--device: '0:5' is unknown"),
        ({"device": ["tpu=h100"]}, "there is no VLMNodeClass 'tpu', but h100, l40s"),
        ({"name": "7b"}, "--name: '7b' is no name; write at most"),
        ({"name": "a" * 60}, "is no name"),
        ({"uri": "s3://a/b"}, "--uri: 's3://a/b' is no pvc://CLAIM"),
        ({"uri": "hf://a/b"}, "--revision: is required for hf://a/b"),
        ({"write": Path("x.yaml")}, "there is no manifest without a load"),
    ],
)
async def test_a_flag_that_is_wrong_is_named(options: dict[str, Any], said: str):
    assert said in await refusal(QWEN_7B, **options)


async def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    assert "none/config.json: cannot be read" in await refusal(tmp_path / "none" / "config.json")
    (tmp_path / "config.json").write_text("[1]")
    assert "config.json: has no JSON object" in await refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: is not JSON" in await refusal(tmp_path)


def classes(path: Path, *specs: dict[str, Any]) -> Path:
    path.write_text(
        yaml.safe_dump_all(
            {"kind": "VLMNodeClass", "metadata": {"name": f"n{number}"}, "spec": spec}
            for number, spec in enumerate(specs)
        )
    )
    return path


GPU = {"resourceName": "nvidia.com/gpu", "count": 1, "memory": "8Gi"}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"accelerator": {"count": 1}}, "VLMNodeClass n0: spec.accelerator.resourceName: "),
        ({"accelerator": GPU}, "decode on n0: its speed is unknown: give --device n0="),
        (
            {"accelerator": GPU, "nodeSelector": {"gpu": "nvidia-l4"}},
            "decode on n0: weights, activations and caches take 12.4 GiB more than the 8.0 GiB",
        ),
        (
            {"nodeSelector": {"gpu": "nvidia-l4"}, "roles": ["encoder"]},
            "decode on n0: the class does not accept the role decode",
        ),
    ],
)
async def test_node_classes_that_cannot_run_the_model_say_why(tmp_path: Path, spec, said: str):
    path = classes(tmp_path / "nodes.yaml", spec)
    assert said in await refusal(QWEN_7B, nodes=[path], rate=1.0)


async def test_without_prices_pods_are_counted(tmp_path: Path, capsys):
    spec = {"accelerator": {**GPU, "memory": "80Gi"}, "nodeSelector": {"gpu": "h100"}}
    path = classes(tmp_path / "nodes.yaml", spec)
    found = await data(capsys, QWEN_7B, nodes=[path], rate=1.0)
    assert found["pools"][0]["cost"]["unit"] == "pods"
    assert "n0 has no cost: pods are counted instead." in found["assumptions"]


async def test_names_that_kubernetes_refuses_are_changed(tmp_path: Path, capsys):
    model = write(tmp_path / "7B_Model.v1", qwen_7b())
    nodes = tmp_path / "nodes.yaml"
    spec = {"accelerator": {**GPU, "memory": "80Gi"}}
    meta = {"name": "gpu.h100." + "long-name-" * 6 + "x"}
    nodes.write_text(yaml.safe_dump({"kind": "VLMNodeClass", "metadata": meta, "spec": spec}))
    found = (await data(capsys, model, nodes=[nodes], rate=0.1))["manifest"]
    assert found["metadata"]["name"] == "vlm-7b-model-v1"
    (variant,) = found["spec"]["pools"]["decode"]["variants"]
    assert variant["name"].startswith("gpu-h100-long-name")
    assert variant["nodeClassRef"] == meta


async def test_no_node_class_is_an_error(tmp_path: Path):
    assert "there is no VLMNodeClass" in await refusal(
        QWEN_7B, nodes=[classes(tmp_path / "none.yaml")]
    )


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("kind: ConfigMap\nmetadata: {name: a}\n", "has 0 VLMServices; --from reads one"),
        (
            "kind: VLMService\nmetadata: {name: a}\nspec: {model: {uri: 'pvc://a'}}\n",
            "annotations has no triptych.dev/planned-load: no plan wrote this manifest",
        ),
        (
            "kind: VLMService\n"
            "metadata: {name: a, annotations: {triptych.dev/planned-load: '{}'}}\n"
            "spec: {model: {uri: 'pvc://a'}}\n",
            "requestsPerSecond is missing",
        ),
    ],
)
async def test_a_manifest_that_no_plan_wrote_is_refused(tmp_path: Path, manifest: str, said: str):
    path = tmp_path / "m.yaml"
    path.write_text(manifest)
    assert said in await refusal(QWEN_7B, again=path)
