"""One container of a pod as the API server returns it. Values only; `observe` builds them."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ContainerState:
    """The state of a container, and its last termination.

    Attributes:
        started: its image is present and its process ran at least once.
        waiting: kubelet's reason why it does not run; "" if it runs.
        waiting_message: kubelet's message for `waiting`.
        exit_code: exit code of the last termination; None if it never terminated.
        exit_reason: kubelet's reason of the last termination: `Error`, `OOMKilled`.
        exit_message: the last part of its output, as kubelet stores it.
        lived_seconds: run time of the last process that terminated; None if unknown.
    """

    ready: bool = False
    started: bool = False
    restarts: int = 0
    waiting: str = ""
    waiting_message: str = ""
    exit_code: int | None = None
    exit_reason: str = ""
    exit_message: str = ""
    lived_seconds: float | None = None

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> ContainerState:
        """Read one item of `status.containerStatuses`."""
        state = status.get("state", {})
        waiting, ended = state.get("waiting") or {}, state.get("terminated")
        last = status.get("lastState", {}).get("terminated") or ended
        return cls(
            ready=bool(status.get("ready")),
            started=bool(state.get("running") or last),
            restarts=int(status.get("restartCount", 0)),
            waiting=str(waiting.get("reason", "")),
            waiting_message=str(waiting.get("message", "")),
            exit_code=None if last is None else int(last.get("exitCode", 0)),
            exit_reason="" if last is None else str(last.get("reason", "")),
            exit_message="" if last is None else str(last.get("message", "")),
            lived_seconds=None if last is None else _lived(last),
        )


def _lived(ended: Mapping[str, Any]) -> float | None:
    began, end = ended.get("startedAt"), ended.get("finishedAt")
    if not began or not end:
        return None
    moments = [datetime.datetime.fromisoformat(str(item)) for item in (began, end)]
    return (moments[1] - moments[0]).total_seconds()
