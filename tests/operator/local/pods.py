"""Pods for tests: what they look like, and how to wait for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_local.client import ApiError, Client, Object
from vlm_local.waiting import until

SECONDS = 60.0
SERVER = """
import http.server, os, signal, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ok = os.path.exists('/state' + self.path)
        self.send_response(200 if ok else 503); self.end_headers()
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), os._exit(0)))
print('serving', flush=True)
http.server.HTTPServer((os.environ['POD_IP'], 8080), Handler).serve_forever()
"""
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def pod(name: str, program: str, **more: Any) -> Object:
    """A pod with one container that runs a Python program; `more` are fields of the container."""
    spec = more.pop("spec", {})
    container = {"name": "main", "image": "python:3", "args": ["-u", "-c", program], **more}
    return {
        "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 2, **spec, "containers": [container]},
    }


def server(name: str, **more: Any) -> Object:
    """A pod that answers 200 to GET /X while the file /state/X exists."""
    spec = more.pop("spec", {})
    mount = {"name": "state", "mountPath": "/state"}
    volumes = [{"name": "state", "emptyDir": {}}]
    return pod(
        name, SERVER, env=[POD_IP], volumeMounts=[mount], spec={"volumes": volumes, **spec}, **more
    )


class Pods:
    """The pods of one namespace."""

    def __init__(self, api: Client, namespace: str) -> None:
        self.api = api
        self.path = f"/api/v1/namespaces/{namespace}/pods"

    async def create(self, body: Object) -> Object:
        return await self.api.create(self.path, body)

    async def get(self, name: str) -> Object:
        return await self.api.get(f"{self.path}/{name}")

    async def delete(self, name: str, grace_seconds: int | None = None) -> None:
        body = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        await self.api.delete(f"{self.path}/{name}", body)

    async def log(self, name: str, **params: str) -> str:
        return await self.api.text(f"{self.path}/{name}/log", **params)

    async def until_phase(self, name: str, phase: str) -> Object:
        return await self._until(name, lambda one: one["status"]["phase"] == phase, f"be {phase}")

    async def until_condition(self, name: str, kind: str, status: str) -> Object:
        return await self._until(
            name, lambda one: condition(one, kind).get("status") == status, f"have {kind}={status}"
        )

    async def until_restarted(self, name: str, times: int = 1) -> Object:
        return await self._until(
            name, lambda one: first(one).get("restartCount", 0) >= times, f"restart {times} times"
        )

    async def until_waiting(self, name: str, reason: str) -> Object:
        def waits(one: Object) -> bool:
            return bool(first(one).get("state", {}).get("waiting", {}).get("reason") == reason)

        return await self._until(name, waits, f"wait for {reason}")

    async def until_logged(self, name: str, text: str, **params: str) -> str:
        async def logged() -> str:
            try:
                log = await self.log(name, **params)
            except ApiError:
                return ""
            return log if text in log else ""

        return await until(logged, seconds=SECONDS, awaited=f"{name} to print {text!r}")

    async def until_gone(self, name: str) -> None:
        async def gone() -> bool:
            try:
                await self.get(name)
            except ApiError as error:
                return error.status == 404
            return False

        await until(gone, seconds=SECONDS, awaited=f"{name} to be gone")

    async def _until(self, name: str, holds: Any, what: str) -> Object:
        async def seen() -> Object | None:
            one = await self.get(name)
            return one if holds(one) else None

        try:
            found = await until(seen, seconds=SECONDS, awaited=f"{name} to {what}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {(await self.get(name))['status']}") from None
        assert found is not None
        return found


def condition(one: Object, kind: str) -> Mapping[str, Any]:
    """The condition of that type, empty if there is none."""
    conditions: Sequence[Mapping[str, Any]] = one["status"].get("conditions") or []
    return next((entry for entry in conditions if entry["type"] == kind), {})


def first(one: Object) -> Mapping[str, Any]:
    """The status of the first container, empty if there is none."""
    statuses = one["status"].get("containerStatuses") or [{}]
    return dict(statuses[0])


def pid(one: Object) -> int:
    """The first container's process 1, as this machine counts."""
    return int(first(one)["containerID"].removeprefix("process://"))


def exists(path: str) -> bool:
    return Path(path).exists()
