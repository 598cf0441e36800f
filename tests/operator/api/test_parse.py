"""From a body to values: what is written survives, what is missing gets a default."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from vlm_operator import api
from vlm_operator.errors import SpecError

IMAGE = "triptych/worker:test"
MANUAL = {"scaling": {"mode": "Manual", "replicas": 1}}
GPU = {
    "name": "gpu",
    "placement": {"nodeSelector": {"triptych.dev/node-type": "gpu-memory"}},
    "resources": {"limits": {"nvidia.com/gpu": "1"}},
    "preference": 0,
}

ANY = {"name": "any", "placement": {}, "preference": 5, "maxReplicas": 9}


def body(spec: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "metadata": {"name": "demo", "namespace": "default", "uid": "u-1", "generation": 3},
        "spec": spec or {"model": {"uri": "pvc://shapes"}, "pools": {"decode": MANUAL}},
    }


def merged(base: Any, patch: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return patch
    return {**base, **{key: merged(base.get(key), value) for key, value in patch.items()}}


def without_empty(value: Any) -> Any:
    """Maps and lists with nothing in them say nothing."""
    if isinstance(value, list):
        return [without_empty(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: without_empty(item) for key, item in value.items()}
    return {key: item for key, item in kept.items() if item not in ({}, [])}


scalings = st.one_of(
    st.builds(lambda n: {"mode": "Manual", "replicas": n}, st.integers(1, 5)),
    st.builds(
        lambda low, more: {"mode": "External", "minReplicas": low, "maxReplicas": low + more},
        st.integers(1, 3),
        st.integers(0, 3),
    ),
)
pools = st.fixed_dictionaries(
    {"scaling": scalings},
    optional={
        "variants": st.lists(st.sampled_from([GPU, ANY]), min_size=1, max_size=1),
        "drain": st.fixed_dictionaries({"timeoutSeconds": st.integers(1, 900)}),
        "encodeInline": st.just(True),
        "kv": st.sampled_from([{"memory": "8Gi"}, {"memoryPercent": 70}]),
    },
)
specs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"uri": st.just("pvc://shapes")},
            optional={
                "servedName": st.just("other"),
                "blockSizeTokens": st.sampled_from([4, 16, 64]),
                "limits": st.fixed_dictionaries({"imagesPerRequest": st.integers(0, 64)}),
            },
        ),
        "pools": st.fixed_dictionaries(
            {"decode": pools}, optional={"encoder": pools, "prefill": pools}
        ),
    },
    optional={"image": st.just("mine"), "slo": st.just({"ttftP95Milliseconds": 900})},
)


@settings(deadline=None)
@given(specs)
def test_what_is_written_survives_and_the_rest_is_in_effective(spec: dict[str, Any]) -> None:
    service = api.parse(body(spec))
    resolved = api.resolve(service, worker_image=IMAGE)
    defaults = api.effective(service, resolved)
    assert without_empty(merged(defaults, spec)) == without_empty(resolved.spec.to_dict())


@settings(deadline=None)
@given(specs)
def test_resolving_twice_changes_nothing(spec: dict[str, Any]) -> None:
    resolved = api.resolve(api.parse(body(spec)), worker_image=IMAGE)
    assert api.resolve(resolved, worker_image="another") == resolved


@settings(deadline=None)
@given(specs)
def test_a_resolved_spec_is_itself_a_manifest(spec: dict[str, Any]) -> None:
    resolved = api.resolve(api.parse(body(spec)), worker_image=IMAGE)
    assert api.parse(body(resolved.spec.to_dict())).spec.to_dict() == resolved.spec.to_dict()


def test_the_defaults_of_a_minimal_service() -> None:
    service = api.parse(body())
    resolved = api.resolve(service, worker_image=IMAGE)
    assert api.effective(service, resolved)["model"] == snapshot(
        {
            "servedName": "demo",
            "dtype": "Auto",
            "kvCacheDtype": "Auto",
            "blockSizeTokens": 64,
            "limits": {
                "imagesPerRequest": 4,
                "bytesPerImage": 20971520,
                "pixelsPerImage": 16777216,
                "onOversize": "Downscale",
                "onCorrupt": "Reject",
                "videoSeconds": 0,
            },
        }
    )
    assert resolved.spec.pools.decode.image == IMAGE
    assert [variant.name for variant in resolved.spec.pools.decode.variants] == ["default"]


@pytest.mark.parametrize(
    ("pool", "size"),
    [
        pytest.param({}, 64, id="no accelerator"),
        pytest.param({"variants": [GPU]}, 16, id="an accelerator"),
    ],
)
def test_one_block_size_serves_all_pools(pool: dict[str, Any], size: int) -> None:
    spec = {
        "model": {"uri": "pvc://shapes"},
        "pools": {"encoder": {**MANUAL, "variants": [GPU]}, "decode": {**MANUAL, **pool}},
    }
    resolved = api.resolve(api.parse(body(spec)), worker_image=IMAGE)
    assert resolved.spec.model.block_size_tokens == size


def test_visual_kv_in_4_bits_has_one_block_size() -> None:
    spec: dict[str, Any] = {
        "model": {"uri": "pvc://shapes", "kvCacheDtype": "VisionKivi4"},
        "pools": {"encoder": MANUAL, "decode": MANUAL},
    }
    for size in (None, 32):
        spec["model"] |= {} if size is None else {"blockSizeTokens": size}
        resolved = api.resolve(api.parse(body(spec)), worker_image=IMAGE)
        assert resolved.spec.model.block_size_tokens == 32
    spec["model"]["blockSizeTokens"] = 64
    with pytest.raises(SpecError, match=r"blockSizeTokens.*is 64.*must be 32"):
        api.parse(body(spec))


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        pytest.param({"foo": 1}, "spec.foo: Extra inputs are not permitted", id="unknown field"),
        pytest.param(
            {"pools": {"decode": {"scaling": {"mode": "auto"}}}},
            "spec.pools.decode.scaling.mode: Input should be 'Auto', 'External' or 'Manual'",
            id="unknown choice",
        ),
        pytest.param(
            {"pools": {"decode": {"variants": [{}]}}},
            "spec.pools.decode.variants[0].name: Field required",
            id="inside a list",
        ),
        pytest.param(
            {"pools": {"decode": {"scaling": {"mode": "External"}}}},
            "spec.pools.decode.scaling: mode External needs minReplicas and maxReplicas",
            id="a rule the code rests on",
        ),
        pytest.param(
            {"pools": {"decode": {"scaling": None}}}, "spec.pools.decode.scaling: ", id="null"
        ),
    ],
)
def test_an_error_names_the_path_as_the_user_writes_it(patch: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as refusal:
        api.parse(body(merged(body()["spec"], patch)))
    assert str(refusal.value).startswith(says)


@pytest.mark.parametrize(("limit", "is_less"), [("8Gi", True), ("10Gi", False), ("1Ti", False)])
def test_a_limit_of_ephemeral_storage_below_the_disk_is_refused(limit: str, *, is_less: bool):
    variant = {"name": "a", "placement": {}, "resources": {"limits": {"ephemeral-storage": limit}}}
    pool = MANUAL | {"encoderCache": {"disk": {"size": "10Gi"}}, "variants": [ANY, variant]}
    spec = {"model": {"uri": "pvc://shapes"}, "pools": {"encoder": pool, "decode": MANUAL}}
    if not is_less:
        api.parse(body(spec))
        return
    with pytest.raises(SpecError) as caught:
        api.parse(body(spec))
    assert str(caught.value) == snapshot(
        "spec.pools.encoder.variants[1].resources.limits.ephemeral-storage: is 8Gi, less than "
        "encoderCache.disk.size, 10Gi: a pod would be evicted; raise it to at least 10Gi, or "
        "remove it"
    )


def test_a_small_limit_of_ephemeral_storage_needs_no_more_without_a_disk():
    variant = {"name": "a", "placement": {}, "resources": {"limits": {"ephemeral-storage": "1Gi"}}}
    pool = MANUAL | {"variants": [variant]}
    assert api.parse(body({"model": {"uri": "pvc://shapes"}, "pools": {"decode": pool}}))
