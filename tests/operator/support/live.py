"""An operator process on a real control plane, and the calls of tests to both."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from vlm_local.controlplane import ControlPlane
from vlm_local.subprocesses import tied

ROOT = pathlib.Path(__file__).parents[3]
USER = "system:serviceaccount:triptych-system:triptych-operator"
PATIENCE_SECONDS = 60.0
WRITES = ("create", "update", "patch", "delete")
_DIGEST = re.compile(r"(NAME-(?:encoder|prefill|decode)-[a-z0-9-]*?)-[0-9a-f]{8}\b")


class Live:
    """One operator process and the cluster that it works on.

    `options` are additional flags, such as the namespaces that it watches. `program` starts it.
    """

    def __init__(
        self,
        plane: ControlPlane,
        folder: pathlib.Path,
        *options: str,
        program: Sequence[str] = (sys.executable, "-m", "vlm_operator"),
    ) -> None:
        self.plane = plane
        self.folder = folder
        self._options = options
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until it leads."""
        command = [
            *self._program, f"--kubeconfig={self.folder / 'kubeconfig'}",
            "--lease-namespace=triptych-system", "--identity=live", "--bind=127.0.0.1",
            "--metrics-port=0", *self._options,
        ]  # fmt: skip
        file = self.folder / "log"
        file.touch()
        led = file.read_bytes().count(b'"leading"')
        with file.open("ab") as log:
            self._process = subprocess.Popen(tied(command), stdout=log, stderr=log)
        self.until(lambda: file.read_bytes().count(b'"leading"') > led, seconds=30)

    def stop(self) -> int:
        """Send SIGTERM to the process; return its exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout=15)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=15)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl as a user would; return its output."""
        return self.plane.kubectl(*arguments, stdin=stdin, check=check).stdout

    def apply(self, manifest: dict[str, Any]) -> None:
        """`kubectl apply -f -`."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def items(self, kinds: str, service: str, namespace: str = "live") -> list[dict[str, Any]]:
        """All objects of these kinds with the label of the service."""
        text = self.kubectl(
            "-n", namespace, "get", kinds, "-l", f"triptych.dev/service={service}", "-o", "json"
        )
        found: list[dict[str, Any]] = json.loads(text)["items"]
        return found

    def get(self, what: str, name: str, namespace: str = "live") -> dict[str, Any]:
        """One object."""
        found: dict[str, Any] = json.loads(
            self.kubectl("-n", namespace, "get", what, name, "-o", "json")
        )
        return found

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """One condition of a service; empty until it is written."""
        conditions = self.get("vlm", name).get("status", {}).get("conditions", [])
        return next((item for item in conditions if item["type"] == kind), {})

    def until(
        self, holds: Callable[[], Any], *, seconds: float, patience: float = PATIENCE_SECONDS
    ) -> float:
        """Wait until something holds; returns and prints how long it took.

        An idle machine needs `seconds`. The timeout is `patience`, and at least three times
        `seconds`: `bench/operator_scale.py` measures how fast the operator is.
        """
        took = _until(holds, seconds=max(patience, 3 * seconds))
        print(f"took {took:.2f} s of {seconds} s expected")
        return took

    def turns(self) -> int:
        """Turns of all services together that this process has taken, by its metrics."""
        ports = re.findall(
            r'"message": ?"metrics".*?"port": ?(\d+)', (self.folder / "log").read_text()
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}/metrics") as reply:
            text = reply.read().decode()
        counts = re.findall(
            r"^triptych_operator_turn_seconds_count\{.*\} (\S+)$", text, re.MULTILINE
        )
        return int(sum(map(float, counts)))

    def writes(self) -> list[tuple[str, str, str]]:
        """The operator's writes so far, without those of its Lease: verb, resource, name."""
        return self.calls(*WRITES)

    def calls(self, *verbs: str) -> list[tuple[str, str, str]]:
        """Likewise what it asked for by these verbs."""
        found = []
        for entry in self.plane.audited()[0]:
            about = entry.get("objectRef", {})
            if entry["user"].get("username", "") != USER or entry["verb"] not in verbs:
                continue
            if about.get("resource") == "leases" or "dryRun" in entry["requestURI"]:
                continue
            found.append((entry["verb"], about.get("resource", ""), about.get("name", "")))
        return found


def install(plane: ControlPlane, folder: pathlib.Path) -> None:
    """Install the chart's objects; `folder/kubeconfig` is the operator's own way in."""
    plane.kubectl("apply", "-f", str(ROOT / "install.yaml"))
    plane.await_crds()
    # established is not yet served: an operator that asks too early waits before it asks again
    for kind in ("vlm", "vlmp", "vlmnc"):
        _until(lambda kind=kind: plane.kubectl("get", kind, "-A", check=False).returncode == 0)
    token = plane.kubectl("-n", "triptych-system", "create", "token", "triptych-operator").stdout
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token.strip()}
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))


def _until(holds: Callable[[], Any], *, seconds: float = 30) -> float:
    """Ask until something holds; returns how long it took."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.05)  # noqa: TID251
    return time.monotonic() - began


def pass_time(seconds: float) -> None:
    """Let real time pass: the only way to see that nothing happens in it."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(0.2, left))  # noqa: TID251


def plain_children(plane: ControlPlane, namespace: str, service: str) -> str:
    """A service's children as text: without identities and times, its name replaced."""
    kinds = "deploy,svc,cm,sa,netpol,role,rolebinding,pdb,vlmp"
    text = plane.kubectl(
        "-n", namespace, "get", kinds, "-l", f"triptych.dev/service={service}", "-o", "json"
    ).stdout
    found = []
    for item in json.loads(text)["items"]:
        meta = {key: item["metadata"].get(key) for key in ("name", "labels")}
        spec = item.get("spec", {})
        for volatile in ("clusterIP", "clusterIPs", "serviceRef"):
            spec.pop(volatile, None)
        rest = {key: item.get(key) for key in ("kind", "data", "roleRef")}
        found.append({**rest, "metadata": meta, "spec": spec})
    return anonymous(found, service)


def anonymous(items: list[dict[str, Any]], service: str) -> str:
    """Objects as text without their service's name, nor the digest of it in Deployments' names."""
    name = re.compile(rf"\b{re.escape(service)}\b")  # `reference`, and not a part of `preference`
    texts = (name.sub("NAME", json.dumps(item, sort_keys=True)) for item in items)
    return "\n".join(sorted(_DIGEST.sub(r"\1-DIGEST", text) for text in texts))
