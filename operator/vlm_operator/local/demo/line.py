"""The demo's steps, each saying what it does and what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from vlm_operator import names
from vlm_operator.local import build
from vlm_operator.local.client import Access, ApiError, Client, Object
from vlm_operator.local.cluster import NodeAgent
from vlm_operator.local.controlplane import CRD_TRIES, WAIT_FOR_CRDS, ControlPlane
from vlm_operator.local.demo.ask import (
    ANSWER,
    DESCRIBE,
    QUESTION,
    Answer,
    ask,
    is_right,
    read_picture,
)
from vlm_operator.local.demo.checks import CHECKOUT, check_checkout, check_machine, choose_port
from vlm_operator.local.demo.forward import Gateways, forward
from vlm_operator.local.demo.watch import Reporter, pod_state, service_state
from vlm_operator.local.errors import LocalError
from vlm_operator.local.settings import LocalSettings
from vlm_operator.local.spawn import output_of
from vlm_operator.local.waiting import until

READY_SECONDS = 240.0
SERVICE, NAMESPACE = "shapes", "default"
SERVICES = f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL_SERVICE}"
INSTALL = CHECKOUT / "install.yaml"
QUICKSTART = CHECKOUT / "examples/quickstart"
MODEL = CHECKOUT / "examples/shapes/model"
PICTURE = QUICKSTART / "picture.png"
VLM = Path(sys.executable).with_name("vlm")


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """What the user asked for; without a picture and a question of their own, ours are asked.

    Attributes:
        once: End after the answer.
        image: A picture.
        question: About it.
        port: Of the API on 127.0.0.1.
        kubeconfig: Of a cluster that exists.
    """

    once: bool = False
    image: Path | None = None
    question: str | None = None
    port: int | None = None
    kubeconfig: Path | None = None

    @property
    def asked(self) -> str:
        """The question to ask."""
        return self.question or (DESCRIBE if self.image else QUESTION)

    @property
    def expected(self) -> str | None:
        """The right answer, where one is known."""
        return ANSWER if self.image is None and self.question is None else None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster to work in: kubectl's path, its kubeconfig, and whether it ends with the demo."""

    kubectl: Path
    kubeconfig: Path
    own: bool

    async def run(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Run kubectl and return what it prints.

        Raises:
            LocalError: It failed, with what it said.
        """
        command = [self.kubectl, f"--kubeconfig={self.kubeconfig}", *arguments]
        return await asyncio.to_thread(output_of, command, stdin=stdin, check=True)


async def _await_crds(cluster: Cluster) -> None:
    """Wait until every CRD is established; see `ControlPlane.await_crds`."""
    for _ in range(CRD_TRIES - 1):
        with contextlib.suppress(LocalError):
            await cluster.run(*WAIT_FOR_CRDS)
            return
    await cluster.run(*WAIT_FOR_CRDS)


class Demo:
    """One run of the demo. `answered` tells whether a right answer came."""

    def __init__(
        self,
        options: DemoOptions,
        *,
        reporter: Reporter,
        waterfall: Callable[[Mapping[str, float]], RenderableType],
    ) -> None:
        self.answered = False
        self._options = options
        self._reporter = reporter
        self._waterfall = waterfall
        self._settings = LocalSettings.read()

    async def run(self) -> int:
        """Go the whole way; return the exit status.

        Raises:
            LocalError: A step failed; says which, and what to do.
        """
        image = self._options.image or PICTURE
        check_checkout()
        picture = read_picture(image)
        port = choose_port(self._options.port)
        async with self._cluster() as cluster, Client(Access.read(cluster.kubeconfig)) as api:
            if cluster.own:
                await self._volume(cluster)
            await self._install(cluster)
            await self._wait_until_ready(api)
            async with forward(
                cluster.kubectl,
                cluster.kubeconfig,
                find=lambda: self._gateways(api),
                port=port,
                say=self._reporter.say,
            ) as url:
                self._reporter.say(f"{url}/v1 leads to the gateway; asking about {image.name}")
                answer = await self._ask(url, picture)
                self._reporter.show(Text(await cluster.run("get", "vlm")))
                if not self._options.once:
                    self._say_what_next(cluster, url)
                    await asyncio.Event().wait()
        return self._verdict(answer)

    @contextlib.asynccontextmanager
    async def _cluster(self) -> AsyncIterator[Cluster]:
        """The cluster that was named, or one of our own that ends with the block."""
        say = self._reporter.say
        if self._options.kubeconfig is not None:
            binaries = build.find_binaries(self._settings, progress=say)
            yield Cluster(binaries["kubectl"], self._options.kubeconfig, own=False)
            return
        plane = ControlPlane(settings=self._settings, progress=say)
        check_machine(self._settings)
        async with plane, NodeAgent(plane, settings=self._settings) as agent:
            say("nodes: " + ", ".join(agent.nodes) + " (simulated; their pods are real processes)")
            if agent.limits_missing:
                say("CPU and memory limits are not enforced here (no cgroup of our own)")
            yield Cluster(plane.binaries["kubectl"], plane.kubeconfig, own=True)

    async def _volume(self, cluster: Cluster) -> None:
        await cluster.run("apply", "-f", "-", stdin=json.dumps(model_volume(MODEL)))

    async def _install(self, cluster: Cluster) -> None:
        say = self._reporter.say
        await cluster.run("apply", "-f", INSTALL)
        say("applied install.yaml: CRDs, roles, and the operator as a Deployment")
        await _await_crds(cluster)
        await cluster.run("apply", "-n", NAMESPACE, "-f", QUICKSTART)
        say("applied examples/quickstart: one VLMService, pools encoder, prefill, decode")

    async def _wait_until_ready(self, api: Client) -> None:
        """Print what changes until the service is Ready."""

        async def ready() -> bool:
            for pod in await self._pods(api):
                self._reporter.state(f"pod {pod['metadata']['name']}", pod_state(pod))
            service = await api.get(f"{SERVICES}/{SERVICE}")
            done, said = service_state(service)
            self._reporter.state(f"VLMService {SERVICE}", said)
            return done

        try:
            await until(ready, seconds=READY_SECONDS, awaited=f"{SERVICE} to be Ready", every=0.2)
        except TimeoutError as error:
            raise LocalError(f"{error}\n{await self._diagnosis(api)}", "") from error

    async def _pods(self, api: Client) -> list[Object]:
        found = []
        for namespace in (names.OPERATOR_NAMESPACE, NAMESPACE):
            listed = await api.get(f"/api/v1/namespaces/{namespace}/pods")
            found += [pod for pod in listed["items"] if "deletionTimestamp" not in pod["metadata"]]
        return found

    async def _diagnosis(self, api: Client) -> str:
        """The end of the log of each pod that is not Ready."""
        lines = []
        for pod in await self._pods(api):
            if (state := pod_state(pod)) != "Ready":
                where = pod["metadata"]
                lines.append(f"pod {where['name']}: {state}")
                path = f"/api/v1/namespaces/{where['namespace']}/pods/{where['name']}/log"
                with contextlib.suppress(ApiError):
                    log = await api.text(path, tailLines="15")
                    lines += [f"    {line}" for line in log.splitlines()]
        return "\n".join(lines)

    async def _gateways(self, api: Client) -> Gateways | None:
        labels = f"{names.LABEL_SERVICE}={SERVICE},{names.LABEL_ROLE}={names.Role.GATEWAY}"
        try:
            listed = await api.get(f"/api/v1/namespaces/{NAMESPACE}/pods", labelSelector=labels)
        except ApiError:  # an API server that is away says nothing of its pods
            return None
        by_name = {f"{NAMESPACE}/{pod['metadata']['name']}": pod for pod in listed["items"]}
        ready = [
            name
            for name, pod in by_name.items()
            if pod_state(pod) == "Ready" and "deletionTimestamp" not in pod["metadata"]
        ]
        return Gateways(frozenset(by_name), tuple(ready))

    async def _ask(self, url: str, picture: bytes) -> Answer:
        self._reporter.show(Text(f"\n  {self._options.asked}", style="bold"))
        self._reporter.piece("  ")
        answer = await ask(
            url,
            model=SERVICE,
            question=self._options.asked,
            picture=picture,
            told=self._reporter.piece,
        )
        self._reporter.piece("\n\n")
        self._reporter.show(self._waterfall(answer.stages))
        self._reporter.say(f"first token after {answer.ttft_seconds * 1e3:.0f} ms at the client")
        self.answered = is_right(answer.text, self._options.expected)
        return answer

    def _say_what_next(self, cluster: Cluster, url: str) -> None:
        console = self._reporter.console
        console.print(f"\nThe API is {url}/v1 (model {SERVICE}), the cluster is yours:\n")
        console.print(f"  export KUBECONFIG={cluster.kubeconfig}")
        console.print(f"  {cluster.kubectl} get vlm,vlmp,pods -o wide")
        console.print(f'  {VLM} chat {SERVICE} --image {PICTURE} "What shape is yellow?"\n')
        ends = "and the cluster with it" if cluster.own else "; what was applied stays"
        console.print(f"Ctrl-C ends the demo {ends}.")

    def _verdict(self, answer: Answer) -> int:
        if self.answered:
            return 0
        expected = self._options.expected
        wrong = f"the answer is {answer.text!r}, not {expected!r}" if expected else "no answer came"
        raise LocalError(f"The line is up, but {wrong}.", "")


def model_volume(model: Path) -> Object:
    """Return a PersistentVolume on this machine's folder `model`, and the claim `shapes` on it."""
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": SERVICE},
        "spec": {
            **common,
            "capacity": {"storage": "1Gi"},
            "hostPath": {"path": str(model), "type": "Directory"},
            "claimRef": {"namespace": NAMESPACE, "name": SERVICE},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": SERVICE, "namespace": NAMESPACE},
        "spec": {
            **common,
            "volumeName": SERVICE,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    return {"apiVersion": "v1", "kind": "List", "items": [volume, claim]}
