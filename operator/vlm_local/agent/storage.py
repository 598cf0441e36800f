"""Provisions volumes as a CSI driver does: one folder of this machine for each claim of its class.

claim of the class ─ the controller manager asks this provisioner ─▶ a pod has a node ─▶ folder, PV
PV Released, policy Delete ─▶ folder and PV deleted

The class is the default one and waits for the first consumer. Its folders are on the one machine
of all nodes, so any access mode holds.
"""

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

from vlm_local.client import ApiError, Client, Object

logger = logging.getLogger(__name__)
CLASS = "local"
PROVISIONER = "triptych.dev/local"
RETRY_SECONDS = 1.0
_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_VOLUMES = "/api/v1/persistentvolumes"
_CLAIMS = "/api/v1/persistentvolumeclaims"
# The controller manager writes the first of them, the scheduler the second.
_ASKED = "volume.kubernetes.io/storage-provisioner"
_NODE = "volume.kubernetes.io/selected-node"
_PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"


class Storage:
    """The provisioner. Several may run: a volume's name follows from its claim.

    Args:
        client: client of an administrator.
        folder: folder of all volumes.
    """

    def __init__(self, client: Client, folder: Path) -> None:
        self._client = client
        self._folder = folder

    async def run(self) -> None:
        """Create the class, then serve claims until cancelled."""
        await self._ensure_class()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(_CLAIMS, self._provision))
            group.create_task(self._follow(_VOLUMES, self._reclaim))

    async def _ensure_class(self) -> None:
        """Create the class if it does not exist; an existing one may be the user's."""
        while True:
            try:
                await self._client.create(_CLASSES, storage_class())
            except ApiError as error:
                if error.status == 409:
                    return
                logger.info("class not created", extra={"error": str(error)})
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _follow(self, path: str, act: Any) -> None:
        """Act on each object that exists or changes; again after an error."""
        async for event, item in self._client.watch(path):
            items = item["items"] if event == "SYNC" else [item] if event != "DELETED" else []
            for one in items:
                while True:
                    try:
                        await act(one)
                    except (ApiError, OSError) as error:
                        name = one["metadata"]["name"]
                        logger.info("volume", extra={"object": name, "error": str(error)})
                        if isinstance(error, ApiError) and error.status in (404, 409, 422):
                            break  # a newer event follows
                        await asyncio.sleep(RETRY_SECONDS)
                    else:
                        break

    async def _provision(self, claim: Object) -> None:
        notes = claim["metadata"].get("annotations") or {}
        if not _is_pending(claim) or notes.get(_ASKED) != PROVISIONER:
            return
        found = await self._client.get(f"{_CLASSES}/{claim['spec']['storageClassName']}")
        if found.get("volumeBindingMode") == "WaitForFirstConsumer" and _NODE not in notes:
            return
        volume = volume_of(claim, found, self._folder)
        await asyncio.to_thread(_make_folder, Path(volume["spec"]["hostPath"]["path"]))
        await self._client.create(_VOLUMES, volume)

    async def _reclaim(self, volume: Object) -> None:
        meta, spec = volume["metadata"], volume["spec"]
        ours = (meta.get("annotations") or {}).get(_PROVISIONED_BY) == PROVISIONER
        released = volume.get("status", {}).get("phase") == "Released"
        if not ours or not released or spec.get("persistentVolumeReclaimPolicy") != "Delete":
            return
        place = Path(spec["hostPath"]["path"])
        if place.parent == self._folder:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
        if "deletionTimestamp" not in meta:
            await self._client.delete(f"{_VOLUMES}/{meta['name']}")


def storage_class() -> Object:
    """Return the StorageClass of this provisioner, the default one of the cluster."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": PROVISIONER,
        "volumeBindingMode": "WaitForFirstConsumer",
        "reclaimPolicy": "Delete",
    }


def volume_of(claim: Object, storage_class: Object, folder: Path) -> Object:
    """Return the PersistentVolume of a claim; `folder` has those of all claims."""
    meta, spec = claim["metadata"], claim["spec"]
    name = f"pvc-{meta['uid']}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {_PROVISIONED_BY: PROVISIONER}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "persistentVolumeReclaimPolicy": storage_class.get("reclaimPolicy", "Delete"),
            "storageClassName": storage_class["metadata"]["name"],
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
            "hostPath": {"path": str(folder / name), "type": "DirectoryOrCreate"},
        },
    }


def _make_folder(place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o777)  # containers have any user


def _is_pending(claim: Object) -> bool:
    phase = claim.get("status", {}).get("phase", "Pending")
    gone = "deletionTimestamp" in claim["metadata"]
    return phase == "Pending" and not claim["spec"].get("volumeName") and not gone
