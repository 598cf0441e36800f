"""Prepares everything that one run of a container needs, again for each run."""

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from vlm_operator.api import quantity

from . import command
from .cgroups import Cgroups
from .container import Backoff, CannotStartError, Prepared
from .logs import ContainerLog
from .process import Bind, ProcessSpec
from .volumes import VolumeError, Volumes

Spec = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Machine:
    """What all pods of an agent share.

    Attributes:
        images: command of each image name.
        environment: environment of every container.
        backoff: pauses between restarts.
        folder: folder for the files of pods.
        cgroups: limits of CPU and memory.
        identities: whether containers get the requested uid and gid.
        http: session for probes.
    """

    images: command.Images
    environment: Mapping[str, str]
    backoff: Backoff
    folder: Path
    cgroups: Cgroups
    identities: bool
    http: aiohttp.ClientSession


class RunMaker:
    """Prepares the runs of one pod's containers. `binds` are its volumes, once mounted."""

    def __init__(
        self, facts: command.Facts, volumes: Volumes, machine: Machine, folder: Path
    ) -> None:
        self.binds: Mapping[str, Path] = {}
        self._facts = facts
        self._volumes = volumes
        self._machine = machine
        self._folder = folder

    async def prepare(self, pod: Spec, container: Spec, number: int) -> Prepared:
        """Prepare run `number`.

        Raises:
            CannotStartError: the image is unknown, the configuration is incomplete, or this
                machine refused a folder or a file.
        """
        try:
            return await self._prepared(pod, container, number)
        except (command.ConfigError, VolumeError) as error:
            raise CannotStartError("CreateContainerConfigError", str(error)) from error
        except OSError as error:  # a full disk, a subPath that leads through a file
            raise CannotStartError("CreateContainerError", str(error)) from error

    async def _prepared(self, pod: Spec, container: Spec, number: int) -> Prepared:
        start = command.entrypoint(container["image"], self._machine.images)
        if start is None:
            images = ", ".join(sorted(self._machine.images))
            raise CannotStartError(
                "ErrImagePull",
                f"{container['image']}: a local node has the images {images}, and no registry",
            )
        objects = await self._volumes.data_of(command.references(container))
        base = {**self._machine.environment, "HOSTNAME": pod["metadata"]["name"]}
        env = command.environment(container, pod, self._facts, base=base, objects=objects)
        mounts = [self._bind(mount, env) for mount in container.get("volumeMounts") or []]
        limits = {
            name: quantity.parse(str(value))
            for name, value in container.get("resources", {}).get("limits", {}).items()
        }
        cgroup = self._machine.cgroups.create(
            f"{pod['metadata']['uid']}-{container['name']}-{number}",
            memory_bytes=int(limits["memory"]) if "memory" in limits else None,
            cpus=float(limits["cpu"]) if "cpu" in limits else None,
        )
        process = ProcessSpec(
            argv=command.on_shared_network(
                command.arguments(container, start, env), self._facts.pod_ip
            ),
            env=env,
            cwd=container.get("workingDir") or "/",
            stage=self._folder / "roots" / f"{container['name']}-{number}",
            mounts=keep_code(mounts, code_folders()),
            read_only=container.get("securityContext", {}).get("readOnlyRootFilesystem", False),
            cgroups=cgroup.procs,
            user=command.identity(container, pod) if self._machine.identities else None,
        )
        log = ContainerLog(self._folder / "logs" / container["name"] / f"{number}.log")
        return Prepared(process, cgroup, log)

    def _bind(self, mount: Spec, env: Mapping[str, str]) -> Bind:
        source = self.binds[mount["name"]]
        inside = mount.get("subPath") or command.expand(mount.get("subPathExpr", ""), env)
        if inside:
            if ".." in Path(inside).parts or Path(inside).is_absolute():
                raise command.ConfigError(f"subPath {inside!r} leaves its volume")
            source = source / inside
            if not source.exists():
                source.mkdir(parents=True)
        return Bind(source, mount["mountPath"], mount.get("readOnly", False))


def keep_code(binds: Sequence[Bind], needed: Iterable[Path]) -> list[Bind]:
    """Return the binds, and a read-only one for each needed folder that they would hide.

    The emptyDir that a worker mounts at /tmp would hide a checkout below /tmp. The mount point is
    created in the volume; if that is read-only, only in the container.
    """
    added: list[Bind] = []
    for folder in needed:
        hiding = [bind for bind in binds if folder.is_relative_to(bind.path)]
        if not hiding or any(folder.is_relative_to(bind.path) for bind in added):
            continue
        nearest = max(hiding, key=lambda bind: len(Path(bind.path).parts))
        if nearest.source.is_dir() and not nearest.read_only:
            inside = nearest.source / folder.relative_to(nearest.path)
            inside.mkdir(parents=True, exist_ok=True)
        added.append(Bind(folder, str(folder), read_only=True))
    return [*binds, *added]


def code_folders() -> list[Path]:
    """Return the folders of this interpreter and of everything that it may import."""
    entries = [sys.prefix, sys.base_prefix, *(entry for entry in sys.path if entry)]
    folders = {Path(entry).resolve() for entry in entries}
    return sorted(folder for folder in folders if folder.is_dir())
