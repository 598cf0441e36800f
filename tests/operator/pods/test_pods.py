"""Pods: Pod Security restricted for any service, and the contract's command line."""

from typing import Any

import pytest
from hypothesis import given, settings
from inline_snapshot import snapshot

from support.world import body, empty, pool, service, specs
from vlm_operator import names
from vlm_operator.autoscale.decide import Memory
from vlm_operator.cluster import Manifest
from vlm_operator.names import Role
from vlm_operator.reconcile.decisions import Options, plan_turn


def templates(manifest: Manifest) -> dict[str, Any]:
    found = plan_turn(service(manifest), empty(), Memory(), options=Options())
    return {
        item["metadata"]["labels"][names.LABEL_ROLE]: item["spec"]["template"]
        for item in found.plan.objects
        if item["kind"] == "Deployment"
    }


def restricted_violations(spec: dict[str, Any]) -> list[str]:
    """What Pod Security `restricted` would refuse (v1.34)."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += [
        f"volume {item['name']}"
        for item in spec["volumes"]
        if not {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "projected"} & set(item)
    ]
    profile = spec["securityContext"].get("seccompProfile", {}).get("type")
    found += ["seccomp"] if profile not in ("RuntimeDefault", "Localhost") else []
    for container in spec["containers"]:
        context = container["securityContext"]
        checks = {
            "privileged": not context.get("privileged"),
            "escalation": context.get("allowPrivilegeEscalation") is False,
            "capabilities": context["capabilities"].get("drop") == ["ALL"]
            and not context["capabilities"].get("add"),
            "nonroot": context.get("runAsNonRoot") is True,
            "ports": all("hostPort" not in port for port in container["ports"]),
        }
        found += [name for name, holds in checks.items() if not holds]
    return found


@given(specs())
@settings(max_examples=80, deadline=None)
def test_pods_of_any_service_are_restricted(manifest: Manifest):
    for role, template in templates(manifest).items():
        spec = template["spec"]
        assert restricted_violations(spec) == []
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert spec["automountServiceAccountToken"] is (role == "gateway")
        gated = {"conditionType": names.GATE_ACCEPTING} in spec.get("readinessGates", [])
        assert gated is (role != "gateway")


@given(specs())
@settings(max_examples=80, deadline=None)
def test_grace_outlasts_the_drain_and_mounts_have_volumes(manifest: Manifest):
    for template in templates(manifest).values():
        spec = template["spec"]
        (container,) = spec["containers"]
        timeout = next(
            int(arg.partition("=")[2])
            for arg in container["args"]
            if arg.startswith("--drain-timeout-seconds=")
        )
        assert spec["terminationGracePeriodSeconds"] == timeout + 30
        volumes = [item["name"] for item in spec["volumes"]]
        assert len(volumes) == len(set(volumes))
        assert {item["name"] for item in container["volumeMounts"]} <= set(volumes)
        variables = [item["name"] for item in container["env"]]
        assert len(variables) == len(set(variables))


def test_the_command_line_of_each_role():
    found = {
        role: [arg for arg in t["spec"]["containers"][0]["args"] if "compat" not in arg]
        for role, t in templates(body()).items()
    }
    assert found["prefill"] == snapshot(
        [
            "prefill",
            "--model=/models/model",
            "--served-name=demo",
            "--stages=prefill",
            "--bind=::",
            "--grpc-port=9000",
            "--http-port=9001",
            "--block-size=64",
            "--dtype=auto",
            "--kv-dtype=auto",
            "--drain-timeout-seconds=600",
        ]
    )
    assert found["gateway"] == snapshot(
        [
            "gateway",
            "--model=/models/model",
            "--served-name=demo",
            "--bind=::",
            "--http-port=8000",
            "--admin-port=9001",
            "--namespace=ns",
            "--service=demo",
            "--config=/etc/triptych/gateway/gateway.json",
            "--block-size=64",
            "--drain-timeout-seconds=600",
        ]
    )


@pytest.mark.parametrize(
    ("roles", "stages"),
    [
        (["decode"], {"decode": "encoder,prefill,decode"}),
        (["encoder", "decode"], {"encoder": "encoder", "decode": "prefill,decode"}),
        (["prefill", "decode"], {"prefill": "encoder,prefill", "decode": "decode"}),
    ],
    ids=["colocated", "encoder apart", "decode apart"],
)
def test_a_stage_without_a_pool_is_loaded_by_the_next_role(
    roles: list[str], stages: dict[str, str]
):
    found = templates(body(**{role: pool() for role in roles}))
    for role, expected in stages.items():
        assert f"--stages={expected}" in found[role]["spec"]["containers"][0]["args"]


def test_a_disk_for_embeddings_is_an_emptydir_that_the_scheduler_counts():
    cache = {"encoderCache": {"disk": {"size": "10Gi", "maxAgeSeconds": 3600}}}
    spec = templates(body(decode=pool() | cache))["decode"]["spec"]
    (container,) = spec["containers"]
    assert spec["volumes"][-1] == {
        "name": "triptych-embeddings",
        "emptyDir": {"sizeLimit": "10Gi"},
    }
    assert container["volumeMounts"][-1] == {
        "name": "triptych-embeddings",
        "mountPath": "/embeddings",
    }
    assert container["resources"]["requests"]["ephemeral-storage"] == "10Gi"
    assert [arg for arg in container["args"] if "embedding" in arg] == [
        "--embedding-disk-dir=/embeddings",
        f"--embedding-disk-bytes={9 << 30}",
        "--embedding-disk-age-seconds=3600",
    ]


@pytest.mark.parametrize("key", ["requests", "limits"])
def test_the_disk_keeps_the_ephemeral_storage_that_the_user_sets(key: str):
    variant = {"name": "a", "placement": {}, "resources": {key: {"ephemeral-storage": "20Gi"}}}
    decode = pool() | {"encoderCache": {"disk": {"size": "10Gi"}}, "variants": [variant]}
    (container,) = templates(body(decode=decode))["decode"]["spec"]["containers"]
    assert container["resources"][key]["ephemeral-storage"] == "20Gi"
    assert "10Gi" not in container["resources"].get("requests", {}).values()


def test_scales_of_activations_are_one_key_of_a_configmap_with_its_hash():
    sha256 = "0123456789abcdef" * 4
    scales = {"configMapKeyRef": {"name": "scales", "key": "a.json"}, "sha256": sha256}
    manifest = body()
    manifest["spec"]["model"]["weights"] = {"encoder": "Int8", "activationScales": scales}
    found = templates(manifest)
    assert "activation-scales" not in str(found.pop("gateway"))
    for template in found.values():
        spec, name = template["spec"], "triptych-activation-scales"
        (container,) = spec["containers"]
        assert f"--activation-scales-hash={sha256}" in container["args"]
        mount = next(one for one in container["volumeMounts"] if one["name"] == name)
        volume = next(one for one in spec["volumes"] if one["name"] == name)
        assert mount == {"name": name, "mountPath": "/activation-scales", "readOnly": True}
        (item,) = volume["configMap"]["items"]
        assert (volume["configMap"]["name"], item["key"]) == ("scales", "a.json")
        assert f"--activation-scales={mount['mountPath']}/{item['path']}" in container["args"]
        assert "--weights=encoder=int8" in container["args"]


@pytest.mark.parametrize("cache", [{}, {"encoderCache": {}}])
def test_without_a_disk_no_pod_has_one(cache: dict[str, Any]):
    assert templates(body(decode=pool() | cache)) == templates(body(decode=pool()))


def test_models_come_from_a_claim_or_into_a_cache():
    claim = templates(body({"model": {"uri": "pvc://weights/qwen/7b"}}, decode=pool()))["decode"]
    assert "--model=/models/model/qwen/7b" in claim["spec"]["containers"][0]["args"]
    assert claim["spec"]["volumes"][1]["persistentVolumeClaim"] == {
        "claimName": "weights",
        "readOnly": True,
    }
    image = templates(body({"model": {"uri": "oci://r.example.com/m:1#qwen/7b"}}, decode=pool()))
    for role, container in (("decode", "worker"), ("gateway", "gateway")):
        spec = image[role]["spec"]
        assert spec["containers"][0]["name"] == container
        assert "--model=/models/model/qwen/7b" in spec["containers"][0]["args"]
        assert spec["volumes"][1] == {
            "name": "triptych-model",
            "image": {"reference": "r.example.com/m:1"},
        }
    model = {"uri": "hf://org/name", "revision": "abc", "credentialsSecretRef": {"name": "hub"}}
    hub = templates(body({"model": model}, decode=pool()))["decode"]["spec"]["containers"][0]
    assert hub["args"][1:5] == [
        "--model=hf://org/name",
        "--model-revision=abc",
        "--model-cache=/models/cache",
        "--served-name=demo",
    ]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in (
        hub["env"]
    )


def test_the_job_of_a_bucket_has_its_keys_and_pods_have_none():
    model = {
        "uri": "s3://bucket/team/x",
        "credentialsSecretRef": {"name": "keys"},
        "cache": {"claim": {"size": "1Gi"}},
    }
    manifest = body({"model": model}, decode=pool())
    found = plan_turn(service(manifest), empty(), Memory(), options=Options())
    [job] = [item for item in found.plan.objects if item["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][1:3] == [
        "--model=s3://bucket/team/x",
        "--into=/models/model/checkpoint",
    ]
    keys = {
        item["name"]: item["valueFrom"]["secretKeyRef"]
        for item in container["env"]
        if item["name"].startswith("AWS_")
    }
    assert keys == {
        "AWS_ACCESS_KEY_ID": {"name": "keys", "key": "AWS_ACCESS_KEY_ID"},
        "AWS_SECRET_ACCESS_KEY": {"name": "keys", "key": "AWS_SECRET_ACCESS_KEY"},
        "AWS_SESSION_TOKEN": {"name": "keys", "key": "AWS_SESSION_TOKEN", "optional": True},
    }
    for template in templates(manifest).values():
        assert "AWS_" not in str(template)


def test_blocks_are_short_where_a_worker_asks_for_an_accelerator():
    resources = {"limits": {"nvidia.com/gpu": "1"}}
    variant = {"name": "gpu", "placement": {}, "resources": resources}
    found = templates(body(decode=pool(variants=[variant])))["decode"]
    assert "--block-size=16" in found["spec"]["containers"][0]["args"]
    assert Role.DECODE.value == found["metadata"]["labels"][names.LABEL_ROLE]


def test_a_gateway_prefers_nodes_without_gpus_unless_its_user_wrote_an_affinity():
    found = templates(body(decode=pool()))
    assert "affinity" not in found["decode"]["spec"]
    rules = found["gateway"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = rules.pop("preferredDuringSchedulingIgnoredDuringExecution")
    assert not rules, "a cluster of nodes with GPUs alone still runs gateways"
    for label in ("nvidia.com/gpu.present", "cloud.google.com/gke-accelerator"):
        absent = {"key": label, "operator": "DoesNotExist"}
        assert absent in term["preference"]["matchExpressions"]
    own = {"podAntiAffinity": {}}
    placed = templates(body({"gateway": {"placement": {"affinity": own}}}, decode=pool()))
    assert placed["gateway"]["spec"]["affinity"] == own


@pytest.mark.parametrize(("seconds", "failures"), [(None, 1800), (7200, 7200)])
def test_a_start_may_take_as_long_as_the_model_says(seconds: int | None, failures: int):
    model = {"uri": "pvc://weights"} | ({"startTimeoutSeconds": seconds} if seconds else {})
    for template in templates(body({"model": model}, decode=pool())).values():
        probe = template["spec"]["containers"][0]["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == failures


def test_all_pods_of_a_traced_service_name_its_collector():
    spec = {"tracing": {"endpoint": "http://collector.observability:4318", "samplePercent": 2}}
    for template in templates(body(spec)).values():
        (container,) = template["spec"]["containers"]
        env = {item["name"]: item.get("value") for item in container["env"]}
        assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector.observability:4318"
        assert env["OTEL_TRACES_SAMPLER_ARG"] == "0.02"
    for template in templates(body()).values():
        assert "OTEL" not in str(template)


def test_a_gateway_with_a_certificate_serves_and_is_probed_over_https():
    spec = {"gateway": {"tls": {"secretRef": {"name": "demo-tls"}}}}
    template = templates(body(spec))["gateway"]["spec"]
    (container,) = template["containers"]
    assert "--tls-dir=/etc/triptych/tls" in container["args"]
    assert {"name": "triptych-tls", "secret": {"secretName": "demo-tls"}} in template["volumes"]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert [probe.get("scheme") for probe in probes] == ["HTTPS"] * 3
    (plain,) = templates(body())["gateway"]["spec"]["containers"]
    assert "scheme" not in str(plain)
    assert not [word for word in plain["args"] if "tls" in word]
