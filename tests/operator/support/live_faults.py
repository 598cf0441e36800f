"""An operator that uses a fault proxy, and that is restarted when it ends, as by a kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import yaml

from support.fakes.faults import Call
from support.fakes.proxy import FaultProxy
from support.live import PATIENCE_SECONDS, Live, install, plain_children
from support.world import body, pool
from vlm_local.client import Access
from vlm_local.controlplane import ControlPlane

LEASE_SECONDS = 9  # a write takes up to five, which leaves four to renew it
SILENCE_SECONDS = 4  # in production 70


class ProxyThread:
    """A `FaultProxy` on an event loop of its own, for tests that block."""

    def __init__(self, plane: ControlPlane) -> None:
        access = plane.access
        anonymous = Access(access.server, access.ca).ssl_context()
        self.proxy = FaultProxy(plane.server, anonymous)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        self.call(self.proxy.__aenter__())

    def stop(self) -> None:
        """Close everything."""
        self.call(self.proxy.__aexit__())
        self.call(_end_others())  # watches that fell silent
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something on the proxy's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def break_watches(self, plural: str) -> None:
        """See `FaultProxy.break_watches`."""
        self._loop.call_soon_threadsafe(self.proxy.break_watches, plural)


async def _end_others() -> None:
    """Cancel every other task of this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Supervised(Live):
    """An operator process that is restarted each time it ends.

    Attributes:
        exits: the statuses with which it ended so far.
    """

    def __init__(self, plane: ControlPlane, folder: pathlib.Path, *options: str) -> None:
        super().__init__(plane, folder, *options)
        self.exits: list[int] = []

    @property
    def running(self) -> bool:
        """Whether the last process that was started is there."""
        return self._process is not None and self._process.poll() is None

    def lapses(self) -> int:
        """How often it could not renew its lease in time, so far."""
        return (self.folder / "log").read_text().count("not renewed:")

    def until(
        self, holds: Callable[[], Any], *, seconds: float, patience: float = PATIENCE_SECONDS
    ) -> float:
        """See `Live.until`; the process is kept running meanwhile."""

        def kept() -> Any:
            ended = None if self._process is None else self._process.poll()
            if ended is not None:
                self.exits.append(ended)
                self._process = None
                self.start()
            return holds()

        return super().until(kept, seconds=seconds, patience=patience)


def behind(plane: ControlPlane, proxy: ProxyThread, folder: pathlib.Path, name: str) -> Supervised:
    """An operator for the namespace `name` alone that sees nothing but the proxy."""
    install(plane, folder)
    kubeconfig = folder / "kubeconfig"
    token = yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]["token"]
    Access(proxy.proxy.url, None, token=token).write(kubeconfig)
    plane.kubectl("create", "namespace", name)
    return Supervised(
        plane,
        folder,
        f"--namespace={name}",
        f"--lease-seconds={LEASE_SECONDS}",
        f"--silence-seconds={SILENCE_SECONDS}",
        "--watch-seconds=20",
        "--resync-seconds=10",  # lost events are part of these tests
        "--relist-seconds=40",
    )


def apply(operator: Supervised, name: str, *, decode: int = 1) -> None:
    manifest = body(name=name, encoder=pool(), decode=pool(decode))
    manifest["metadata"] = {"name": name, "namespace": operator.namespace}
    operator.apply(manifest)


def finished(operator: Supervised, name: str) -> bool:
    """Whether the status has the cause for the latest generation of the manifest."""
    found = operator.get("vlm", name, operator.namespace)
    status = found.get("status", {})
    return bool(status.get("observedGeneration") == found["metadata"]["generation"])


def decode_replicas(operator: Supervised, name: str) -> list[int]:
    found = operator.items("deployments", name, operator.namespace)
    return [item["spec"]["replicas"] for item in found if "-decode-" in item["metadata"]["name"]]


def same_as_reference(operator: Supervised, name: str) -> bool:
    found = plain_children(operator.plane, operator.namespace, name)
    return found == plain_children(operator.plane, operator.namespace, "reference")


def is_write(call: Call, *, of: str = "") -> bool:
    """Whether it writes: of all resources but the Lease, or of one."""
    wanted = call.plural == of if of else call.plural != "leases"
    return wanted and call.verb in ("create", "replace", "patch", "delete")


def writes_seen(proxy: ProxyThread) -> int:
    """The operator's own writes that passed the proxy so far, its Lease's apart."""
    return sum(is_write(call) for call in list(proxy.proxy.calls))


@contextlib.contextmanager
def ends(operator: Supervised, *, expected: bool) -> Iterator[None]:
    """The process ends with status 1 once, or it does not; a kubelet starts the next one."""
    before = len(operator.exits)
    yield
    assert operator.exits[before:] == ([1] if expected else [])
