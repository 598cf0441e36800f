"""kopf's handlers. One daemon per VLMService is its control loop.

event of a VLMService (kopf), or of anything with our labels (informer) ─▶ App.wake
                                                             the daemon takes a turn ◀─┘

An event of a VLMService wakes its loop only if it changed the `signature`: the metadata that users
and kopf write. So the operator's status write starts no turn. Handlers do not read what changed,
because each turn reads the whole state.

kopf keeps its finalizer on the object until the daemon returns. If an object is already being
deleted when kopf first sees it, kopf starts no daemon. It then removes the finalizer as soon as the
handlers of that event return. In this case `changed` itself continues the drain that another
process began. No handler raises PermanentError, after which kopf would not restart the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from vlm_operator import names
from vlm_operator.backoff import Backoff
from vlm_operator.errors import ClusterError, LeaseLostError
from vlm_operator.framework import Watching, configure, login
from vlm_operator.metrics import TURNS
from vlm_operator.reconcile import ServiceReconciler
from vlm_operator.sight import Sight, Signature, signature

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.05  # collects a burst of events into one turn
RETRY = Backoff(longest=30.0)
STUCK_SECONDS = 120.0  # a longer turn is stuck, because every call in it has a timeout
BLIND_SECONDS = 120.0  # a live watch reconnects after 70 s of silence
_DRAINED = -1.0
_DELETED = kopf.DaemonStoppingReason.RESOURCE_DELETED
_EXITING = kopf.DaemonStoppingReason.OPERATOR_EXITING


@dataclasses.dataclass
class App:
    """State that all handlers share. Only the event loop writes it.

    Attributes:
        make_reconciler: builds the reconciler of one service.
        connect: returns kopf's connection to the API server.
        clock: monotonic seconds.
        sight: the received events; the health check reads it.
        check: raises `LeaseLostError` if a write must not start.
        watching: limits of kopf's watches.
        turning: services with a running turn, and its start; the health check reads it.
    """

    make_reconciler: Callable[[str, str], ServiceReconciler]
    connect: Callable[[], Any]
    clock: Callable[[], float]
    sight: Sight
    check: Callable[[], None] = lambda: None
    watching: Watching = dataclasses.field(default_factory=Watching)
    turning: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    _signatures: dict[tuple[str, str], Signature] = dataclasses.field(default_factory=dict)
    _wakes: dict[tuple[str, str], asyncio.Event] = dataclasses.field(default_factory=dict)

    def wake(self, namespace: str, name: str) -> None:
        """Make a service's loop take a turn soon; without a loop, do nothing.

        A loop that starts later reads the whole state in its first turn.
        """
        wakeup = self._wakes.get((namespace, name))
        if wakeup is not None:
            wakeup.set()

    def changed(self, namespace: str, name: str, meta: Mapping[str, Any]) -> None:
        """Make a service's loop take a turn soon if its signature changed."""
        found = signature(meta)
        if self._signatures.get((namespace, name)) != found:
            self._signatures[namespace, name] = found
            self.wake(namespace, name)

    def wake_all(self) -> None:
        """Make every loop take a turn soon, after a change that all of them may read."""
        for wakeup in self._wakes.values():
            wakeup.set()

    def wakeup(self, namespace: str, name: str) -> asyncio.Event:
        """Return the asyncio event that wakes a service's loop."""
        return self._wakes.setdefault((namespace, name), asyncio.Event())

    def forget(self, namespace: str, name: str) -> None:
        """Drop the state of a deleted service."""
        self._wakes.pop((namespace, name), None)
        self._signatures.pop((namespace, name), None)
        self.turning.pop((namespace, name), None)

    def problem(self) -> str:
        """Return why this process should be restarted; "" if it is healthy."""
        now = self.clock()
        slow = max((now - began for began in self.turning.values()), default=0.0)
        if slow > STUCK_SECONDS:
            return f"a turn has taken {slow:.0f} s"
        blind = self.sight.blind_seconds
        return f"no event came for {blind:.0f} s" if blind > BLIND_SECONDS else ""


def register(registry: kopf.OperatorRegistry) -> None:
    """Attach every handler to kopf's registry."""
    kopf.on.startup(registry=registry)(configure)
    kopf.on.login(registry=registry)(login)
    place = (names.GROUP, names.VERSION, names.PLURAL_SERVICE)
    kopf.daemon(
        *place, registry=registry, id="loop", cancellation_polling=1.0, backoff=RETRY.first
    )(run_worker)
    kopf.on.event(*place, registry=registry, id="changed")(changed)


async def changed(memo: Any, meta: Any, namespace: str, name: str, **_: Any) -> None:
    """Handle an event of a VLMService.

    kopf passes the same `memo` to all handlers of one object. If an object that is being deleted
    has no daemon, this handler drains it. Other events of this object wait until the drain ends. If
    the operator exits, kopf cancels the handler, and the finalizer stays.
    """
    app: App = memo.app
    app.sight.told(meta["uid"], meta["generation"])
    if meta.get("deletionTimestamp") is None:
        memo.has_daemon = True  # kopf starts it with this very event
    elif not memo.get("has_daemon"):
        reconciler = app.make_reconciler(namespace, name)
        await _finalize(app, reconciler, (namespace, name), exiting=lambda: False)
        app.forget(namespace, name)
        return
    app.changed(namespace, name, meta)


async def run_worker(memo: Any, namespace: str, name: str, stopped: Any, **_: Any) -> None:
    """Run the control loop of one VLMService until it is deleted or the operator exits."""
    app: App = memo.app
    reconciler = app.make_reconciler(namespace, name)
    wakeup = app.wakeup(namespace, name)
    pause, woken, failures = 0.0, True, 0
    try:
        while not stopped:
            woken = await _sleep(wakeup, stopped, pause) or woken
            if stopped:
                break
            outcome = await _attempt(app, reconciler.turn(woken=woken), (namespace, name))
            failures = failures + 1 if outcome is None else 0
            # after a failed turn the next one reads the state again, because it may have changed
            woken = outcome is None
            pause = RETRY.seconds(failures) if outcome is None else outcome
        if _DELETED in stopped.reason:
            key = (namespace, name)
            await _finalize(app, reconciler, key, exiting=lambda: _EXITING in stopped.reason)
    finally:
        if _DELETED in stopped.reason:
            app.forget(namespace, name)


async def _finalize(
    app: App, reconciler: ServiceReconciler, key: tuple[str, str], *, exiting: Callable[[], bool]
) -> None:
    """Drain the service's pods; if the operator exits first, the next process continues."""
    wakeup = app.wakeup(*key)
    while not exiting():
        pause = await _attempt(app, _drain(reconciler), key)
        if pause == _DRAINED:
            return
        wakeup.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0 if pause is None else pause):
                await wakeup.wait()


async def _drain(reconciler: ServiceReconciler) -> float:
    pause = await reconciler.drain()
    return _DRAINED if pause is None else pause


async def _attempt(app: App, turn: Any, key: tuple[str, str]) -> float | None:
    """Run one turn and return the pause in seconds; None if it failed and must be retried."""
    app.turning[key] = began = app.clock()
    result = "failed"
    try:
        pause: float = await turn
        result = "done"
        return pause
    except LeaseLostError as error:
        result = "not leading"
        # the renewal either ends the process, or wakes all loops once writes are allowed again
        logger.warning("not leading", extra={"service": "/".join(key), "error": str(error)})
    except ClusterError as error:
        result = error.reason or "refused"
        logger.warning("turn failed", extra={"service": "/".join(key), "error": str(error)})
    except Exception:
        # a defect in one service's turn must not end its loop or others
        logger.exception("turn crashed", extra={"service": "/".join(key)})
    finally:
        app.turning.pop(key, None)
        TURNS.labels(result=result).observe(app.clock() - began)
    return None


async def _sleep(wakeup: asyncio.Event, stopped: Any, seconds: float) -> bool:
    """Wait for a wake-up, the stop or the timeout; return whether a wake-up came."""
    waits = [asyncio.ensure_future(wakeup.wait()), asyncio.ensure_future(stopped.wait())]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if wakeup.is_set() and not stopped:
            await asyncio.sleep(SETTLE_SECONDS)
    finally:
        for wait in waits:
            wait.cancel()
    was_set = wakeup.is_set()
    wakeup.clear()
    return was_set
