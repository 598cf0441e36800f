"""VLMServices for the operator's tests: a plain one, a builder, and hypothesis' many."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from hypothesis import strategies as st

from support.fakes import FakeCluster, FakeScraper, run_controllers
from vlm_operator import names
from vlm_operator.api import VLMService, parse
from vlm_operator.cluster import (
    DEPLOYMENT,
    EVENT,
    KINDS,
    POD,
    REPLICA_SET,
    SECRET,
    VLM_POOL,
    VLM_SERVICE,
    Cluster,
    Manifest,
)
from vlm_operator.names import Role
from vlm_operator.reconcile.decisions import Options
from vlm_operator.reconcile.queue import Outcome
from vlm_operator.reconcile.service import ServiceReconciler
from vlm_operator.state import DeploymentState, Observed

MANUAL = {"mode": "Manual", "replicas": 1}


def body(spec: dict[str, Any] | None = None, *, name: str = "demo", **pools: Any) -> Manifest:
    """A VLMService as a user applies it, by default with three pools of one replica."""
    found: dict[str, Any] = {
        "model": {"uri": "pvc://shapes"},
        "pools": pools or {role: {"scaling": dict(MANUAL)} for role in names.POOL_ROLES},
    }
    return {
        "apiVersion": VLM_SERVICE.api_version,
        "kind": VLM_SERVICE.kind,
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {**found, **(spec or {})},
    }


def pool(replicas: int = 1, **more: Any) -> dict[str, Any]:
    """A pool of a fixed size."""
    return {"scaling": {"mode": "Manual", "replicas": replicas}, **more}


def external(minimum: int = 1, maximum: int = 4, **more: Any) -> dict[str, Any]:
    """A pool that others scale."""
    scaling = {"mode": "External", "minReplicas": minimum, "maxReplicas": maximum}
    return {"scaling": scaling, **more}


def service(manifest: Manifest | None = None) -> VLMService:
    """The same, parsed, with the identity that an API server gives."""
    found = copy.deepcopy(manifest or body())
    found["metadata"] |= {"uid": "uid-service", "generation": 1}
    return parse(found)


def empty(now: float = 1_800_000_000.0) -> Observed:
    """A cluster in which nothing is there yet."""
    return Observed(service=None, children={}, pods=(), node_classes={}, samples={}, now=now)


def pause(outcome: Outcome) -> float:
    """Seconds until the next turn if nothing else happens; infinite if there is none."""
    return min(outcome.again.values(), default=float("inf"))


class World:
    """A fake cluster, a service in it, and the loop that reconciles it."""

    def __init__(self, manifest: Manifest | None = None, **options: Any) -> None:
        self.cluster = FakeCluster()
        self.scraper = FakeScraper()
        self.options = Options(**options)
        self.name = (manifest or body())["metadata"]["name"]
        self.apply(manifest or body())
        self.loop = self.new_loop()

    def new_loop(
        self, cluster: Cluster | None = None, options: Options | None = None
    ) -> ServiceReconciler:
        """The loop of a new operator process."""
        return ServiceReconciler(
            "ns",
            self.name,
            cluster=cluster or self.cluster,
            scraper=self.scraper,
            options=options or self.options,
            clock=self.cluster.clock,
        )

    def apply(self, manifest: Manifest) -> None:
        """Do what `kubectl apply` does."""
        live = self.cluster.all(VLM_SERVICE)
        if not live:
            self.cluster.hardware(manifest)
            return
        self.cluster.edit(
            VLM_SERVICE, "ns", self.name, lambda item: item.update(spec=manifest["spec"])
        )

    def turn(self, *, seconds: float = 1.0) -> float:
        """Let time pass, then take one turn; returns the seconds until the next one is due."""
        self.cluster.clock.now += seconds
        return pause(asyncio.run(self.loop.turn()))

    def converge(self, *, turns: int = 12, start: bool = True) -> None:
        """Turn until nothing is written any more, with controllers at work in between."""
        for _ in range(turns):
            before = self.cluster.version
            pause = self.turn(seconds=3.0)
            run_controllers(self.cluster, start=start)
            if self.cluster.version == before and pause > 1.0:
                return
        raise AssertionError(f"still writing: {self.cluster.writes[-5:]}")

    def written(self) -> int:
        """How often the cluster was written to so far."""
        return len(self.cluster.writes)

    @property
    def status(self) -> Manifest:
        """The service's status."""
        found: Manifest = self.cluster.all(VLM_SERVICE)[0].get("status", {})
        return found

    def condition(self, kind: str) -> Manifest:
        """One condition of the service."""
        return next(item for item in self.status["conditions"] if item["type"] == kind)

    def deployments(self) -> dict[str, int]:
        """Replicas by Deployment, revisions left out of the names."""
        return {
            "-".join(item["metadata"]["name"].split("-")[:2]): item["spec"]["replicas"]
            for item in self.cluster.all(DEPLOYMENT)
        }

    def states(self) -> list[DeploymentState]:
        """The Deployments of pools, as decisions see them."""
        found = [DeploymentState.of(item) for item in self.cluster.all(DEPLOYMENT)]
        return [item for item in found if item is not None and item.role is not Role.GATEWAY]

    def scale(self, role: str, replicas: int) -> None:
        """Do what `kubectl scale vlmp/demo-ROLE` does."""
        self.cluster.edit(
            VLM_POOL,
            "ns",
            f"{self.name}-{role}",
            lambda item: item["spec"].update(replicas=replicas),
        )

    def snapshot(self, *, keys: bool = True) -> dict[tuple[str, str], Any]:
        """Everything there is, without what differs from run to run: uids, versions, times.

        Without `keys`, the Secrets' data, which two worlds never share, is left out too.
        """
        return {
            (kind.kind, item["metadata"]["name"]): _plain(item, keys=keys)
            for kind in KINDS.values()
            if kind not in (EVENT, POD, REPLICA_SET)
            for item in self.cluster.all(kind)
        }


def _plain(manifest: Manifest, *, keys: bool) -> Manifest:
    meta = {
        key: value
        for key, value in manifest["metadata"].items()
        if key in ("labels", "name", "namespace")
    }
    found = {**copy.deepcopy(manifest), "metadata": meta}
    found.pop("status", None)
    if found["kind"] == SECRET.kind and not keys:  # names may contain digests of keys
        found["data"] = sorted(name.rpartition(".")[2] for name in found.get("data", {}))
    if "serviceRef" in found.get("spec", {}):
        found["spec"]["serviceRef"].pop("uid", None)
    return found


_NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", fullmatch=True)
_RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        "requests": st.fixed_dictionaries(
            {"cpu": st.sampled_from(["1", "500m", "0.5"]), "memory": st.sampled_from(["1Gi"])}
        ),
        "limits": st.fixed_dictionaries({"nvidia.com/gpu": st.integers(1, 4).map(str)}),
    },
)
_SCALING = st.one_of(
    st.integers(1, 6).map(lambda count: {"mode": "Manual", "replicas": count}),
    st.tuples(st.integers(1, 3), st.integers(3, 9)).map(
        lambda pair: {"mode": "External", "minReplicas": pair[0], "maxReplicas": pair[1]}
    ),
)


@st.composite
def specs(draw: st.DrawFn) -> Manifest:
    """Any VLMService that the API server would take, of what is built."""

    def one_pool() -> dict[str, Any]:
        found: dict[str, Any] = {"scaling": draw(_SCALING)}
        if draw(st.booleans()):
            place = {"nodeSelector": {"zone": draw(_NAMES)}} if draw(st.booleans()) else {}
            variant = {"name": draw(_NAMES), "placement": place, "resources": draw(_RESOURCES)}
            found["variants"] = [variant]
        if draw(st.booleans()):
            found["engine"] = {
                "extraArgs": ["--max-requests=8"],
                "env": [{"name": "OMP_NUM_THREADS", "value": "2"}],
            }
        if draw(st.booleans()):
            found["drain"] = {"timeoutSeconds": draw(st.integers(1, 900))}
        if draw(st.booleans()):
            found["podTemplate"] = {
                "metadata": {"labels": {"team": "vision"}},
                "spec": {
                    "priorityClassName": "inference",
                    "volumes": [{"name": "scratch", "emptyDir": {}}],
                    "containers": [
                        {
                            "name": "worker",
                            "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                        }
                    ],
                    "topologySpreadConstraints": [
                        {
                            "topologyKey": "zone",
                            "maxSkew": 1,
                            "whenUnsatisfiable": "ScheduleAnyway",
                        }
                    ],
                },
            }
        return found

    pools = {"decode": one_pool()}
    for role in ("encoder", "prefill"):
        if draw(st.booleans()):
            pools[role] = one_pool()
    hub = draw(st.booleans())
    model: dict[str, Any] = (
        {"uri": "hf://org/name", "revision": "abc"}
        if hub
        else {"uri": draw(st.sampled_from(["pvc://shapes", "pvc://claim/a/b"]))}
    )
    if hub and draw(st.booleans()):
        model["credentialsSecretRef"] = {"name": "token"}
    spec: dict[str, Any] = {"model": model, "pools": pools}
    if draw(st.booleans()):
        spec["gateway"] = {
            "replicas": draw(st.integers(1, 3)),
            "auth": {"secretRef": {"name": "keys"}},
            "service": {"port": 8000, "annotations": {"a": "b"}},
        }
    if draw(st.booleans()):
        spec["stopped"] = True
    if draw(st.booleans()):
        spec["imagePullSecrets"] = [{"name": "pull"}]
    return body(spec, name=draw(_NAMES))


def kstatus(service: Manifest) -> str:
    """Return the status that kstatus computes for a resource of an unknown kind.

    The rules are those of sigs.k8s.io/cli-utils/pkg/kstatus.
    """
    status, generation = service.get("status", {}), service["metadata"]["generation"]
    if status.get("observedGeneration", generation) != generation:
        return "InProgress"
    known = {item["type"]: item["status"] for item in status.get("conditions", [])}
    if known.get("Reconciling") == "True":
        return "InProgress"
    if known.get("Stalled") == "True":
        return "Failed"
    return "Current" if known.get("Ready") == "True" else "InProgress"


def rps(world: World) -> str:
    """Return Ready, Reconciling, Stalled: `T/F/F`."""
    kinds = ("Ready", "Reconciling", "Stalled")
    return "/".join(world.condition(kind)["status"][0] for kind in kinds)
