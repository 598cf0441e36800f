"""Computes a pod's status from the state of its containers. Pure.

containers, volumes, gates ──▶ phase, conditions, containerStatuses       as a kubelet reports them
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_operator.cluster import timestamp


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A container that does not run, and the reason."""

    reason: str
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Running:
    """A container that has run since `started_at`, seconds since the epoch."""

    started_at: float


@dataclasses.dataclass(frozen=True)
class Terminated:
    """A container that ended. The exit code of a signal is 128 + its number."""

    exit_code: int
    started_at: float
    finished_at: float
    reason: str = ""
    message: str = ""
    container_id: str = ""

    @property
    def why(self) -> str:
        """The reason in the words of a kubelet."""
        return self.reason or ("Completed" if self.exit_code == 0 else "Error")


@dataclasses.dataclass(frozen=True)
class ContainerView:
    """The known state of one container.

    Attributes:
        sidecar: an init container with restartPolicy Always: it runs as long as the pod does.
    """

    name: str
    image: str
    state: Waiting | Running | Terminated = Waiting("ContainerCreating")
    last: Terminated | None = None
    num_restarts: int = 0
    started: bool = False
    ready: bool = False
    container_id: str = ""
    sidecar: bool = False


@dataclasses.dataclass(frozen=True)
class PodView:
    """The known state of one pod. Addresses are None until it has them."""

    containers: Sequence[ContainerView]
    init_containers: Sequence[ContainerView] = ()
    pod_ip: str | None = None
    host_ip: str | None = None
    started_at: float = 0.0
    terminating: bool = False


def pod_status(
    pod: Mapping[str, Any], view: PodView, conditions: Sequence[Mapping[str, Any]], *, now: float
) -> dict[str, Any]:
    """Return the part of the status of `pod` that a node writes.

    Args:
        pod: its spec and the readiness gates in its conditions count.
        view: state of its containers.
        conditions: last result of this function, for transition times.
        now: seconds since the epoch.
    """
    phase = pod_phase(view, restart_policy=pod["spec"].get("restartPolicy", "Always"))
    status: dict[str, Any] = {
        "observedGeneration": pod["metadata"].get("generation", 1),
        "phase": phase,
        "startTime": timestamp(view.started_at),
        "containerStatuses": _statuses(view, view.containers),
        "conditions": _with_times(_conditions(pod, view, phase), conditions, now),
    }
    if view.init_containers:
        status["initContainerStatuses"] = _statuses(view, view.init_containers)
    if view.host_ip:
        status |= {"hostIP": view.host_ip, "hostIPs": [{"ip": view.host_ip}]}
    if view.pod_ip:
        status |= {"podIP": view.pod_ip, "podIPs": [{"ip": view.pod_ip}]}
    return status


def _statuses(view: PodView, containers: Sequence[ContainerView]) -> list[dict[str, Any]]:
    """If a pod has init containers, a kubelet's reason for "not started yet" is another."""
    unstarted, initializing = Waiting("ContainerCreating"), Waiting("PodInitializing")
    return [
        container_status(
            dataclasses.replace(one, state=initializing)
            if view.init_containers and one.state == unstarted
            else one
        )
        for one in containers
    ]


def overwritten(pod: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Whether the API server has another phase, or another status of a condition that nodes write.

    The node controller sets Ready to False when the node's Lease runs out. A node that renews
    its Lease again must write its conditions again.
    """
    stored = pod.get("status", {})
    statuses = {one["type"]: one["status"] for one in stored.get("conditions") or []}
    return stored.get("phase") != status["phase"] or any(
        statuses.get(one["type"]) != one["status"] for one in status["conditions"]
    )


def pod_phase(view: PodView, *, restart_policy: str) -> str:
    """Return the phase, by the rules of a kubelet."""
    init_done = all(_initialized(one) for one in view.init_containers)
    failed_init = any(
        isinstance(one.state, Terminated) and one.state.exit_code
        for one in view.init_containers
        if not one.sidecar
    )
    stopped = [one for one in view.containers if _stopped(one)]
    if view.terminating and _all_ended(view):
        ended = [*(one for one in view.init_containers if not one.sidecar), *view.containers]
        return "Succeeded" if all(map(_succeeded, ended)) else "Failed"
    if failed_init and restart_policy == "Never":
        return "Failed"
    if not init_done:
        return "Pending"
    if any(isinstance(one.state, Running) for one in view.containers):
        return "Pending" if _any_unstarted(view) else "Running"
    if len(stopped) < len(view.containers):
        return "Pending"
    if restart_policy == "Always":
        return "Running"
    if all(map(_succeeded, stopped)):
        return "Succeeded"
    return "Failed" if restart_policy == "Never" else "Running"


def container_status(view: ContainerView) -> dict[str, Any]:
    """Return one entry of `containerStatuses`."""
    status: dict[str, Any] = {
        "name": view.name,
        "image": view.image,
        "imageID": f"process://{view.image}",
        "state": _state(view.state),
        "lastState": _state(view.last) if view.last else {},
        "ready": view.ready,
        "started": view.started,
        "restartCount": view.num_restarts,
    }
    if view.container_id:
        status["containerID"] = view.container_id
    return status


def gates(pod: Mapping[str, Any]) -> list[str]:
    """Return the reason for each readiness gate that is not True."""
    statuses = {
        condition["type"]: condition["status"]
        for condition in pod.get("status", {}).get("conditions") or []
    }
    problems = []
    for gate in pod["spec"].get("readinessGates") or []:
        kind = gate["conditionType"]
        if kind not in statuses:
            problems.append(
                f'corresponding condition of pod readiness gate "{kind}" does not exist.'
            )
        elif statuses[kind] != "True":
            problems.append(
                f'the status of pod readiness gate "{kind}" is not "True", but {statuses[kind]}'
            )
    return problems


def _conditions(pod: Mapping[str, Any], view: PodView, phase: str) -> list[dict[str, str]]:
    sidecars = [one for one in view.init_containers if one.sidecar]
    unready = [one.name for one in (*sidecars, *view.containers) if not one.ready]
    waiting_init = [one.name for one in view.init_containers if not _initialized(one)]
    problems = gates(pod)
    completed = ("False", "PodCompleted", "") if phase == "Succeeded" else None
    containers = completed or _unless(
        unready, "ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]"
    )
    if containers[0] == "True":
        ready = _unless(problems, "ReadinessGatesNotReady", ", ".join(problems))
    else:
        ready = containers
    initialized = _unless(
        waiting_init,
        "ContainersNotInitialized",
        f"containers with incomplete status: [{' '.join(waiting_init)}]",
    )
    sandbox = ("True" if view.pod_ip and not _ended_for_good(view, phase) else "False", "", "")
    named = {
        "PodReadyToStartContainers": sandbox,
        "Initialized": initialized,
        "Ready": ready,
        "ContainersReady": containers,
    }
    return [
        {"type": kind, "status": status, "reason": reason, "message": message}
        for kind, (status, reason, message) in named.items()
    ]


def _unless(problems: Sequence[str], reason: str, message: str) -> tuple[str, str, str]:
    return ("False", reason, message) if problems else ("True", "", "")


def _with_times(
    conditions: list[dict[str, str]], before: Sequence[Mapping[str, Any]], now: float
) -> list[dict[str, Any]]:
    """Add transition times. Only a change of `status` is a transition."""
    earlier = {one["type"]: one for one in before}
    timed: list[dict[str, Any]] = []
    for condition in conditions:
        old = earlier.get(condition["type"])
        same = old is not None and old["status"] == condition["status"]
        time = old["lastTransitionTime"] if same and old else timestamp(now)
        # a strategic merge keeps absent fields: null removes an empty reason or message
        texts = {name: condition[name] or None for name in ("reason", "message")}
        timed.append({**condition, **texts, "lastTransitionTime": time})
    return timed


def _state(state: Waiting | Running | Terminated) -> dict[str, Any]:
    match state:
        case Waiting(reason, message):
            return {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        case Running(started_at):
            return {"running": {"startedAt": timestamp(started_at)}}
        case Terminated():
            ended = {
                "exitCode": state.exit_code,
                "reason": state.why,
                "message": state.message,
                "startedAt": timestamp(state.started_at),
                "finishedAt": timestamp(state.finished_at),
                "containerID": state.container_id,
            }
            return {"terminated": {name: value for name, value in ended.items() if value != ""}}


def _initialized(view: ContainerView) -> bool:
    """Whether the next container may start: it has ended well, or as a sidecar it has started."""
    return view.started or view.num_restarts > 0 if view.sidecar else _succeeded(view)


def _succeeded(view: ContainerView) -> bool:
    state = view.state if isinstance(view.state, Terminated) else view.last
    return not isinstance(view.state, Running) and state is not None and state.exit_code == 0


def _stopped(view: ContainerView) -> bool:
    return isinstance(view.state, Terminated) or (
        isinstance(view.state, Waiting) and view.last is not None
    )


def _any_unstarted(view: PodView) -> bool:
    return any(isinstance(one.state, Waiting) and one.last is None for one in view.containers)


def _all_ended(view: PodView) -> bool:
    containers = [*view.init_containers, *view.containers]
    return not any(isinstance(one.state, Running) for one in containers)


def _ended_for_good(view: PodView, phase: str) -> bool:
    return phase in ("Succeeded", "Failed") or (view.terminating and _all_ended(view))
