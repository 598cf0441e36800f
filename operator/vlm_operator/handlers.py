"""Where kopf calls us. Wiring only: one daemon per VLMService is its control loop.

event of a VLMService (kopf), or of anything with our labels (informer) ─▶ App.wake
                                                             the daemon takes a turn ◀─┘

An event of a VLMService wakes its loop only if it changed what a turn reads from users and kopf:
`signature` names it. The operator's own status write changes nothing of that, so it starts no turn.
Beyond that no handler looks at what changed: the loop reads everything. kopf keeps the daemon, and
the finalizer that it puts on the object until the daemon returns. For an object that it first meets
while it is being deleted kopf starts no daemon and drops the finalizer as soon as the handlers of
that event have returned: then `changed` itself goes on with the drain that another process left.
Nothing here raises PermanentError, after which kopf would never start the daemon again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from vlm_operator import names, pauses
from vlm_operator.errors import ClusterError, LeaseLostError
from vlm_operator.framework import Watching, configure, login
from vlm_operator.metrics import TURNS
from vlm_operator.reconcile import Loop
from vlm_operator.sight import Sight, Signature, signature

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.05  # events come in bursts: one turn for all of them
RETRY_SECONDS = 1.0  # after a first failure
STUCK_SECONDS = 120.0  # a turn that takes longer is stuck: every call in it has a timeout
BLIND_SECONDS = 120.0  # watches reconnect after 70 s of silence: longer is dead
_DRAINED = -1.0
_DELETED = kopf.DaemonStoppingReason.RESOURCE_DELETED
_EXITING = kopf.DaemonStoppingReason.OPERATOR_EXITING


@dataclasses.dataclass
class App:
    """What all handlers share. Its one writer is the event loop.

    Attributes:
        make_loop: builds the loop of one service.
        connect: how kopf reaches the API server.
        check: raises `LeaseLostError` where a write must not start.
        turning: services whose turn began, and when; the health check reads it.
        sight: which events came; the health check reads it too.
        watching: how long kopf believes in a watch.
    """

    make_loop: Callable[[str, str], Loop]
    connect: Callable[[], Any]
    clock: Callable[[], float]
    sight: Sight
    check: Callable[[], None] = lambda: None
    watching: Watching = dataclasses.field(default_factory=Watching)
    turning: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    _signatures: dict[tuple[str, str], Signature] = dataclasses.field(default_factory=dict)
    _wakes: dict[tuple[str, str], asyncio.Event] = dataclasses.field(default_factory=dict)

    def wake(self, namespace: str, name: str) -> None:
        """Make a service's loop take a turn soon; one that begins later reads everything anyway."""
        bell = self._wakes.get((namespace, name))
        if bell is not None:
            bell.set()

    def changed(self, namespace: str, name: str, meta: Mapping[str, Any]) -> None:
        """Make a service's loop take a turn soon if its signature is another one than before."""
        found = signature(meta)
        if self._signatures.get((namespace, name)) != found:
            self._signatures[namespace, name] = found
            self.wake(namespace, name)

    def wake_all(self) -> None:
        """Make every loop take a turn soon: something changed that they all may read."""
        for bell in self._wakes.values():
            bell.set()

    def bell(self, namespace: str, name: str) -> asyncio.Event:
        """Return the event that a service's loop waits for."""
        return self._wakes.setdefault((namespace, name), asyncio.Event())

    def forget(self, namespace: str, name: str) -> None:
        """Drop what was kept of a service that is gone."""
        self._wakes.pop((namespace, name), None)
        self._signatures.pop((namespace, name), None)
        self.turning.pop((namespace, name), None)

    def problem(self) -> str:
        """Say why this process should be restarted; "" where all is well."""
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
        *place, registry=registry, id="loop", cancellation_polling=1.0, backoff=RETRY_SECONDS
    )(tend)
    kopf.on.event(*place, registry=registry, id="changed")(changed)


async def changed(memo: Any, meta: Any, namespace: str, name: str, **_: Any) -> None:
    """A VLMService changed.

    kopf hands the same `memo` to all handlers of one object. An object without a daemon is drained
    here: its other events wait meanwhile, those of other objects do not, and an operator that ends
    cancels it, which leaves the finalizer in place.
    """
    app: App = memo.app
    app.sight.told(meta["uid"], meta["generation"])
    if meta.get("deletionTimestamp") is None:
        memo.has_daemon = True  # kopf starts it with this very event
    elif not memo.get("has_daemon"):
        loop = app.make_loop(namespace, name)
        await _let_go(app, loop, (namespace, name), exiting=lambda: False)
        app.forget(namespace, name)
        return
    app.changed(namespace, name, meta)


async def tend(memo: Any, namespace: str, name: str, stopped: Any, **_: Any) -> None:
    """Be the control loop of one VLMService, until it is deleted or the operator ends."""
    app: App = memo.app
    loop = app.make_loop(namespace, name)
    bell = app.bell(namespace, name)
    pause, woken, failures = 0.0, True, 0
    try:
        while not stopped:
            woken = await _sleep(bell, stopped, pause) or woken
            if stopped:
                break
            outcome = await _attempt(app, loop.turn(woken=woken), (namespace, name))
            failures = failures + 1 if outcome is None else 0
            # an unfinished turn saw something that may have changed since
            woken = outcome is None
            pause = _retry(failures) if outcome is None else outcome
        if _DELETED in stopped.reason:
            key = (namespace, name)
            await _let_go(app, loop, key, exiting=lambda: _EXITING in stopped.reason)
    finally:
        if _DELETED in stopped.reason:
            app.forget(namespace, name)


async def _let_go(
    app: App, loop: Loop, key: tuple[str, str], *, exiting: Callable[[], bool]
) -> None:
    """Drain until nothing is left; an operator that ends meanwhile leaves it to the next."""
    bell = app.bell(*key)
    while not exiting():
        pause = await _attempt(app, _drain(loop), key)
        if pause == _DRAINED:
            return
        bell.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0 if pause is None else pause):
                await bell.wait()


async def _drain(loop: Loop) -> float:
    pause = await loop.drain()
    return _DRAINED if pause is None else pause


async def _attempt(app: App, turn: Any, key: tuple[str, str]) -> float | None:
    """Take one turn; None where it failed and should be tried again."""
    app.turning[key] = began = app.clock()
    result = "failed"
    try:
        pause: float = await turn
        result = "done"
        return pause
    except LeaseLostError as error:
        result = "not leading"
        # whoever renews the lease ends the process, or wakes everybody once it may write again
        logger.warning("not leading", extra={"service": "/".join(key), "error": str(error)})
    except ClusterError as error:
        result = error.reason or "refused"
        logger.warning("turn failed", extra={"service": "/".join(key), "error": str(error)})
    except Exception:
        # a defect of ours in one service's turn must not end the loop, nor those of others
        logger.exception("turn crashed", extra={"service": "/".join(key)})
    finally:
        app.turning.pop(key, None)
        TURNS.labels(result=result).observe(app.clock() - began)
    return None


async def _sleep(bell: asyncio.Event, stopped: Any, seconds: float) -> bool:
    """Wait for the bell, the end, or the time; tells whether it was the bell."""
    waits = [asyncio.ensure_future(bell.wait()), asyncio.ensure_future(stopped.wait())]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if bell.is_set() and not stopped:
            await asyncio.sleep(SETTLE_SECONDS)
    finally:
        for wait in waits:
            wait.cancel()
    rang = bell.is_set()
    bell.clear()
    return rang


def _retry(failures: int) -> float:
    return pauses.growing(failures, first=RETRY_SECONDS, longest=30.0)
