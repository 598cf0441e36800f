"""A pod's volumes as folders of this machine, written atomically and updated while it runs.

emptyDir, hostPath, PVC ─▶ a folder         ConfigMap, Secret, projected, downwardAPI ─▶ files:
                                             key ─▶ ..data/key,  ..data ─▶ ..<version>/
"""

import asyncio
import base64
import dataclasses
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlm_local.client import ApiError, Client

from . import command

logger = logging.getLogger(__name__)
Files = dict[str, bytes]
TOKEN_SECONDS = 3607
FILE_MODE = 0o644  # the default of Kubernetes
RENEW_AFTER = 0.8  # of a token's life
_COLLECTIONS = {"ConfigMap": "configmaps", "Secret": "secrets"}
_FILE_KINDS = ("configMap", "secret", "projected", "downwardAPI")


class VolumeError(Exception):
    """A volume is not available now; the message names the missing object or the error."""


@dataclasses.dataclass
class _Token:
    value: bytes
    renew_at: float


class Volumes:
    """The volumes of one pod, under `folder`."""

    def __init__(
        self,
        pod: Mapping[str, Any],
        facts: command.Facts,
        client: Client,
        folder: Path,
        *,
        renew_after: float = RENEW_AFTER,
    ) -> None:
        self.pod = pod
        self._renew_after = renew_after
        self._facts = facts
        self._client = client
        self._folder = folder
        self._tokens: dict[tuple[str, str], _Token] = {}

    @property
    def _namespace(self) -> str:
        return str(self.pod["metadata"]["namespace"])

    async def prepare(self) -> dict[str, Path]:
        """Create all volumes; return the folder of each.

        Raises:
            VolumeError: one cannot be created yet; retry.
        """
        volumes = self.pod["spec"].get("volumes") or []
        return {volume["name"]: await self._prepare(volume) for volume in volumes}

    async def refresh(self) -> None:
        """Write changes of ConfigMaps and Secrets, and renew tokens, until cancelled."""
        volumes = self.pod["spec"].get("volumes") or []
        files = [volume for volume in volumes if any(kind in volume for kind in _FILE_KINDS)]
        objects = {reference for volume in files for reference in _watched(volume)}
        async with asyncio.TaskGroup() as group:
            for kind, name in objects:
                group.create_task(self._watch(kind, name, files))
            group.create_task(self._renew(files))

    async def data_of(
        self, references: set[tuple[str, str]]
    ) -> dict[tuple[str, str], dict[str, str]]:
        """Return the data of those `(kind, name)` that exist, as text.

        Raises:
            VolumeError: the API server refused for another reason.
        """
        texts = {}
        for kind, name in references:
            data = await self._data(kind, name)
            if data is not None:
                texts[kind, name] = {key: text.decode() for key, text in data.items()}
        return texts

    def remove(self) -> None:
        """Delete the files of this pod, not those of a hostPath."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _prepare(self, volume: Mapping[str, Any]) -> Path:
        folder: Path = self._folder / volume["name"]
        if "hostPath" in volume:
            return host_path(volume["hostPath"])
        if "persistentVolumeClaim" in volume:
            return await self._claim(volume["persistentVolumeClaim"]["claimName"])
        if "emptyDir" in volume:
            return _create(folder, mode=0o777)
        if not any(kind in volume for kind in _FILE_KINDS):
            [kind] = set(volume) - {"name"}
            raise VolumeError(f"volume {volume['name']}: {kind} is not supported on a local node")
        files = await self._files(volume)
        write_atomically(_create(folder, mode=0o755), files, mode=_mode(volume))
        return folder

    async def _claim(self, name: str) -> Path:
        claim = await self._get(
            f"/api/v1/namespaces/{self._namespace}/persistentvolumeclaims/{name}"
        )
        if claim is None or claim.get("status", {}).get("phase") != "Bound":
            raise VolumeError(f"persistentvolumeclaim {name!r} is not bound")
        volume = await self._get(f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
        if volume is None or "hostPath" not in volume["spec"]:
            raise VolumeError(
                f"persistentvolumeclaim {name!r}: only hostPath volumes are supported"
            )
        return host_path(volume["spec"]["hostPath"])

    async def _files(self, volume: Mapping[str, Any]) -> Files:
        if "projected" in volume:
            files: Files = {}
            for source in volume["projected"].get("sources") or []:
                files |= await self._source(source)
            return files
        if "secret" in volume:
            source = {**volume["secret"], "name": volume["secret"]["secretName"]}
            return await self._source({"secret": source})
        return await self._source(volume)

    async def _source(self, source: Mapping[str, Any]) -> Files:
        if "serviceAccountToken" in source:
            wanted = source["serviceAccountToken"]
            return {wanted["path"]: await self._token(wanted)}
        if "downwardAPI" in source:
            return self._downward(source["downwardAPI"])
        kind, wanted = (
            ("ConfigMap", source["configMap"])
            if "configMap" in source
            else ("Secret", source["secret"])
        )
        data = await self._data(kind, wanted["name"])
        if data is None:
            if wanted.get("optional"):
                return {}
            raise VolumeError(f'{kind.lower()} "{wanted["name"]}" not found')
        if not wanted.get("items"):
            return data
        missing = [item["key"] for item in wanted["items"] if item["key"] not in data]
        if missing and not wanted.get("optional"):
            raise VolumeError(f'{kind.lower()} "{wanted["name"]}" has no key {missing[0]!r}')
        return {one["path"]: data[one["key"]] for one in wanted["items"] if one["key"] in data}

    def _downward(self, wanted: Mapping[str, Any]) -> Files:
        files = {}
        containers = {one["name"]: one for one in self.pod["spec"]["containers"]}
        for item in wanted.get("items") or []:
            if "fieldRef" in item:
                text = command.pod_field(item["fieldRef"]["fieldPath"], self.pod, self._facts)
            else:
                reference = item["resourceFieldRef"]
                text = command.container_resource(reference, containers[reference["containerName"]])
            files[item["path"]] = text.encode()
        return files

    async def _token(self, wanted: Mapping[str, Any]) -> bytes:
        audience = wanted.get("audience", "")
        lifetime = wanted.get("expirationSeconds", TOKEN_SECONDS)
        token = self._tokens.get((audience, wanted["path"]))
        if token is None or time.monotonic() >= token.renew_at:
            account = self.pod["spec"].get("serviceAccountName", "default")
            value = await self._request_token(account, audience, lifetime)
            token = _Token(value, time.monotonic() + self._renew_after * lifetime)
            self._tokens[audience, wanted["path"]] = token
        return token.value

    async def _request_token(self, account: str, audience: str, lifetime: int) -> bytes:
        """Request a token that is bound to the pod (TokenRequest)."""
        metadata = self.pod["metadata"]
        reference = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        spec: dict[str, Any] = {"expirationSeconds": lifetime, "boundObjectRef": reference}
        if audience:
            spec["audiences"] = [audience]
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{account}/token"
        try:
            answer = await self._client.create(path, {"spec": spec})
        except ApiError as error:
            raise VolumeError(f"token of serviceaccount {account}: {error}") from error
        return str(answer["status"]["token"]).encode()

    async def _data(self, kind: str, name: str) -> Files | None:
        thing = await self._get(f"/api/v1/namespaces/{self._namespace}/{_COLLECTIONS[kind]}/{name}")
        return None if thing is None else _decoded(kind, thing)

    async def _get(self, path: str) -> Mapping[str, Any] | None:
        try:
            return await self._client.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            # just after the binding of a pod, the node authorizer may still answer 403
            raise VolumeError(str(error)) from error

    async def _watch(self, kind: str, name: str, volumes: list[Mapping[str, Any]]) -> None:
        path = f"/api/v1/namespaces/{self._namespace}/{_COLLECTIONS[kind]}"
        users = [volume for volume in volumes if (kind, name) in _watched(volume)]
        async for event, _ in self._client.watch(path, fieldSelector=f"metadata.name={name}"):
            if event != "DELETED":
                await self._rewrite(users)

    async def _renew(self, volumes: list[Mapping[str, Any]]) -> None:
        while True:
            renew_at = min((token.renew_at for token in self._tokens.values()), default=None)
            if renew_at is None:
                return
            await asyncio.sleep(max(1.0, renew_at - time.monotonic()))
            await self._rewrite(volumes)

    async def _rewrite(self, volumes: list[Mapping[str, Any]]) -> None:
        """Write the current content of the volumes. If that fails, the old content stays."""
        for volume in volumes:
            try:
                files = await self._files(volume)
                write_atomically(self._folder / volume["name"], files, mode=_mode(volume))
            except (VolumeError, command.ConfigError, OSError) as error:
                logger.info(
                    "volume not updated", extra={"volume": volume["name"], "error": str(error)}
                )


def _decoded(kind: str, thing: Mapping[str, Any]) -> Files:
    data = thing.get("data") or {}
    if kind == "Secret":
        return {name: base64.b64decode(value) for name, value in data.items()}
    binary = thing.get("binaryData") or {}
    texts = {name: value.encode() for name, value in data.items()}
    return texts | {name: base64.b64decode(value) for name, value in binary.items()}


def _mode(volume: Mapping[str, Any]) -> int:
    """Return the mode of a volume's files; a pod of this machine runs as their owner."""
    kind = next(kind for kind in _FILE_KINDS if kind in volume)
    return int(volume[kind].get("defaultMode", FILE_MODE))


def _watched(volume: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return the objects to watch for a volume. The cluster's CA never changes."""
    sources = volume["projected"].get("sources") or [] if "projected" in volume else [volume]
    found = set()
    for source in sources:
        if "configMap" in source:
            found.add(("ConfigMap", source["configMap"]["name"]))
        if "secret" in source:
            found.add(
                ("Secret", source["secret"].get("secretName") or source["secret"].get("name"))
            )
    return found - {("ConfigMap", "kube-root-ca.crt")}


def host_path(source: Mapping[str, Any]) -> Path:
    """Return the existing folder or file of a hostPath.

    Raises:
        VolumeError: there is none.
    """
    path = Path(source["path"])
    if source.get("type") == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise VolumeError(f"hostPath {path} does not exist on this machine")
    return path


def _create(folder: Path, *, mode: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    return folder


def write_atomically(folder: Path, files: Mapping[str, bytes], *, mode: int = FILE_MODE) -> None:
    """Replace the files of `folder` by one rename of the link `..data`, as a kubelet does."""
    link = folder / "..data"
    before = link.readlink().name if link.is_symlink() else None
    if before is not None and _read(folder / before) == dict(files):
        return
    version = folder / f"..{time.time_ns()}"
    for name, content in files.items():
        path = version / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
    version.mkdir(exist_ok=True)
    fresh = folder / "..data_tmp"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(version.name)
    fresh.rename(link)
    tops = {name.split("/")[0] for name in files}
    for top in tops:
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(f"..data/{top}")
    for entry in folder.iterdir():
        if entry.is_symlink() and not entry.name.startswith("..") and entry.name not in tops:
            entry.unlink()
    if before is not None:
        shutil.rmtree(folder / before, ignore_errors=True)


def _read(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
