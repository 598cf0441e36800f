"""The chart and install.yaml on a real API server: Pod Security and rights."""

import json
import pathlib
import subprocess
from collections.abc import Callable

import pytest

from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until
from vlm_operator import names

pytestmark = pytest.mark.cluster

Helm = Callable[..., subprocess.CompletedProcess[str]]
ROOT = pathlib.Path(__file__).parents[2]
OPERATOR = "system:serviceaccount:triptych-system:triptych-operator"


def can(cluster: ControlPlane, *arguments: str) -> bool:
    answer = cluster.kubectl("auth", "can-i", *arguments, f"--as={OPERATOR}", check=False)
    return answer.stdout.strip().startswith("yes")


def test_the_operators_pod_passes_pod_security_restricted(installed: ControlPlane) -> None:
    installed.kubectl(
        "-n",
        "triptych-system",
        "wait",
        "--for=create",
        "pod",
        "-l",
        "app.kubernetes.io/name=triptych-operator",
        "--timeout=20s",
    )
    text = installed.kubectl("-n", "triptych-system", "get", "pods", "-o", "json").stdout
    (pod,) = json.loads(text)["items"]
    assert pod["spec"]["serviceAccountName"] == "triptych-operator"
    # the namespace enforces it: the same pod with one more capability is refused
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "risen"}, "spec": pod["spec"]}
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    refused = installed.kubectl(
        "-n", "triptych-system", "create", "--dry-run=server", "-f", "-",
        stdin=json.dumps(pod), check=False,
    )  # fmt: skip
    assert 'violates PodSecurity "restricted' in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        pytest.param(
            ("patch", "vlmservices.triptych.dev", "--subresource=status"), True, id="status"
        ),
        pytest.param(("create", "deployments.apps", "-n", "team-a"), True, id="deployments"),
        pytest.param(
            ("patch", "pods", "--subresource=status", "-n", "team-a"), True, id="the gate"
        ),
        pytest.param(("create", "roles", "-n", "team-a"), True, id="the gateway's role"),
        pytest.param(("escalate", "roles", "-n", "team-a"), False, id="no right it has not"),
        pytest.param(("bind", "clusterroles/cluster-admin"), False, id="no other role"),
        pytest.param(("update", "vlmservices.triptych.dev"), False, id="no spec"),
        pytest.param(("get", "secrets", "-n", "team-a"), False, id="no secrets"),
        pytest.param(("create", "pods", "-n", "team-a"), False, id="no pods of its own"),
        pytest.param(("create", "pods", "--subresource=exec"), False, id="no exec"),
        pytest.param(("delete", "namespaces"), False, id="no namespaces"),
        pytest.param(
            ("update", "leases.coordination.k8s.io", "-n", "kube-system"), False, id="one lease"
        ),
    ],
)
def test_the_operators_rights(
    arguments: tuple[str, ...], allowed: bool, installed: ControlPlane
) -> None:
    assert can(installed, *arguments) is allowed


async def test_a_user_with_edit_may_write_services_and_scale_pools(installed: ControlPlane) -> None:
    installed.kubectl("create", "namespace", "editors")
    installed.kubectl(
        "-n", "editors", "create", "rolebinding", "eve", "--clusterrole=edit", "--user=eve"
    )

    def eve(*arguments: str) -> str:
        return installed.kubectl(
            "auth", "can-i", *arguments, "-n", "editors", "--as=eve", check=False
        ).stdout.strip()

    async def may_create() -> bool:
        return eve("create", "vlmservices.triptych.dev") == "yes"

    # The controller manager aggregates asynchronously.
    await until(may_create, seconds=20, awaited="the aggregated role")
    assert eve("patch", "vlmpools.triptych.dev", "--subresource=scale") == "yes"
    assert eve("patch", "vlmpools.triptych.dev") == "no"
    installed.kubectl("delete", "namespace", "editors", "--wait=false")


def test_helm_installs_upgrades_rolls_back_and_keeps_the_crds(
    each_helm: Helm, chart: str, control_plane: ControlPlane
) -> None:
    helm = each_helm
    release = ("-n", "helm-system", f"--kubeconfig={control_plane.kubeconfig}")
    own = ("--set", "fullnameOverride=by-helm,crds.enabled=false,rbac.create=false")
    control_plane.kubectl("apply", "-f", str(ROOT / "crds"))
    notes = helm("install", "second", chart, "--create-namespace", *release, *own).stdout
    assert "kubectl apply -f examples/quickstart/" in notes

    def replicas() -> str:
        place = ("-n", "helm-system", "get", "deployment", "by-helm")
        return control_plane.kubectl(*place, "-o", "jsonpath={.spec.replicas}").stdout

    helm("upgrade", "second", chart, *release, *own, "--set", "replicas=2")
    assert replicas() == "2"
    helm("rollback", "second", "1", *release)
    assert replicas() == "1"
    refused = helm("upgrade", "second", chart, *release, "--set", "replica=2", check=False)
    assert refused.returncode == 1
    assert "replica" in refused.stderr
    helm("uninstall", "second", *release)
    assert control_plane.kubectl("get", "crd", f"{names.PLURAL_SERVICE}.{names.GROUP}").stdout


def test_two_releases_with_named_namespaces_can_be_installed(
    helm: Helm, chart: str, installed: ControlPlane
) -> None:
    """Each operator can grant rights only in the namespaces that it watches."""
    teams = ("red", "blue")
    for team in teams:
        installed.kubectl("create", "namespace", f"{team}-apps")
        helm(
            "install", "triptych", chart, "-n", f"{team}-system", "--create-namespace",
            f"--kubeconfig={installed.kubeconfig}", "--set",
            f"crds.enabled=false,rbac.aggregate=false,watchNamespaces={{{team}-apps}}",
        )  # fmt: skip

    def grant(team: str, namespace: str, verb: str) -> subprocess.CompletedProcess[str]:
        owner = {
            "kind": "VLMService",
            "name": "demo",
            "uid": "5f0b4c2e-0000-4000-8000-000000000000",
        }
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {
                "name": f"gateway-of-{team}-{verb}",
                "namespace": namespace,
                "ownerReferences": [{**owner, "apiVersion": names.API_VERSION}],
            },
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": [verb]}],
        }
        return installed.kubectl(
            "create", "--dry-run=server", "-f", "-",
            f"--as=system:serviceaccount:{team}-system:triptych-operator",
            stdin=json.dumps(role), check=False,
        )  # fmt: skip

    assert grant("red", "red-apps", "watch").returncode == 0
    assert grant("blue", "blue-apps", "watch").returncode == 0
    assert "forbidden" in grant("red", "blue-apps", "watch").stderr
    assert "attempting to grant" in grant("red", "red-apps", "deletecollection").stderr
    helm("uninstall", "triptych", "-n", "red-system", f"--kubeconfig={installed.kubeconfig}")
    assert grant("blue", "blue-apps", "list").returncode == 0, "the other release still works"
    helm("uninstall", "triptych", "-n", "blue-system", f"--kubeconfig={installed.kubeconfig}")
    for team in teams:
        for namespace in (f"{team}-apps", f"{team}-system"):
            installed.kubectl("delete", "namespace", namespace, "--wait=false")
