"""Services that are being deleted while no operator is left, on a real API server."""

import json
import uuid

import pytest

from support.world import body
from vlm_cli.output import CliError
from vlm_cli.release import release
from vlm_local.controlplane import ControlPlane
from vlm_operator import names

pytestmark = pytest.mark.cluster


async def test_a_deleted_service_goes_and_others_stay_as_they_are(
    control_plane: ControlPlane, capsys: pytest.CaptureFixture[str]
):
    kubectl, namespace = control_plane.kubectl, f"release-{uuid.uuid4().hex[:8]}"
    where = {
        "namespace": namespace,
        "kubeconfig": str(control_plane.kubeconfig),
    }
    kubectl("apply", "-f", "crds")
    control_plane.await_crds()
    kubectl("create", "namespace", namespace)
    for name, more in (("plain", []), ("shared", ["example.com/other"]), ("alive", [])):
        manifest = body(name=name)
        manifest["metadata"] |= {"namespace": namespace, "finalizers": [names.FINALIZER, *more]}
        kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    for name in ("plain", "shared"):
        kubectl("-n", namespace, "delete", "vlm", name, "--wait=false")
    with pytest.raises(CliError, match="'alive' is not being deleted"):
        await release("alive", **where)
    await release(**where)
    assert capsys.readouterr().out.splitlines() == [
        f"released {namespace}/plain",
        f"released {namespace}/shared",
    ]
    found = json.loads(kubectl("-n", namespace, "get", "vlm", "-o", "json").stdout)["items"]
    assert {item["metadata"]["name"]: item["metadata"]["finalizers"] for item in found} == {
        "alive": [names.FINALIZER],
        "shared": ["example.com/other"],
    }
    with pytest.raises(CliError, match="no VLMService is being deleted"):
        await release(**where)
    for name in ("alive", "shared"):
        patch = '{"metadata": {"finalizers": null}}'
        kubectl("-n", namespace, "patch", "vlm", name, "--type=merge", "-p", patch)
    kubectl("delete", "namespace", namespace, "--wait=false")
