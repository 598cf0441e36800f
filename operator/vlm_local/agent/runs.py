"""Prepares everything that one run of a container needs, again for each run."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import command
from .cgroups import Cgroups
from .container import CannotStartError, Prepared
from .logs import ContainerLog
from .process import Bind, ProcessSpec
from .volumes import VolumeError, Volumes

Spec = Mapping[str, Any]


class RunMaker:
    """Prepares the runs of one pod's containers. `binds` are its volumes, once mounted."""

    def __init__(
        self,
        facts: command.Facts,
        volumes: Volumes,
        *,
        images: command.Images,
        base: Mapping[str, str],
        cgroups: Cgroups,
        folder: Path,
        identities: bool,
    ) -> None:
        self.binds: Mapping[str, Path] = {}
        self._facts = facts
        self._volumes = volumes
        self._images = images
        self._base = base
        self._cgroups = cgroups
        self._folder = folder
        self._identities = identities

    async def prepare(self, pod: Spec, container: Spec, number: int) -> Prepared:
        """Prepare run `number`.

        Raises:
            CannotStartError: The image is unknown, the configuration is incomplete, or this
                machine refused a folder or a file.
        """
        try:
            return await self._prepared(pod, container, number)
        except (command.ConfigError, VolumeError) as error:
            raise CannotStartError("CreateContainerConfigError", str(error)) from error
        except OSError as error:  # a full disk, a subPath that leads through a file
            raise CannotStartError("CreateContainerError", str(error)) from error

    async def _prepared(self, pod: Spec, container: Spec, number: int) -> Prepared:
        start = command.entrypoint(container["image"], self._images)
        if start is None:
            known = ", ".join(sorted(self._images))
            raise CannotStartError(
                "ErrImagePull",
                f"{container['image']}: a local node knows the images {known}, and no registry",
            )
        objects = await self._volumes.data_of(command.references(container))
        env = command.environment(
            container, pod, self._facts, base=self._base_for(pod), objects=objects
        )
        mounts = [self._bind(mount, env) for mount in _mounts(container)]
        limits = container.get("resources", {}).get("limits", {})
        name = f"{pod['metadata']['uid']}-{container['name']}-{number}"
        cgroup = self._cgroups.create(
            name,
            memory_bytes=int(command.parse_quantity(limits["memory"]))
            if "memory" in limits
            else None,
            cpus=float(command.parse_quantity(limits["cpu"])) if "cpu" in limits else None,
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
            user=command.identity(container, pod) if self._identities else None,
        )
        log = ContainerLog(self._folder / "logs" / container["name"] / f"{number}.log")
        return Prepared(process, cgroup, log)

    def _base_for(self, pod: Spec) -> Mapping[str, str]:
        return {**self._base, "HOSTNAME": pod["metadata"]["name"]}

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


def _mounts(container: Spec) -> list[Spec]:
    return list(container.get("volumeMounts") or [])


def keep_code(binds: Sequence[Bind], needed: Iterable[Path]) -> list[Bind]:
    """Return the binds, and one for each needed folder that they would hide, read-only.

    Its place is made in the volume that hides it; in a read-only one, in the container alone.

    A checkout below /tmp would vanish under the emptyDir that a worker mounts there.
    """
    shown: list[Bind] = []
    for folder in needed:
        hiding = [bind for bind in binds if folder.is_relative_to(bind.path)]
        if not hiding or any(folder.is_relative_to(bind.path) for bind in shown):
            continue
        nearest = max(hiding, key=lambda bind: len(Path(bind.path).parts))
        if nearest.source.is_dir() and not nearest.read_only:
            inside = nearest.source / folder.relative_to(nearest.path)
            inside.mkdir(parents=True, exist_ok=True)
        shown.append(Bind(folder, str(folder), read_only=True))
    return [*binds, *shown]


def code_folders() -> list[Path]:
    """Return the folders of this interpreter and of everything that it may import."""
    entries = [sys.prefix, sys.base_prefix, *(entry for entry in sys.path if entry)]
    folders = {Path(entry).resolve() for entry in entries}
    return sorted(folder for folder in folders if folder.is_dir())
