"""What an operator process did, seen from outside: audit log, its own metrics, /proc.

There is one clock, the API server's: all times are from its audit log.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from support.live import USER, WRITES, Live
from vlm_local.controlplane import ControlPlane

_READS = ("get", "list")


class Audit:
    """The API server's audit log, read on as it grows."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._read = 0  # bytes
        self._entries: list[dict[str, Any]] = []
        self.reads = 0  # lists and gets of the operator, its Lease's apart

    def entries(self) -> list[dict[str, Any]]:
        """Every write that the API server was asked for so far, by when it arrived."""
        found, self._read = self._plane.audited(since=self._read)
        # of what others read and watch nothing is asked
        self._entries += [entry for entry in found if entry["verb"] in WRITES]
        self.reads += sum(entry["verb"] in _READS and _is_ours(entry) for entry in found)
        return self._entries

    def writes(self) -> list[dict[str, Any]]:
        """Those of the operator, its Lease and dry runs apart."""
        return [
            entry
            for entry in self.entries()
            if _is_ours(entry) and "dryRun" not in entry["requestURI"]
        ]


def _is_ours(entry: dict[str, Any]) -> bool:
    resource = entry.get("objectRef", {}).get("resource")
    return bool(entry["user"].get("username") == USER and resource != "leases")


def about(entry: dict[str, Any]) -> tuple[str, str, str]:
    """Verb, resource and name."""
    found = entry.get("objectRef", {})
    return entry["verb"], found.get("resource", ""), found.get("name", "")


def moment(text: str) -> float:
    """Kubernetes' time in seconds since the epoch."""
    return datetime.datetime.fromisoformat(text).timestamp()


@dataclasses.dataclass(frozen=True)
class Meters:
    """The operator's own metrics at one moment.

    Attributes:
        turns: of all loops, so far.
        lag: how often the event loop came round at most so many seconds late, by that bound.
    """

    turns: int
    lag: dict[float, int]

    def since(self, before: Meters) -> Meters:
        """What happened between two moments."""
        lag = {bound: count - before.lag[bound] for bound, count in self.lag.items()}
        return Meters(self.turns - before.turns, lag)

    def lag_quantile(self, share: float) -> float:
        """The smallest bound within which that share of the looks was."""
        whole = max(self.lag.values(), default=0)
        reached = (bound for bound, count in sorted(self.lag.items()) if count >= share * whole)
        return next(reached, float("inf"))


class Process:
    """The operator's process, for as long as it lives."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def meters(self) -> Meters:
        """Ask for its metrics."""
        port = next(
            entry["port"]
            for entry in map(json.loads, self._log())
            if entry.get("message") == "metrics"
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            families = {
                family.name: family.samples
                for family in text_string_to_metric_families(answer.read().decode())
            }
        turns = sum(
            sample.value
            for sample in families["triptych_operator_turn_seconds"]
            if sample.name.endswith("_count")
        )
        lag = {
            float(sample.labels["le"]): int(sample.value)
            for sample in families["triptych_operator_loop_lag_seconds"]
            if sample.name.endswith("_bucket")
        }
        return Meters(int(turns), lag)

    def lapses(self) -> int:
        """How often it could not renew its Lease in time."""
        return sum("not renewed:" in line for line in self._log())

    @property
    def peak_bytes(self) -> int:
        """Resident memory, the highest that was ever seen."""
        status = pathlib.Path(f"/proc/{self._live.pid}/status").read_text()
        line = next(item for item in status.splitlines() if item.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    @property
    def cpu_seconds(self) -> float:
        """Processor time used so far."""
        text = pathlib.Path(f"/proc/{self._live.pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _log(self) -> list[str]:
        lines = (self._live.folder / "log").read_text().splitlines()
        return [line for line in lines if line.startswith("{")]
