"""A VLMService with real pods, as its user has it: kubectl, the openai client, and /stats."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import yaml

from vlm_local.client import Client, Object
from vlm_local.controlplane import ControlPlane
from vlm_local.demo.line import IMAGE, model_volume
from vlm_local.waiting import until
from vlm_operator import names

T = TypeVar("T")
START_SECONDS = 180.0  # of a few processes on two cores that other tests use as well
STATS_SECONDS = 30.0  # for a throttled pod to answer, on the same machine
QUESTION = "What is to the right of the circle?"
ANSWER = "blue triangle"
_STATUSES = 'jsonpath={range .items[*]}{.metadata.name}{" "}{.status.containerStatuses}{"\\n"}{end}'
EXAMPLES = Path(__file__).parents[1] / "examples"


@contextlib.contextmanager
def place(cluster: ControlPlane, namespace: str, model: Path) -> Iterator[None]:
    """A namespace with the claim `shapes` on the folder `model`; its pods have ended at the end."""
    cluster.kubectl("create", "namespace", namespace)
    try:
        volume, claim = model_volume(model)["items"]
        volume["metadata"]["name"] = claim["spec"]["volumeName"] = namespace
        volume["spec"]["claimRef"]["namespace"] = claim["metadata"]["namespace"] = namespace
        both = json.dumps({"apiVersion": "v1", "kind": "List", "items": [volume, claim]})
        cluster.kubectl("apply", "-f", "-", stdin=both)
        yield
    finally:
        delete = ("delete", "--ignore-not-found", "--timeout=90s")
        cluster.kubectl(*delete, "-n", namespace, "vlm", "--all", "--wait")
        cluster.kubectl("-n", namespace, "wait", "pods", "--all", "--for=delete", "--timeout=90s")
        for thing in ("namespace", "persistentvolume"):
            cluster.kubectl(*delete, thing, namespace, "--wait=false")


def state_of(cluster: ControlPlane) -> str:
    """Pods and their Events in all namespaces, and the last lines of each worker's two runs."""
    parts = [
        _said(cluster, "get", "pods,vlm", "-A", "-o", "wide"),
        _said(cluster, "get", "events", "-A", "--sort-by=.lastTimestamp"),
        _said(cluster, "get", "pods", "-A", "-l", names.LABEL_SERVICE, "-o", _STATUSES),
    ]
    where = "jsonpath={.items[*].metadata.namespace}"
    services = cluster.kubectl("get", "vlm", "-A", "-o", where, check=False).stdout
    for namespace in sorted(set(services.split())):
        logs = ("logs", "-n", namespace, "-l", names.LABEL_SERVICE, "--prefix", "--tail=30")
        parts += [_said(cluster, *logs), _said(cluster, *logs, "--previous")]
    return "\n\n".join(parts)


def _said(cluster: ControlPlane, *arguments: str) -> str:
    """A command's output, errors included; its end if it is long."""
    ended = cluster.kubectl(*arguments, check=False)
    return f"$ kubectl {' '.join(arguments)}\n{(ended.stdout + ended.stderr)[-20_000:]}"


def example(folder: str) -> Object:
    """The VLMService of an example, without a namespace."""
    [file] = (EXAMPLES / folder).glob("*.yaml")
    manifest: Object = yaml.safe_load(file.read_text())
    manifest["metadata"].pop("namespace", None)
    return manifest


def cached(
    folder: str, *, env: dict[str, str], claim: Object | None = None, **model: Any
) -> Object:
    """The example with `model.cache`: these fields of the model, and variables of its Job."""
    variables = [{"name": name, "value": value} for name, value in env.items()]
    manifest = example(folder)
    manifest["spec"]["model"] |= {
        **model,
        "cache": {
            "claim": {"size": "1Gi", **(claim or {})},
            "podTemplate": {"spec": {"containers": [{"name": "fetch", "env": variables}]}},
        },
    }
    return manifest


def hold(pools: Object, *, milliseconds: int) -> None:
    """Have encoder and prefill keep each request for a while, so that what happens meets it."""
    for role, stage in (("encoder", "encode"), ("prefill", "prefill")):
        pools[role]["engine"] = {"extraArgs": [f"--inject-delay-ms={stage}={milliseconds}"]}


@dataclasses.dataclass(frozen=True)
class Served:
    """One service in one namespace of a cluster; `api` is open."""

    cluster: ControlPlane
    api: Client
    namespace: str
    name: str

    async def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """What kubectl prints, in this namespace, errors included."""
        ended = await asyncio.to_thread(
            self.cluster.kubectl, "-n", self.namespace, *arguments, stdin=stdin, check=check
        )
        return ended.stdout + ended.stderr

    async def apply(self, manifest: Object, *, check: bool = True) -> str:
        return await self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest), check=check)

    def path(self, plural: str, name: str = "", *, group: str = "/api/v1") -> str:
        return f"{group}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    async def service(self) -> Object:
        group = f"/apis/{names.API_VERSION}"
        return await self.api.get(self.path(names.PLURAL_SERVICE, self.name, group=group))

    async def ready(self, *, seconds: float = START_SECONDS) -> Object:
        """The service when this generation is Ready, and no pod is being deleted."""

        async def seen() -> Object | None:
            service = await self.service()
            current = service.get("status", {}).get("observedGeneration")
            if current != service["metadata"]["generation"]:
                return None
            if condition(service, "Ready").get("status") != "True":
                return None
            every = await self.pods(leaving=True)
            ended = ("Succeeded", "Failed")  # of the Job of model.cache
            running = [pod for pod in every if pod["status"].get("phase") not in ended]
            return service if all(is_ready(pod) for pod in running) else None

        return await found(seen, seconds=seconds, awaited=f"{self.name} to be Ready", every=0.2)

    async def pods(self, role: names.Role | None = None, *, leaving: bool = False) -> list[Object]:
        """Pods of the service, by name; those that are being deleted only if `leaving`."""
        labels = f"{names.LABEL_SERVICE}={self.name}"
        labels += f",{names.LABEL_ROLE}={role}" if role else ""
        listed = await self.api.get(self.path("pods"), labelSelector=labels)
        return [
            pod for pod in listed["items"] if leaving or "deletionTimestamp" not in pod["metadata"]
        ]

    async def pod(self, role: names.Role) -> Object:
        """The only pod of a role."""
        [pod] = await self.pods(role)
        return pod

    async def num_ready(self, role: names.Role, count: int) -> list[Object]:
        """The pods of a role once exactly `count` exist, all of them ready."""

        async def seen() -> list[Object]:
            pods = await self.pods(role, leaving=True)
            return pods if len(pods) == count and all(is_ready(pod) for pod in pods) else []

        awaited = f"{count} ready pods of role {role}"
        return await found(seen, seconds=START_SECONDS, awaited=awaited, every=0.1)

    async def until_idle(self, *, seconds: float) -> None:
        """Wait until no pod holds a request, a lease or a KV block of one."""

        async def idle() -> bool:
            stats = [await stats_of(pod) for pod in await self.pods()]
            return all(is_idle(one) for one in stats)

        await until(idle, seconds=seconds, awaited="requests, leases and blocks to be given back")

    @contextlib.asynccontextmanager
    async def client(
        self, pod: Object | None = None, *, key: str = "none"
    ) -> AsyncIterator[openai.AsyncOpenAI]:
        """The openai client at the address of a gateway pod: what it sees is not retried."""
        gateway = pod or (await self._addressed(names.Role.GATEWAY))[0]
        url = f"http://{in_url(gateway['status']['podIP'])}:{names.PORT_GATEWAY}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            yield client

    async def _addressed(self, role: names.Role) -> list[Object]:
        """Pods of a role that have an address; a pod that was just made has none yet."""

        async def seen() -> list[Object]:
            return [pod for pod in await self.pods(role) if pod["status"].get("podIP")]

        return await found(seen, seconds=START_SECONDS, awaited=f"the address of a {role}")

    async def ask(self, *, max_tokens: int = 16, pod: Object | None = None, **more: str) -> str:
        """The whole answer about the quickstart's image."""
        async with self.client(pod, **more) as client:
            answer = await client.chat.completions.create(**body(self.name, max_tokens))
        return (answer.choices[0].message.content or "").strip()

    async def stream(
        self,
        *,
        max_tokens: int,
        pod: Object | None = None,
        told: Callable[[int], Awaitable[None]] | None = None,
    ) -> str:
        """The same as a stream; `told` is called after each part with the number of parts."""
        pieces: list[str] = []
        async with self.client(pod) as client:
            asked = body(self.name, max_tokens)
            async for chunk in await client.chat.completions.create(stream=True, **asked):
                if chunk.choices and (piece := chunk.choices[0].delta.content):
                    pieces.append(piece)
                    if told is not None:
                        await told(len(pieces))
        return "".join(pieces).strip()


def body(model: str, max_tokens: int) -> dict[str, Any]:
    """A greedy question about the quickstart's image."""
    image = base64.b64encode(IMAGE.read_bytes()).decode()
    url = {"url": f"data:image/png;base64,{image}"}
    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    return {"model": model, "temperature": 0, "max_tokens": max_tokens, "messages": messages}


async def found(
    ask: Callable[[], Awaitable[T | None]], *, seconds: float, awaited: str, every: float = 0.05
) -> T:
    """Wait for something, and return it."""
    thing = await until(ask, seconds=seconds, awaited=awaited, every=every)
    assert thing is not None
    return thing


async def stats_of(pod: Object) -> dict[str, Any]:
    """The pod's own account of itself."""
    is_gateway = role_of(pod) == names.Role.GATEWAY
    port = names.PORT_GATEWAY_ADMIN if is_gateway else names.PORT_HTTP
    async with httpx.AsyncClient(timeout=STATS_SECONDS) as client:
        answer = await client.get(f"http://{in_url(pod['status']['podIP'])}:{port}/stats")
    stats: dict[str, Any] = answer.raise_for_status().json()
    return stats


def is_idle(stats: dict[str, Any]) -> bool:
    held = (stats["kv"] or {}).get("running_tokens", 0) + (stats["kv"] or {}).get(
        "reserved_tokens", 0
    )
    leases = sum((stats["leases"] or {}).values())
    return not (stats["inflight"] or stats["queue"]["requests"] or held or leases)


def role_of(pod: Object) -> str:
    return str(pod["metadata"]["labels"][names.LABEL_ROLE])


def is_ready(pod: Object) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def names_of(things: Sequence[Object]) -> set[str]:
    return {str(thing["metadata"]["name"]) for thing in things}


def condition(thing: Object, kind: str) -> dict[str, Any]:
    conditions = thing.get("status", {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == kind), {})


def num_restarts(pod: Object) -> int:
    [status] = pod["status"]["containerStatuses"]
    return int(status["restartCount"])


async def kill(pod: Object) -> None:
    """SIGKILL the pod's first process, and return when it is gone."""
    [status] = pod["status"]["containerStatuses"]
    pid = int(status["containerID"].removeprefix("process://"))
    os.kill(pid, signal.SIGKILL)

    process = Path(f"/proc/{pid}")

    async def gone() -> bool:
        return not await asyncio.to_thread(process.exists)

    await until(gone, seconds=30, awaited=f"process {pid} to be gone")


def in_url(address: str) -> str:
    """An IP address as the host of a URL."""
    return f"[{address}]" if ":" in address else address


def elapsed(began: float) -> str:
    return f"{time.monotonic() - began:.1f} s"
