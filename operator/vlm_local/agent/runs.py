"""Prepares everything that one run of a container needs, again for each run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import code_mounts, command, quantity
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
            memory_bytes=int(quantity.parse(limits["memory"])) if "memory" in limits else None,
            cpus=float(quantity.parse(limits["cpu"])) if "cpu" in limits else None,
        )
        process = ProcessSpec(
            argv=command.on_shared_network(
                command.arguments(container, start, env), self._facts.pod_ip
            ),
            env=env,
            cwd=container.get("workingDir") or "/",
            stage=self._folder / "roots" / f"{container['name']}-{number}",
            mounts=code_mounts.keep(mounts, code_mounts.code()),
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
