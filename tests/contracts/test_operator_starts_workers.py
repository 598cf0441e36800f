"""Workers can parse the command lines and the configuration that the operator writes."""

import copy
import json
import pathlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.world import body, empty, service, specs
from vlm_operator import names
from vlm_operator.api.enums import TierMethod
from vlm_operator.autoscale.decide import Memory
from vlm_operator.cluster import Manifest
from vlm_operator.pods.gateway import gateway_config
from vlm_operator.reconcile.decisions import Options, plan_turn
from vlm_worker.gateway.config import Config
from vlm_worker.gateway.cors import Cors
from vlm_worker.gateway.cors import problem_of as cors_problem
from vlm_worker.gateway.rate_limits import TenantLimits
from vlm_worker.gateway.visual import TenantVisual, Tier, VisualLimits, problem_of
from vlm_worker.settings import GatewaySettings, WorkerSettings, parse
from vlm_worker.weights import canonical


@given(specs())
@settings(max_examples=40, deadline=None)
def test_workers_accept_every_command_line(manifest: Manifest):
    found = plan_turn(service(manifest), empty(), Memory(), options=Options())
    for item in found.plan.objects:
        if item["kind"] != "Deployment":
            continue
        (container,) = item["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["vlm-worker"]
        labels = item["metadata"]["labels"]
        environ = {"POD_NAME": "p", "POD_UID": "u", "POD_IP": "127.0.0.1"} | {
            variable["name"]: variable["value"]
            for variable in container["env"]
            if "value" in variable
        }
        read = parse(container["args"], environ)
        assert read.served_name == manifest["metadata"]["name"]
        assert read.compat == labels[names.LABEL_COMPAT]
        assert read.identity.revision == labels[names.LABEL_REVISION]
        if labels[names.LABEL_ROLE] == "gateway":
            assert isinstance(read, GatewaySettings)
            assert (read.namespace, read.service) == ("ns", manifest["metadata"]["name"])
        else:
            assert isinstance(read, WorkerSettings)
            assert read.role.value == labels[names.LABEL_ROLE]


PLACE = {"POD_NAME": "p", "POD_UID": "u", "POD_IP": "127.0.0.1"}


def worker_arguments(manifest: Manifest) -> dict[str, list[str]]:
    """The command line of each role."""
    found = plan_turn(service(manifest), empty(), Memory(), options=Options())
    return {
        item["metadata"]["labels"][names.LABEL_ROLE]: item["spec"]["template"]["spec"][
            "containers"
        ][0]["args"]
        for item in found.plan.objects
        if item["kind"] == "Deployment"
    }


@given(
    st.dictionaries(
        st.sampled_from(["encoder", "merger", "layers", "head"]),
        st.sampled_from(["Auto", "Int8", "Int4"]),
    )
)
def test_all_workers_read_the_weights_of_the_model(weights: dict[str, str]):
    manifest = copy.deepcopy(body())
    off = worker_arguments(manifest)
    manifest["spec"]["model"]["weights"] = weights
    found = worker_arguments(manifest)
    if set(weights.values()) <= {"Auto"}:
        assert found == off, "the same pods of the same compatibility set"
        return
    want = canonical(",".join(f"{part}={kind.lower()}" for part, kind in weights.items()))
    for role, args in found.items():
        assert set(off[role]) - set(args) != set(), "another compatibility set"
        read = parse(args, PLACE)
        if role == "gateway":
            assert f"--weights={want}" not in args
        else:
            assert isinstance(read, WorkerSettings)
            assert read.compute.weights == want


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("Auto", "auto"), ("BFloat16", "bfloat16"), ("Float32", "float32"), ("Int8", "int8"),
        ("FP8", "fp8"), ("VisionInt8", "vision=int8"), ("TextInt8", "text=int8"),
        ("VisionKivi4", "vision=kivi4"),
    ],
)  # fmt: skip
def test_workers_read_the_kv_type_of_the_model_and_no_other_set_exchanges_kv(kind: str, flag: str):
    manifest = copy.deepcopy(body())
    off = worker_arguments(manifest)
    manifest["spec"]["model"]["kvCacheDtype"] = kind
    for role, args in worker_arguments(manifest).items():
        read = parse(args, {"POD_NAME": "p", "POD_UID": "u", "POD_IP": "127.0.0.1"})
        compat = [arg for arg in args if arg.startswith("--compat=")]
        assert (set(compat) <= set(off[role])) == (kind == "Auto")
        if role != "gateway":
            assert isinstance(read, WorkerSettings)
            assert read.compute.kv_dtype == flag


def test_all_workers_read_the_scales_of_the_model_and_other_scales_are_another_set():
    manifest, sets = copy.deepcopy(body()), []
    for sha256 in ("", "a" * 64, "b" * 64):
        weights: Manifest = {"encoder": "Int8"}
        if sha256:
            key = {"name": "scales", "key": "scales.json"}
            weights["activationScales"] = {"configMapKeyRef": key, "sha256": sha256}
        manifest["spec"]["model"]["weights"] = weights
        found = [parse(args, PLACE) for args in worker_arguments(manifest).values()]
        sets.append({read.compat for read in found})
        for read in found:
            if isinstance(read, WorkerSettings):
                assert read.compute.weights == "encoder=int8"
                assert read.compute.activation_scales_hash == sha256
                assert (read.compute.activation_scales is not None) == bool(sha256)
    assert [len(compats) for compats in sets] == [1, 1, 1], "all roles of a service agree"
    assert len(set.union(*sets)) == 3


@given(
    memory=st.sampled_from([{}, {"memory": "1Gi"}, {"memoryPercent": 80}]),
    shares=st.fixed_dictionaries(
        {},
        optional={
            "reservePercent": st.integers(0, 50),
            "visualPercent": st.integers(0, 100),
            "pruneText": st.integers(1, 1000),
        },
    ),
)
def test_a_worker_reads_the_kv_settings_of_its_pool(memory: Manifest, shares: Manifest):
    manifest = copy.deepcopy(body())
    if "pruneText" in shares:
        manifest["spec"]["pools"].pop("prefill", None)
    manifest["spec"]["pools"]["decode"]["kv"] = memory | shares
    found = worker_arguments(manifest)
    read, gateway = parse(found["decode"], {}), parse(found["gateway"], {})
    assert isinstance(read, WorkerSettings)
    assert isinstance(gateway, GatewaySettings)
    compute = read.compute
    assert compute.kv_memory_bytes == (1 << 30 if "memory" in memory else None)
    assert compute.kv_memory_percent == memory.get("memoryPercent")
    assert read.kv_reserve_percent == shares.get("reservePercent", 5)
    assert read.kv_visual_percent == shares.get("visualPercent", 100)
    assert read.kv_prune_text == shares.get("pruneText", 0)
    assert gateway.mark_history == ("pruneText" in shares)


@pytest.mark.parametrize("stages", ["encoder", "encoder,prefill,decode"])
def test_a_worker_reads_the_disk_of_its_pool(stages: str):
    manifest = copy.deepcopy(body())
    cache = {"disk": {"size": "10Gi", "maxAgeSeconds": 3600}}
    pools = manifest["spec"]["pools"]
    if stages == "encoder":
        pools["encoder"] = {"scaling": {"mode": "Manual", "replicas": 1}, "encoderCache": cache}
    else:
        manifest["spec"]["pools"] = {"decode": {**pools["decode"], "encoderCache": cache}}
    found = plan_turn(service(manifest), empty(), Memory(), options=Options())
    read = [
        parse(item["spec"]["template"]["spec"]["containers"][0]["args"], {})
        for item in found.plan.objects
        if item["kind"] == "Deployment"
        and item["metadata"]["labels"][names.LABEL_ROLE] != "gateway"
    ]
    disks = {
        ",".join(sorted(one.stages)): one.encoder_cache
        for one in read
        if isinstance(one, WorkerSettings) and one.encoder_cache.embedding_disk_dir is not None
    }
    assert set(disks) == {",".join(sorted(stages.split(",")))}
    (disk,) = disks.values()
    assert disk.embedding_disk_bytes == 9 << 30
    assert disk.embedding_disk_age_seconds == 3600


@given(num_requests=st.integers(0, 64), percent=st.integers(1, 30))
def test_an_encoder_that_lends_reads_its_bound_and_its_kv_share(num_requests: int, percent: int):
    manifest = copy.deepcopy(body())
    encoder = {"scaling": {"mode": "Manual", "replicas": 1}, "maxLentRequests": num_requests}
    if num_requests:
        encoder["kv"] = {"memoryPercent": percent}
    manifest["spec"]["pools"]["encoder"] = encoder
    found = plan_turn(service(manifest), empty(), Memory(), options=Options())
    (args,) = (
        item["spec"]["template"]["spec"]["containers"][0]["args"]
        for item in found.plan.objects
        if item["kind"] == "Deployment"
        and item["metadata"]["labels"][names.LABEL_ROLE] == "encoder"
    )
    read = parse(args, {})
    assert isinstance(read, WorkerSettings)
    assert read.max_lent_requests == num_requests
    assert len(read.stages) == (3 if num_requests else 1)
    if num_requests:
        assert read.compute.kv_memory_percent == percent
    else:
        assert not any("lent" in argument for argument in args)


def test_the_gateways_configuration_has_the_keys_of_the_contract():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "contract.md").read_text()
    block = text.partition("## gateway.json")[2].partition("```json")[2].partition("```")[0]
    contract = json.loads(block)

    def keys(value: object) -> object:
        return {k: keys(v) for k, v in value.items()} if isinstance(value, dict) else None

    manifest = service_manifest(
        {"policy": "Auto", "tenants": [{"name": "team-a", "visual": "Low"}]}
    )
    manifest["spec"]["gateway"] = {
        "tenants": [{"name": "*", "requestsPerMinute": 600}, {"name": "team-a", "weight": 2}],
        "cors": {"allowedOrigins": ["https://app.example.com"]},
        "accessLog": True,
    }
    written = keys(gateway_config(service(manifest)))
    assert isinstance(written, dict)
    written["slo"]["overrides"] = keys(contract)["slo"]["overrides"]  # type: ignore[index]
    assert written == keys(contract)


def service_manifest(visual: dict[str, object]) -> Manifest:
    """A service with these visual limits."""
    manifest: Manifest = body()
    manifest["spec"]["model"]["limits"] = {"visual": visual}
    return manifest


def test_a_gateway_reads_the_visual_limits_that_the_operator_writes():
    visual = {
        "policy": "Auto",
        "low": {"method": "Zip", "maxPixels": 200_704},
        "medium": {"method": "Pool", "keepPercent": 50},
        "classifier": "Words",
        "brownOutSeconds": 5,
        "onContextExceeded": "DropOldest",
        "maxTokensPerRequest": 4096,
        "tenants": [{"name": "a", "visual": "Medium", "maxTokensPerRequest": 9}, {"name": "b"}],
    }
    written = json.dumps(gateway_config(service(service_manifest(visual))))
    read = msgspec.json.decode(written, type=Config).limits.visual
    assert problem_of(read) is None
    assert read == VisualLimits(
        policy="Auto",
        low=Tier("Zip", 25, 200_704),
        medium=Tier("Pool", 50),
        classifier="Words",
        brown_out_seconds=5,
        on_context_exceeded="DropOldest",
        max_tokens_per_request=4096,
        tenants={"a": TenantVisual("medium", 9), "b": TenantVisual()},
    )


@pytest.mark.parametrize("method", TierMethod)
def test_a_gateway_knows_every_method_of_a_tier(method: TierMethod):
    visual = {"policy": "Detail", "low": {"method": method.value, "keepPercent": 50}}
    written = json.dumps(gateway_config(service(service_manifest(visual))))
    read = msgspec.json.decode(written, type=Config).limits.visual
    assert problem_of(read) is None
    reduction = read.low.reduction
    assert (reduction.method if reduction else "none") == method.value.lower()


def test_a_service_without_visual_limits_has_the_file_of_earlier_releases():
    assert "visual" not in gateway_config(service())["limits"]


def test_a_service_without_limits_of_tenants_has_the_file_of_earlier_releases():
    assert not {"tenants", "cors", "access_log"} & set(gateway_config(service()))


def test_a_gateway_reads_the_tenants_and_origins_that_the_operator_writes():
    manifest: Manifest = body()
    manifest["spec"]["gateway"] = {
        "tenants": [
            {"name": "*", "requestsPerMinute": 60, "tokensPerMinute": 9000},
            {"name": "team-a", "concurrentRequests": 3, "weight": 2},
        ],
        "cors": {"allowedOrigins": ["https://a.example"], "allowedHeaders": ["x-a"]},
        "accessLog": True,
    }
    read = msgspec.json.decode(json.dumps(gateway_config(service(manifest))), type=Config)
    assert read.tenants == {
        "*": TenantLimits(requests_per_minute=60, tokens_per_minute=9000),
        "team-a": TenantLimits(concurrent_requests=3, weight=2),
    }
    assert read.cors == Cors(("https://a.example",), ("x-a",))
    assert cors_problem(read.cors) is None
    assert read.access_log


def test_the_defaults_of_a_gateway_are_the_operators():
    written = json.dumps(gateway_config(service(service_manifest({}))))
    assert msgspec.json.decode(written, type=Config).limits.visual == VisualLimits()
