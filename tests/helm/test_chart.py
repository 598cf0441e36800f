"""The chart renders the expected objects and refuses invalid values."""

import pathlib
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from vlm_operator import names, settings
from vlm_operator.plan.children import GATEWAY_RULE

Helm = Callable[..., subprocess.CompletedProcess[str]]
ROOT = pathlib.Path(__file__).parents[2]
Manifest = dict[str, Any]

EVERYTHING = """
replicas: 2
watchNamespaces: [team-a, team-b]
image: {registry: registry.example.com, digest: "sha256:%s"}
workers: {image: {tag: "9"}, imagePullPolicy: Always}
crds: {enabled: false}
serviceAccount: {name: somebody, annotations: {a: b}}
commonLabels: {team: platform}
podLabels: {tier: control}
podAnnotations: {note: hello}
imagePullSecrets: [{name: pull}]
nodeSelector: {kubernetes.io/os: linux}
tolerations: [{operator: Exists}]
priorityClassName: system-cluster-critical
extraArgs: [--resync-seconds=30]
extraEnv: [{name: HTTPS_PROXY, value: "http://proxy:3128"}]
""" % ("0" * 64)


@pytest.fixture(scope="module")
def values_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("values") / "everything.yaml"
    path.write_text(EVERYTHING)
    return str(path)


def rendered(helm: Helm, chart: str, *arguments: str) -> list[Manifest]:
    text = helm("template", "triptych", chart, "-n", "triptych-system", *arguments).stdout
    return [item for item in yaml.safe_load_all(text) if item]


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    found = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1, [(m["kind"], m["metadata"]["name"]) for m in manifests]
    return found[0]


@pytest.mark.parametrize("more", [(), ("--set", "tolerations[0].operator=Exists")])
def test_the_operator_leaves_a_lost_node_after_30_seconds(
    helm: Helm, chart: str, more: tuple[str, ...]
):
    operator = one(rendered(helm, chart, *more), "Deployment", "triptych-operator")
    found = operator["spec"]["template"]["spec"]["tolerations"]
    seconds = {item["key"]: item["tolerationSeconds"] for item in found if "key" in item}
    assert seconds == {f"node.kubernetes.io/{key}": 30 for key in ("not-ready", "unreachable")}
    assert ({"operator": "Exists"} in found) is bool(more)


def test_lint_accepts_both_value_sets(helm: Helm, chart: str, values_file: str) -> None:
    helm("lint", "--strict", chart)
    helm("lint", "--strict", chart, "--values", values_file)


def test_the_crds_are_those_of_the_folder_crds(helm: Helm, chart: str) -> None:
    manifests = rendered(helm, chart)
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        source = yaml.safe_load(path.read_text())
        shipped = one(manifests, "CustomResourceDefinition", source["metadata"]["name"])
        assert shipped["spec"] == source["spec"]
        assert shipped["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_crds_can_be_disabled_or_removed(helm: Helm, chart: str) -> None:
    without = rendered(helm, chart, "--set", "crds.enabled=false")
    assert not [item for item in without if item["kind"] == "CustomResourceDefinition"]
    loose = rendered(helm, chart, "--set", "crds.keep=false")
    assert all(
        "annotations" not in item["metadata"]
        for item in loose
        if item["kind"] == "CustomResourceDefinition"
    )


def test_the_operator_accepts_its_command_line(helm: Helm, chart: str, values_file: str) -> None:
    for arguments in ([], ["--values", values_file]):
        deployment = one(rendered(helm, chart, *arguments), "Deployment", "triptych-operator")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        read = settings.Settings.read(container["args"], {"POD_NAMESPACE": "ns", "POD_NAME": "p"})
        assert read.worker_image in (
            "localhost/triptych/worker:0.1.0",
            "localhost/triptych/worker:9",
        )
        assert read.gateway_image == read.worker_image.replace("worker", "gateway")
        assert read.api_server_ports == (443, 6443)
        assert (read.dns_namespace, read.dns_ports) == ("kube-system", (53,))
        assert read.lease_name == names.OPERATOR_LEASE
        assert deployment["spec"]["strategy"] == {"type": "Recreate"}
        assert {port["containerPort"] for port in container["ports"]} == {read.metrics_port}


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ("workers.image.registry=r.io,workers.image.tag=2", "r.io/triptych/gateway:2"),
        ("workers.image.digest=sha256:00", "localhost/triptych/gateway:0.1.0"),
        ("gateways.image.registry=g.io,gateways.image.tag=3", "g.io/triptych/gateway:3"),
        ("gateways.image.repository=triptych/worker", "localhost/triptych/worker:0.1.0"),
    ],
)
def test_a_gateway_image_without_registry_or_tag_has_those_of_workers(
    helm: Helm, chart: str, values: str, image: str
) -> None:
    values = values.replace("sha256:00", "sha256:" + "0" * 64)
    deployment = one(
        rendered(helm, chart, "--set-string", values), "Deployment", "triptych-operator"
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert settings.Settings.read(container["args"], {}).gateway_image == image


def test_the_network_values_become_flags_of_the_operator(helm: Helm, chart: str) -> None:
    chosen = "apiServerPorts={16443},dns.namespace=openshift-dns,dns.ports={5353}"
    arguments = [word for pair in chosen.split(",") for word in ("--set", f"network.{pair}")] + [
        "--set",
        "network.monitoringNamespace=monitoring",
        "--set",
        "network.modelSources={10.1.0.0/16,fd00::/8}",
    ]
    deployment = one(rendered(helm, chart, *arguments), "Deployment", "triptych-operator")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    read = settings.Settings.read(container["args"], {})
    assert read.api_server_ports == (16443,)
    assert (read.dns_namespace, read.dns_ports) == ("openshift-dns", (5353,))
    assert read.monitoring_namespace == "monitoring"
    assert read.model_sources == ("10.1.0.0/16", "fd00::/8")


@pytest.mark.parametrize("value", ["apiServerPorts={70000}", "apiServerPorts={}", "dns.ports={x}"])
def test_an_invalid_port_is_refused(helm: Helm, chart: str, value: str) -> None:
    arguments = ("template", "t", chart, "--set", f"network.{value}")
    assert "/network/" in helm(*arguments, check=False).stderr.replace(".", "/")


def test_the_registry_of_the_default_images_cannot_contain_images_of_others(
    helm: Helm, chart: str
) -> None:
    deployment = one(rendered(helm, chart), "Deployment", "triptych-operator")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    named = [container["image"], *(a for a in container["args"] if a.startswith("--worker-image="))]
    assert [name.rpartition("=")[2].partition("/")[0] for name in named] == ["localhost"] * 2


def test_a_digest_replaces_the_tag(helm: Helm, chart: str, values_file: str) -> None:
    deployment = one(
        rendered(helm, chart, "--values", values_file), "Deployment", "triptych-operator"
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    digest = "0" * 64
    assert container["image"] == f"registry.example.com/triptych/operator@sha256:{digest}"


def test_with_named_namespaces_the_cluster_role_has_only_cluster_resources(
    helm: Helm, chart: str, values_file: str
) -> None:
    manifests = rendered(helm, chart, "--values", values_file)
    roles = [m for m in manifests if m["kind"] == "Role"]
    assert {role["metadata"]["namespace"] for role in roles} == {
        "team-a",
        "team-b",
        "triptych-system",
    }
    cluster = one(manifests, "ClusterRole", "triptych-system:triptych-operator")
    assert [rule["resources"] for rule in cluster["rules"]] == [
        ["vlmnodeclasses"],
        ["vlmnodeclasses/status"],
        ["nodes"],
    ]


def test_the_operator_has_its_rights_and_no_wildcard(helm: Helm, chart: str) -> None:
    manifests = rendered(helm, chart)
    rules = [
        rule
        for item in manifests
        if item["kind"] in ("Role", "ClusterRole")
        for rule in item["rules"]
    ]
    for rule in rules:
        for values in rule.values():
            assert "*" not in values
        if "secrets" in rule["resources"]:
            # reading and replacing are for the operator's CA alone
            allowed = {"get", "update"} if rule.get("resourceNames") else {"create", "patch"}
            assert set(rule["verbs"]) <= allowed
            assert rule.get("resourceNames", ["triptych-operator-ca"]) == ["triptych-operator-ca"]
        assert not {"impersonate", "escalate", "bind"} & set(rule["verbs"])


def test_rights_on_secrets_follow_from_the_issuers(helm: Helm, chart: str) -> None:
    def resources(*options: str) -> set[str]:
        return {
            resource
            for item in rendered(helm, chart, *options)
            if item["kind"] in ("Role", "ClusterRole")
            for rule in item["rules"]
            for resource in rule["resources"]
        }

    assert {"secrets", "certificates"} <= resources()
    assert not {"secrets", "certificates"} & resources("--set-json=identity.issuers=[]")
    refused = helm("template", "t", chart, "--set=rbac.admissionPolicy=false", check=False)
    assert "identity.issuers: OperatorCA needs rbac.admissionPolicy=true" in refused.stderr


def test_the_operator_has_every_right_that_it_grants_to_gateways(helm: Helm, chart: str) -> None:
    role = one(rendered(helm, chart), "ClusterRole", "triptych-system:triptych-operator")
    (resource,) = GATEWAY_RULE["resources"]
    own = next(rule for rule in role["rules"] if resource in rule["resources"])
    assert set(GATEWAY_RULE["verbs"]) <= set(own["verbs"])


def test_releases_with_one_name_in_two_namespaces_share_no_object(helm: Helm, chart: str) -> None:
    def release(namespace: str) -> set[tuple[str, str, str]]:
        values = f"crds.enabled=false,watchNamespaces={{{namespace}-apps}}"
        text = helm("template", "triptych", chart, "-n", namespace, "--set", values).stdout
        return {
            (item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"])
            for item in yaml.safe_load_all(text)
            if item
        }

    assert release("one") & release("two") == set()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        pytest.param("imge.tag=1", "imge", id="an unknown key"),
        pytest.param("image.digest=abc", "digest", id="a digest that is none"),
        pytest.param("replicas=7", "replicas", id="too many replicas"),
        pytest.param("log.level=LOUD", "level", id="an unknown log level"),
        pytest.param("resources.limits.memory=oops", "memory", id="no quantity"),
        pytest.param("resources.requests.cpu=-1", "cpu", id="a negative quantity"),
        pytest.param("clusterDomain=a b", "clusterDomain", id="no domain"),
        pytest.param(
            r"commonLabels.app\.kubernetes\.io/name=x", "commonLabels", id="the chart's own label"
        ),
        pytest.param(r"commonLabels.helm\.sh/chart=x", "commonLabels", id="the chart's name"),
        pytest.param(
            r"podLabels.app\.kubernetes\.io/name=x", "podLabels", id="the selector's label"
        ),
        pytest.param("commonLabels.team=a b", "team", id="no label value"),
        pytest.param("nodeSelector.a b=x", "nodeSelector", id="no label key"),
        pytest.param("watchNamespaces={a,a}", "watchNamespaces", id="one namespace twice"),
        pytest.param("network.monitoringNamespace=A b", "monitoringNamespace", id="no namespace"),
        pytest.param("network.dns.namespace=Kube_System", "namespace", id="no namespace of DNS"),
        pytest.param("serviceAccount.create=false", "serviceAccount.name is required", id="nobody"),
    ],
)
def test_invalid_values_are_refused_by_name(
    helm: Helm, chart: str, argument: str, says: str
) -> None:
    answer = helm("template", "triptych", chart, "--set", argument, check=False)
    assert answer.returncode != 0
    assert says in answer.stderr


@pytest.mark.parametrize(
    "argument",
    [
        "resources.limits.memory=1e9",
        "resources.limits.cpu=0.5",
        "resources.requests.cpu=2",
        "clusterDomain=k8s.example-1.com",
        r"commonLabels.example\.com/team=A_b",
        r"podLabels.sidecar\.istio\.io/inject=",
    ],
)
def test_valid_values_are_accepted(helm: Helm, chart: str, argument: str) -> None:
    assert rendered(helm, chart, "--set", argument)


def test_a_pod_label_replaces_the_common_label(helm: Helm, chart: str) -> None:
    sets = (
        "--set",
        "commonLabels.team=a",
        "--set",
        "commonLabels.b=c",
        "--set",
        "podLabels.team=d",
    )
    deployment = one(rendered(helm, chart, *sets), "Deployment", "triptych-operator")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert (labels["team"], labels["b"]) == ("d", "c")
    assert deployment["metadata"]["labels"]["team"] == "a"
    text = helm("template", "triptych", chart, *sets, "--show-only", "templates/deployment.yaml")
    assert sorted(re.findall("team: (.)", text.stdout)) == ["a", "a", "d"]


def test_openshift_may_assign_its_own_ids(helm: Helm, chart: str) -> None:
    ids = ("runAsUser", "runAsGroup", "fsGroup")
    sets = [word for name in ids for word in ("--set", f"podSecurityContext.{name}=null")]
    for manifests in (rendered(helm, chart, *sets), rendered(helm, chart, *sets)):
        operator = one(manifests, "Deployment", "triptych-operator")["spec"]["template"]["spec"]
        test = one(manifests, "Pod", "triptych-operator-test")["spec"]
        for pod in (operator, test):
            assert pod["securityContext"] == {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            }


def test_policies_of_services_can_be_turned_off(helm: Helm, chart: str) -> None:
    for value, expected in (("true", True), ("false", False)):
        manifests = rendered(helm, chart, "--set", f"network.policies={value}")
        deployment = one(manifests, "Deployment", "triptych-operator")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert settings.Settings.read(container["args"], {}).network_policies is expected


def test_the_operators_policy_allows_what_its_process_opens(helm: Helm, chart: str) -> None:
    assert not [m for m in rendered(helm, chart) if m["kind"] == "NetworkPolicy"]
    sets = ("network.operatorPolicy=true", "network.monitoringNamespace=monitoring")
    arguments = [word for pair in sets for word in ("--set", pair)]
    policy = one(rendered(helm, chart, *arguments), "NetworkPolicy", "triptych-operator")["spec"]
    ports = [[port["port"] for port in rule["ports"]] for rule in policy["egress"]]
    assert ports == [[443, 6443], [53, 53], [names.PORT_HTTP]]
    assert policy["egress"][2]["to"][0]["podSelector"]["matchExpressions"] == [
        {"key": names.LABEL_SERVICE, "operator": "Exists"}
    ]
    (ingress,) = policy["ingress"]
    assert [port["port"] for port in ingress["ports"]] == [8080]
    assert ingress["from"] == [
        {"podSelector": {}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    ]


def test_values_and_schema_have_the_same_keys() -> None:
    values = yaml.safe_load((ROOT / "helm/triptych/values.yaml").read_text())
    schema = yaml.safe_load((ROOT / "helm/triptych/values.schema.json").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}


def test_install_yaml_is_the_chart_with_its_default_values(helm: Helm, chart: str) -> None:
    committed = (ROOT / "install.yaml").read_text()
    namespace = next(iter(yaml.safe_load_all(committed)))
    assert namespace["metadata"]["name"] == names.OPERATOR_NAMESPACE
    text = helm("template", "triptych", chart, "-n", "triptych-system", "--skip-tests").stdout
    assert committed.endswith(text), "run make crds"
