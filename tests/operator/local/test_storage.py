"""Claims get folders of this machine, as a CSI driver gives them volumes."""

from pathlib import Path
from typing import Any

import pytest

from vlm_local.agent.storage import CLASS, PROVISIONER, volume_of
from vlm_local.client import ApiError, Client, Object
from vlm_local.waiting import until

from .pods import Pods, pod

CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
VOLUMES = "/api/v1/persistentvolumes"
ONCE = {"restartPolicy": "Never"}


def claim(name: str, **spec: Any) -> Object:
    size = {"resources": {"requests": {"storage": "1Gi"}}}
    return {
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], **size, **spec},
    }


def user(name: str, of: str, program: str, *, read_only: bool = False) -> Object:
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": of, "readOnly": read_only}}]
    mounts = [{"name": "v", "mountPath": "/data", "readOnly": read_only}]
    secure = {"runAsNonRoot": True, "allowPrivilegeEscalation": False}
    spec = {**ONCE, "volumes": volumes}
    return pod(name, program, volumeMounts=mounts, securityContext=secure, spec=spec)


def claims(pods: Pods) -> str:
    return pods.path.removesuffix("pods") + "persistentvolumeclaims"


def _files(folder: Path) -> dict[str, str] | None:
    if not folder.exists():
        return None
    return {path.name: path.read_text() for path in folder.iterdir()}


async def get(api: Client, path: str) -> Object | None:
    try:
        return await api.get(path)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def test_a_volume_is_that_of_its_claim_and_its_class(tmp_path: Path):
    wanted = claim("c", storageClassName="kept")
    wanted["metadata"] |= {"namespace": "ns", "uid": "u"}
    kept = {"metadata": {"name": "kept"}, "reclaimPolicy": "Retain"}
    made = volume_of(wanted, kept, tmp_path)
    assert made == volume_of(wanted, kept, tmp_path)
    assert made["metadata"]["name"] == "pvc-u"
    assert made["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert made["spec"]["claimRef"]["uid"] == "u"
    assert made["spec"]["hostPath"]["path"] == str(tmp_path / "pvc-u")


@pytest.mark.cluster
async def test_a_claim_without_a_class_is_shared_by_pods_and_goes_with_its_files(pods: Pods):
    api = pods.api
    made = await api.create(claims(pods), claim("shared"))
    assert made["spec"]["storageClassName"] == CLASS
    await pods.create(user("writes", "shared", "open('/data/file', 'w').write('kept')"))
    await pods.until_phase("writes", "Succeeded")
    program = (
        "print(open('/data/file').read())\n"
        "try: open('/data/x', 'w')\n"
        "except OSError as error: print(error.strerror)\n"
    )
    await pods.create(user("reads", "shared", program, read_only=True))
    await pods.until_phase("reads", "Succeeded")
    assert await pods.log("reads") == "kept\nRead-only file system\n"
    volume = await api.get(f"{VOLUMES}/pvc-{made['metadata']['uid']}")
    folder = Path(volume["spec"]["hostPath"]["path"])
    assert _files(folder) == {"file": "kept"}
    for name in ("writes", "reads"):
        await pods.delete(name, 0)
    await api.delete(f"{claims(pods)}/shared")

    async def gone() -> bool:
        return await get(api, f"{VOLUMES}/{volume['metadata']['name']}") is None

    await until(gone, seconds=60, awaited="the volume to be deleted")
    assert _files(folder) is None


@pytest.mark.cluster
async def test_a_class_that_binds_at_once_needs_no_pod(pods: Pods, namespace: str):
    api = pods.api
    immediate = {
        "metadata": {"name": namespace},
        "provisioner": PROVISIONER,
        "volumeBindingMode": "Immediate",
        "reclaimPolicy": "Delete",
    }
    await api.create(CLASSES, immediate)
    await api.create(claims(pods), claim("now", storageClassName=namespace))
    await api.create(claims(pods), claim("later", storageClassName=CLASS))
    await api.create(claims(pods), claim("never", storageClassName=""))

    async def bound() -> bool:
        return (await api.get(f"{claims(pods)}/now"))["status"]["phase"] == "Bound"

    await until(bound, seconds=60, awaited="the claim to be bound")
    for name in ("later", "never"):
        assert (await api.get(f"{claims(pods)}/{name}"))["status"]["phase"] == "Pending"
    await api.delete(f"{CLASSES}/{namespace}")
    for name in ("now", "later", "never"):
        await api.delete(f"{claims(pods)}/{name}")


@pytest.mark.cluster
async def test_a_job_runs_to_its_end_in_a_claim(pods: Pods, namespace: str):
    api = pods.api
    await api.create(claims(pods), claim("job"))
    template = user("x", "job", "print('done')")
    job = {
        "metadata": {"name": "job"},
        "spec": {"template": {"spec": template["spec"]}},
    }
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    await api.create(path, job)

    async def complete() -> bool:
        conditions = (await api.get(f"{path}/job"))["status"].get("conditions") or []
        return any(one["type"] == "Complete" and one["status"] == "True" for one in conditions)

    await until(complete, seconds=60, awaited="the Job to complete")
    await api.delete(f"{path}/job", {"propagationPolicy": "Background"})
    await api.delete(f"{claims(pods)}/job")
