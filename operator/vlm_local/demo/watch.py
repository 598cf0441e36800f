"""Reports progress of the demo: one line for each changed state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from vlm_cli.output import CliError
from vlm_local.errors import LocalError
from vlm_operator.cluster import Manifest


class Reporter:
    """Prints lines with the seconds since the start, each state once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._start = time.monotonic()
        self._states: dict[str, str] = {}

    def say(self, line: str) -> None:
        """Print a line with its time."""
        elapsed = time.monotonic() - self._start
        self.console.print(Text(f"{elapsed:6.1f} s  ", style="dim") + Text(line))

    def piece(self, text: str) -> None:
        """Print a part of an answer without a line break."""
        self.console.file.write(text)
        self.console.file.flush()

    def state(self, name: str, state: str) -> None:
        """Print the state of an object if it has changed."""
        if self._states.get(name) != state:
            self._states[name] = state
            self.say(f"{name}: {state}")

    def fail(self, error: LocalError | CliError) -> None:
        self.console.print(Text(f"error: {error.problem}", style="red"))
        if error.remedy:
            self.console.print(Text(f"  {error.remedy}"))


def pod_state(pod: Manifest) -> str:
    """Return the state of a pod in a few words, with the reason if it is blocked."""
    status = pod.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    if conditions.get("Ready", {}).get("status") == "True":
        return "Ready"
    for container in status.get("containerStatuses") or []:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating"):
            return f"{waiting['reason']}: {waiting.get('message', '')}"
        if ended := container.get("state", {}).get("terminated"):
            return f"ended with code {ended['exitCode']} ({ended['reason']})"
    scheduled: Mapping[str, Any] = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return f"Pending: {scheduled.get('message', '')}"
    return "starting" if status.get("phase") == "Running" else str(status.get("phase", "Pending"))


def service_state(service: Manifest) -> tuple[bool, str]:
    """Return whether a VLMService is Ready, and its state as one line."""
    generation = service["metadata"]["generation"]
    status = service.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    for kind in ("Accepted", "Stalled"):
        found = conditions.get(kind)
        if found is not None and found["status"] == ("False" if kind == "Accepted" else "True"):
            return False, f"{kind}={found['status']}: {found.get('message', '')}"
    ready = conditions.get("Ready")
    if ready is None:
        return False, "waiting for the operator"
    current = ready.get("observedGeneration", generation) == generation
    if ready["status"] == "True" and current:
        return True, "Ready"
    return False, ready.get("message") or ready.get("reason", "not ready")
