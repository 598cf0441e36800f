"""Collects the files of a bundle. What cannot be read is recorded, and the rest is collected."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import importlib.metadata
import io
import json
import platform
from collections.abc import Awaitable, Callable, Mapping

import yaml
from rich.console import Console

from vlm_cli.access import Access
from vlm_cli.bundle.redact import redact_log, redact_object, redact_text
from vlm_cli.doctor.command import examine, print_findings
from vlm_cli.doctor.gather import gather
from vlm_cli.logs.command import sources_of
from vlm_cli.output import PIPE_WIDTH
from vlm_cli.pod_http import PodReader, PodReadError
from vlm_cli.why import explanation
from vlm_operator import names
from vlm_operator.cluster import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    JOB,
    NETWORK_POLICY,
    PDB,
    POD,
    REPLICA_SET,
    SERVICE,
    VLM_NODE_CLASS,
    VLM_POOL,
    Kind,
    Manifest,
)
from vlm_operator.errors import ClusterError

# Secrets are not in this list, and nothing else of this module reads objects by kind.
_LABELLED = (
    VLM_POOL,
    DEPLOYMENT,
    REPLICA_SET,
    CLAIM,
    JOB,
    POD,
    SERVICE,
    NETWORK_POLICY,
    PDB,
    CONFIG_MAP,
)
_OPERATOR = {names.LABEL_APP_NAME: "triptych-operator"}
_MAX_CONCURRENT = 8


@dataclasses.dataclass
class Bundle:
    """Redacted files by path, and the reason of each failure by path. `collect` writes it."""

    files: dict[str, str] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def manifest(self, title: str) -> str:
        """Return the text of manifest.txt: the files with their sizes, then the failures."""
        files = [f"{len(text.encode()):9d}  {path}" for path, text in sorted(self.files.items())]
        failed = [f"{path}: {reason}" for path, reason in sorted(self.failures.items())]
        return "\n".join(
            [
                title,
                "No Secret was read. Values that look like secrets, data: URLs and prompts are",
                "replaced by REDACTED. Read the files before you publish them.",
                "",
                "bytes, file:",
                *files,
                "",
                f"not collected: {len(failed)}",
                *failed,
                "",
            ]
        )


async def collect(access: Access, service: Manifest, *, lines: int) -> Bundle:
    """Read everything about a service; `lines` is the number of last lines of each log."""
    collector = _Collector(access, service, lines=lines)
    await collector.run()
    return collector.bundle


class _Collector:
    def __init__(self, access: Access, service: Manifest, *, lines: int) -> None:
        self.bundle = Bundle()
        self._access = access
        self._service = service
        self._name = str(service["metadata"]["name"])
        self._lines = lines
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def run(self) -> None:
        self._add_object("service", self._service)
        labels = {names.LABEL_SERVICE: self._name}
        space = self._access.namespace
        found = dict(
            zip(
                _LABELLED,
                await asyncio.gather(*(self._objects(kind, space, labels) for kind in _LABELLED)),
                strict=True,
            )
        )
        operators, _ = await asyncio.gather(
            self._operators(), self._objects(VLM_NODE_CLASS, None, {})
        )
        involved = {
            self._name,
            *(str(i["metadata"]["name"]) for some in found.values() for i in some),
        }
        async with PodReader(self._access) as reader:
            await asyncio.gather(
                self._events(involved),
                self._text("doctor.txt", self._doctor),
                self._text("why.txt", lambda: explanation(self._access, self._service)),
                self._text("versions.txt", lambda: self._versions([*operators, *found[POD]])),
                *(self._logs(pod, f"logs/{_name(pod)}") for pod in found[POD]),
                *(self._pages(pod, reader) for pod in found[POD]),
                *(self._logs(pod, f"operator/logs/{_name(pod)}") for pod in operators),
            )

    async def _objects(
        self, kind: Kind, namespace: str | None, labels: Mapping[str, str], prefix: str = ""
    ) -> list[Manifest]:
        folder = f"{prefix}{kind.plural}"
        try:
            async with self._slots:
                found = await self._access.cluster.list(kind, namespace, labels)
        except ClusterError as error:
            self.bundle.failures[folder] = redact_log(error.message)
            return []
        for item in found:
            self._add_object(f"{folder}/{_name(item)}", item)
        return found

    async def _operators(self) -> list[Manifest]:
        """Add the operators' Deployments and pods; returns the pods."""
        space: str | None = None
        found = await self._objects(DEPLOYMENT, None, _OPERATOR, "operator/")
        if not found:
            space = names.OPERATOR_NAMESPACE  # a user may see only this namespace
            found = await self._objects(DEPLOYMENT, space, _OPERATOR, "operator/")
        spaces = {str(item["metadata"]["namespace"]) for item in found} or {
            names.OPERATOR_NAMESPACE
        }
        pods = [await self._objects(POD, one, _OPERATOR, "operator/") for one in sorted(spaces)]
        return [pod for some in pods for pod in some]

    async def _events(self, involved: set[str]) -> None:
        try:
            found = await self._access.cluster.list(EVENT, self._access.namespace)
        except ClusterError as error:
            self.bundle.failures["events.yaml"] = redact_log(error.message)
            return
        ours = [item for item in found if item.get("involvedObject", {}).get("name") in involved]
        ours.sort(key=lambda item: (str(item.get("lastTimestamp") or ""), _name(item)))
        self.bundle.files["events.yaml"] = _yaml(ours)

    async def _logs(self, pod: Manifest, folder: str) -> None:
        """Add the log of each container, and the log before its last restart."""
        restarts = {
            str(status["name"]): int(status.get("restartCount", 0))
            for status in (pod.get("status") or {}).get("containerStatuses") or []
        }
        for source in sources_of(pod):
            for previous in (False, True) if restarts.get(source.container) else (False,):
                path = f"{folder}/{source.container}{'.previous' if previous else ''}.log"
                read = functools.partial(self._log, pod, source.container, previous=previous)
                await self._text(path, read)

    async def _log(self, pod: Manifest, container: str, *, previous: bool) -> str:
        meta = pod["metadata"]
        async with self._slots:
            stream = self._access.cluster.log(
                meta["namespace"],
                meta["name"],
                container,
                previous=previous,
                tail_lines=self._lines,
            )
            raw = [line async for line in stream]
        return "\n".join([*(line.decode(errors="replace") for line in raw), ""])

    async def _pages(self, pod: Manifest, reader: PodReader) -> None:
        name = _name(pod)
        if (pod.get("status") or {}).get("phase") != "Running":
            self.bundle.failures[f"stats/{name}.json"] = "the pod does not run"
            return
        for path, url in ((f"stats/{name}.json", "/stats"), (f"metrics/{name}.txt", "/metrics")):
            read = functools.partial(self._page, reader, name, url)
            await self._text(path, read, redact=_redact_page)

    async def _page(self, reader: PodReader, pod: str, path: str) -> str:
        return (await reader.get(pod, port=names.PORT_HTTP, path=path)).decode(errors="replace")

    async def _doctor(self) -> str:
        now = datetime.datetime.now(datetime.UTC).timestamp()
        facts = await gather(self._access, self._access.namespace, now=now, probe=False)
        text = io.StringIO()
        print_findings(examine(facts), Console(file=text, width=PIPE_WIDTH, soft_wrap=True))
        return text.getvalue()

    async def _versions(self, pods: list[Manifest]) -> str:
        images = {
            f"{status.get('image', '')} {status.get('imageID', '')}".strip()
            for pod in pods
            for status in (pod.get("status") or {}).get("containerStatuses") or []
        }
        server = await self._access.cluster.version()
        lines = [
            f"vlm {_version()}, Python {platform.python_version()}, {platform.platform()}",
            f"API server {server}",
            *(f"image {image}" for image in sorted(images)),
        ]
        return "\n".join([*lines, ""])

    async def _text(
        self,
        path: str,
        read: Callable[[], Awaitable[str]],
        *,
        redact: Callable[[str], str] = redact_log,
    ) -> None:
        """Add a text, or the reason why there is none."""
        try:
            self.bundle.files[path] = redact(await read())
        except (ClusterError, PodReadError) as error:
            self.bundle.failures[path] = redact_log(str(error))
        except Exception as error:  # noqa: BLE001  an object that our code cannot read may be the bug
            self.bundle.failures[path] = redact_log(f"{type(error).__name__}: {error}")

    def _add_object(self, path: str, item: Manifest) -> None:
        self.bundle.files[f"{path}.yaml"] = _yaml(item)


def _redact_page(body: str) -> str:
    """Redact /stats, which is JSON, or /metrics; both have keys such as `text` without prompts."""
    try:
        return json.dumps(redact_object(json.loads(body)), indent=2) + "\n"
    except ValueError:
        return redact_text(body)


def _version() -> str:
    try:
        return importlib.metadata.version("triptych")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _yaml(value: object) -> str:
    return str(yaml.safe_dump(redact_object(value), sort_keys=True, allow_unicode=True))


def _name(item: Manifest) -> str:
    return str(item["metadata"]["name"])
