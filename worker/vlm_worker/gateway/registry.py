"""The workers there are: a connection to each, its Hello, its load, and what we have there.

discovery ─▶ apply(pods) ─▶ a task per pod:  Hello ─▶ WatchLoad, WatchLoad, … ─▶ lost: Hello again
                            candidates() ─▶ route
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import aclosing

from vlm_worker.client import WorkerClient
from vlm_worker.errors import IncompatibleError, PeerLostError, WorkerError
from vlm_worker.gateway.pods import KnownPod
from vlm_worker.gateway.waiting import Waiters
from vlm_worker.route import Candidate
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.types import Role, Stage
from vlm_worker.wire.calls import Hello, Load

logger = logging.getLogger(__name__)

Connect = Callable[..., WorkerClient]
"""`(address, timers=...)`: a client of the worker at an address."""


class Peer:
    """One worker. `Registry` is its only writer."""

    def __init__(self, pod: KnownPod, client: WorkerClient) -> None:
        self.pod = pod
        self.client = client
        self.hello: Hello | None = None
        self.load: Load | None = None
        self.num_others = 0
        self.num_inflight = 0
        self.unused = asyncio.Event()
        self.unused.set()
        self.news = asyncio.Event()
        self.refuses = False
        self.complaint = ""
        self.task: asyncio.Task[None] | None = None

    def report(self, load: Load) -> None:
        """Take its word.

        What it has beyond ours are others' requests. Until its next word, about a second, only ours
        come and go: what ended here is not counted on.
        """
        self.load = load
        self.num_others = max(0, load.num_inflight - self.num_inflight)

    @property
    def accepts(self) -> bool:
        """Whether it takes new requests, by the cluster's word and its own."""
        load = self.load
        return self.pod.accepting and not self.refuses and (load is None or load.accepting)

    @property
    def candidate(self) -> Candidate | None:
        """As the route sees it; None before its Hello."""
        hello, load = self.hello, self.load
        if hello is None:
            return None
        return Candidate(
            name=self.pod.name,
            address=self.pod.address,
            role=hello.role,
            stages=hello.stages,
            boot_id=hello.boot_id,
            layout_fingerprint=hello.layout_fingerprint,
            embed_fingerprint=hello.embed_fingerprint,
            kv_capacity_tokens=hello.limits.kv_capacity_tokens,
            max_model_len_tokens=hello.limits.max_model_len,
            ready=self.pod.ready,
            accepting=self.accepts,
            num_inflight=self.num_inflight + self.num_others,
            num_waiting=load.num_waiting if load else 0,
            work_queued_seconds=load.work_queued_seconds if load else 0.0,
            kv_free_tokens=load.kv_free_tokens if load else hello.limits.kv_capacity_tokens,
        )


class Registry:
    """All peers, by the pod's name."""

    def __init__(
        self,
        *,
        served_name: str,
        compat: str = "",
        timers: Timers = PRODUCTION,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect = WorkerClient,
    ) -> None:
        self.timers = timers
        self._connect = connect
        self._served_name = served_name
        self._compat = compat
        self._clock = clock
        self._held: Counter[Role] = Counter()
        self._lost_at: dict[Stage, float] = {}
        self._peers: dict[str, Peer] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._waiters = Waiters()

    def apply(self, pods: Sequence[KnownPod]) -> None:
        """The pods there are now; those that are gone are let go, a moved one is another one."""
        wanted = {pod.name: pod for pod in pods}
        for name, peer in list(self._peers.items()):
            pod = wanted.get(name)
            if pod is None or pod.address != peer.pod.address:
                self._let_go(self._peers.pop(name))
            elif pod != peer.pod:
                peer.pod = pod
                peer.news.set()
                self._notify()
        for name, pod in wanted.items():
            if name not in self._peers:
                peer = self._peers[name] = Peer(pod, self._connect(pod.address, timers=self.timers))
                peer.task = asyncio.create_task(self._tend(peer), name=f"tend {name}")

    def candidates(self) -> list[Candidate]:
        """Every peer that answered, in the order of names."""
        found = (peer.candidate for _, peer in sorted(self._peers.items()))
        return [candidate for candidate in found if candidate is not None]

    @property
    def by_name(self) -> Mapping[str, Peer]:
        """For tests and messages."""
        return self._peers

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[WorkerClient]:
        """A peer's client, in flight there while used; PeerLostError where it is gone."""
        peer = self._peers.get(name)
        if peer is None:
            raise PeerLostError(f"{name} is gone")
        peer.num_inflight += 1
        peer.unused.clear()
        try:
            yield peer.client
        finally:
            peer.num_inflight -= 1
            if peer.num_inflight == 0:
                peer.unused.set()

    @contextlib.contextmanager
    def held_for_pool(self, role: Role) -> Iterator[None]:
        """A request waits for a pool without pods or room; told in `/stats` while it does."""
        self._held[role] += 1
        try:
            yield
        finally:
            self._held[role] -= 1

    @property
    def held_for(self) -> dict[str, int]:
        """How many requests wait for a pool without pods or without room, by its role."""
        return {role.value: count for role, count in self._held.items() if count}

    def refused(self, boot_id: bytes) -> None:
        """A worker said that it drains: believe it before its next load report."""
        for peer in self._peers.values():
            if peer.hello is not None and peer.hello.boot_id == boot_id:
                peer.refuses = True
                self._notify()

    def lost_at(self, stage: Stage) -> float | None:
        """When a pod that had this stage was last lost or let go; None: never."""
        return self._lost_at.get(stage)

    async def wait_until(
        self, condition: Callable[[], bool], *, timeout: float, group: Hashable = None
    ) -> bool:
        """Wait until a condition on the pods that there are holds; False if it does not in time.

        Their load is no part of it: a load report wakes nobody. Waiters of one `group` lack the
        same.
        """
        return await self._waiters.wait_until(condition, timeout=timeout, group=group)

    async def close(self) -> None:
        """Let go of everyone."""
        for peer in self._peers.values():
            self._let_go(peer)
        self._peers.clear()
        await asyncio.gather(*self._closing)

    def _notify(self) -> None:
        self._waiters.notify()

    def _let_go(self, peer: Peer) -> None:
        self._note_loss(peer)
        task = asyncio.create_task(self._close(peer), name=f"close {peer.pod.name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._notify()

    async def _close(self, peer: Peer) -> None:
        if peer.task is not None:
            peer.task.cancel()
            await asyncio.gather(peer.task, return_exceptions=True)
        # A pod may leave the list while it still answers; its streams end by themselves.
        await peer.unused.wait()
        await peer.client.close()

    async def _tend(self, peer: Peer) -> None:
        """Stay in touch with one worker until it is let go."""
        timers = self.timers
        delay = timers.retry
        while True:
            try:
                hello = await peer.client.hello(timeout=timers.hello)
                self._check(hello)
                peer.hello, peer.load, peer.num_others = hello, None, 0
                peer.refuses, peer.complaint = False, ""
                self._notify()
                logger.info("worker found", extra={"pod": peer.pod.name, "role": hello.role})
                delay = timers.retry
                await self._follow_load(peer)
            except IncompatibleError as error:
                self._lost(peer, error)
                delay = timers.max_retry
            except (WorkerError, TimeoutError) as error:
                self._lost(peer, error)
            except Exception as error:
                # A defect of ours costs one worker for a while, not for ever.
                logger.exception("following a worker failed", extra={"pod": peer.pod.name})
                self._lost(peer, error)
            if await _comes_within(peer.news, delay):
                delay = timers.retry  # it became ready: it is not left waiting for a back-off
            else:
                delay = min(delay * 2, timers.max_retry)

    async def _follow_load(self, peer: Peer) -> None:
        async with aclosing(peer.client.watch_load()) as loads:
            while True:
                async with asyncio.timeout(self.timers.silence):
                    load = await anext(loads, None)
                if load is None or (peer.hello and load.boot_id != peer.hello.boot_id):
                    return
                accepted = peer.accepts
                peer.report(load)
                if peer.accepts != accepted:
                    self._notify()

    def _lost(self, peer: Peer, error: Exception) -> None:
        if str(error) != peer.complaint:
            message = "worker not reached" if peer.hello is None else "worker lost"
            logger.warning(message, extra={"pod": peer.pod.name, "reason": str(error)})
        peer.complaint = str(error)
        self._note_loss(peer)
        peer.hello, peer.load, peer.num_others = None, None, 0
        self._notify()

    def _note_loss(self, peer: Peer) -> None:
        if peer.hello is not None:
            self._lost_at |= dict.fromkeys(peer.hello.stages, self._clock())

    def _check(self, hello: Hello) -> None:
        """Whether a worker serves what we serve."""
        if hello.model != self._served_name:
            raise IncompatibleError(f"it serves {hello.model!r}, not {self._served_name!r}")
        if self._compat and hello.compat != self._compat:
            found = hello.compat or "not set (--compat)"
            raise IncompatibleError(f"its compat is {found}, not {self._compat}")


async def _comes_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, which is used up; False where it does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


def static_pods(addresses: Sequence[str]) -> list[KnownPod]:
    """Workers at fixed addresses."""
    return [KnownPod(name=address, address=address) for address in addresses]
