"""Runs the steps of the demo; each reports what it does and what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from rich.text import Text

from vlm_cli.access import Access, is_ready, open_cluster
from vlm_cli.client import read_image
from vlm_cli.forward import Candidates, forward_to_ready
from vlm_cli.output import ttft_breakdown
from vlm_local import build
from vlm_local.cluster import NodeAgent
from vlm_local.controlplane import ControlPlane, await_crds
from vlm_local.demo.ask import ANSWER, DESCRIBE, QUESTION, Answer, ask, is_right
from vlm_local.demo.checks import CHECKOUT, check_checkout, check_machine, choose_port
from vlm_local.demo.watch import Reporter, pod_state, service_state
from vlm_local.errors import LocalError
from vlm_local.settings import LocalSettings
from vlm_local.subprocesses import output_of
from vlm_local.waiting import until
from vlm_operator import names
from vlm_operator.cluster import POD, VLM_SERVICE, Manifest
from vlm_operator.errors import ClusterError, UnavailableError

READY_SECONDS = 240.0
SERVICE, NAMESPACE = "shapes", "default"
INSTALL = CHECKOUT / "install.yaml"
QUICKSTART = CHECKOUT / "examples/quickstart"
MODEL = CHECKOUT / "examples/shapes/model"
IMAGE = QUICKSTART / "image.png"
VLM = Path(sys.executable).with_name("vlm")


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """Options of the user; without an image and a question, the quickstart's are used.

    Attributes:
        once: whether the demo ends after the answer.
        port: port of the API on 127.0.0.1.
        kubeconfig: of an existing cluster; None means a new one.
    """

    once: bool = False
    image: Path | None = None
    question: str | None = None
    port: int | None = None
    kubeconfig: Path | None = None

    @property
    def prompt(self) -> str:
        """The question to ask."""
        return self.question or (DESCRIBE if self.image else QUESTION)

    @property
    def expected(self) -> str | None:
        """The correct answer; None if it is unknown."""
        return ANSWER if self.image is None and self.question is None else None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The cluster of the demo: path of kubectl, kubeconfig, and whether it ends with the demo."""

    kubectl: Path
    kubeconfig: Path
    own: bool

    async def run(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Call `run_blocking` in a thread."""
        return await asyncio.to_thread(self.run_blocking, *arguments, stdin=stdin)

    def run_blocking(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Run kubectl and return its output.

        Raises:
            LocalError: kubectl failed; the message has its output.
        """
        command = [self.kubectl, f"--kubeconfig={self.kubeconfig}", *arguments]
        return output_of(command, stdin=stdin, check=True)


class Demo:
    """One run of the demo. `answered` is whether the answer was correct."""

    def __init__(self, options: DemoOptions, *, reporter: Reporter) -> None:
        self.answered = False
        self._options = options
        self._reporter = reporter
        self._settings = LocalSettings.read()

    async def run(self) -> int:
        """Run all steps; return the exit status.

        Raises:
            LocalError: a step failed; the message names it and the remedy.
        """
        image = self._options.image or IMAGE
        check_checkout()
        content = read_image(image)
        port = choose_port(self._options.port)
        async with (
            self._cluster() as cluster,
            open_cluster(str(cluster.kubeconfig), NAMESPACE) as access,
        ):
            if cluster.own:
                await cluster.run("apply", "-f", "-", stdin=json.dumps(model_volume(MODEL)))
            await self._install(cluster)
            await self._wait_until_ready(cluster, access)
            async with forward_to_ready(
                access,
                find=lambda: gateways(access),
                port=names.PORT_GATEWAY,
                local_port=port,
                report=self._reporter.say,
            ) as url:
                self._reporter.say(f"{url}/v1 leads to the gateway; asking about {image.name}")
                answer = await self._ask(url, content)
                self._reporter.console.print(Text(await cluster.run("get", "vlm")))
                if not self._options.once:
                    self._print_next_steps(cluster, url)
                    await asyncio.Event().wait()
        return self._exit_status(answer)

    @contextlib.asynccontextmanager
    async def _cluster(self) -> AsyncIterator[Cluster]:
        """Yield the cluster of the options, or a new one that ends with the block."""
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

    async def _install(self, cluster: Cluster) -> None:
        say = self._reporter.say
        await cluster.run("apply", "-f", INSTALL)
        say("applied install.yaml: CRDs, roles, and the operator as a Deployment")
        await asyncio.to_thread(await_crds, cluster.run_blocking, failure=LocalError)
        await cluster.run("apply", "-n", NAMESPACE, "-f", QUICKSTART)
        say("applied examples/quickstart: one VLMService, pools encoder, prefill, decode")

    async def _wait_until_ready(self, cluster: Cluster, access: Access) -> None:
        """Print each change until the service is Ready."""

        async def ready() -> bool:
            try:
                pods = await remaining_pods(access)
                service = await access.cluster.get(VLM_SERVICE, NAMESPACE, SERVICE)
            except UnavailableError:
                return False
            for pod in pods:
                self._reporter.state(f"pod {pod['metadata']['name']}", pod_state(pod))
            if service is None:
                return False
            is_done, state = service_state(service)
            self._reporter.state(f"VLMService {SERVICE}", state)
            return is_done

        try:
            await until(ready, seconds=READY_SECONDS, awaited=f"{SERVICE} to be Ready", every=0.2)
        except TimeoutError as error:
            raise LocalError(f"{error}\n{await diagnosis(cluster, access)}", "") from error

    async def _ask(self, url: str, image: bytes) -> Answer:
        self._reporter.console.print(Text(f"\n  {self._options.prompt}", style="bold"))
        self._reporter.piece("  ")
        answer = await ask(
            url,
            model=SERVICE,
            question=self._options.prompt,
            image=image,
            on_text=self._reporter.piece,
        )
        self._reporter.piece("\n\n")
        self._reporter.console.print(ttft_breakdown(answer.stages))
        self._reporter.say(f"first token after {answer.ttft_seconds * 1e3:.0f} ms at the client")
        self.answered = is_right(answer.text, self._options.expected)
        return answer

    def _print_next_steps(self, cluster: Cluster, url: str) -> None:
        console = self._reporter.console
        console.print(f"\nThe API is {url}/v1 (model {SERVICE}), the cluster is yours:\n")
        for line in (
            f"export KUBECONFIG={cluster.kubeconfig}",
            f"export PATH={VLM.parent}:{cluster.kubectl.parent}:$PATH",
            "kubectl get vlm,vlmp,pods -o wide",
            f'vlm chat {SERVICE} --image {IMAGE} "What shape is yellow?"',
        ):
            console.print(f"  {line}", soft_wrap=True)  # to be copied as one line
        console.print()
        ends = "and the cluster with it" if cluster.own else "; what was applied stays"
        console.print(f"Ctrl-C ends the demo {ends}.")

    def _exit_status(self, answer: Answer) -> int:
        if self.answered:
            return 0
        expected = self._options.expected
        wrong = (
            f"the answer is {answer.text!r}, not {expected!r}" if expected else "it has no answer"
        )
        raise LocalError(f"The service is Ready, but {wrong}.", "")


async def remaining_pods(access: Access) -> list[Manifest]:
    """Return the pods of the operator and of the quickstart that are not being deleted."""
    return [
        pod
        for namespace in (names.OPERATOR_NAMESPACE, NAMESPACE)
        for pod in await access.cluster.list(POD, namespace)
        if "deletionTimestamp" not in pod["metadata"]
    ]


async def diagnosis(cluster: Cluster, access: Access) -> str:
    """Return the end of the log of each pod that is not Ready."""
    lines = []
    for pod in await remaining_pods(access):
        if (state := pod_state(pod)) != "Ready":
            meta = pod["metadata"]
            lines.append(f"pod {meta['name']}: {state}")
            with contextlib.suppress(LocalError):
                log = await cluster.run("logs", "-n", meta["namespace"], meta["name"], "--tail=15")
                lines += [f"    {line}" for line in log.splitlines()]
    return "\n".join(lines)


async def gateways(access: Access) -> Candidates | None:
    """Return the gateway pods of the quickstart; None if the cluster does not answer."""
    labels = {names.LABEL_SERVICE: SERVICE, names.LABEL_ROLE: names.Role.GATEWAY.value}
    try:
        pods = await access.cluster.list(POD, NAMESPACE, labels)
    except ClusterError:
        return None
    ready = [
        pod["metadata"]["name"]
        for pod in pods
        if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
    ]
    return Candidates(frozenset(pod["metadata"]["name"] for pod in pods), tuple(ready))


def model_volume(model: Path) -> Manifest:
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
