"""Connects to all worker pods; tracks their load and wakes requests that wait for pods.

discovery ─▶ apply(pods) ─▶ a task per pod:  Hello ─▶ WatchLoad, WatchLoad, … ─▶ lost: Hello again
                            candidates() ─▶ route
                            a change of the pods ─▶ waiters
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Self

from vlm_worker.client import WorkerClient
from vlm_worker.errors import DrainingError, IncompatibleError, PeerLostError, WorkerError
from vlm_worker.gateway.discovery import KnownPod
from vlm_worker.gateway.pod_caches import Mark, PodCaches
from vlm_worker.gateway.waiters import Waiters
from vlm_worker.route import Candidate
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.types import RequestKey, Role, Stage
from vlm_worker.wire.messages import Hello, Load

logger = logging.getLogger(__name__)

Connect = Callable[..., WorkerClient]
"""`(address, timers=...)` returns a client of the worker at an address."""


class PodConnection:
    """The connection to one worker. `Registry` is its only writer."""

    def __init__(self, pod: KnownPod, client: WorkerClient) -> None:
        self.pod = pod
        self.client = client
        self.hello: Hello | None = None
        self.load: Load | None = None
        self.num_others = 0
        self.num_inflight = 0
        self.num_lent = self.num_images = 0
        self._others_lent = self._others_images = 0
        self._unreported_tokens = 0  # of requests that were lent after the last report
        self.unused = asyncio.Event()
        self.unused.set()
        self.news = asyncio.Event()
        self.refuses = False
        self.unusable_reason = ""
        self.task: asyncio.Task[None] | None = None

    def report(self, load: Load) -> None:
        """Apply a load report. Requests beyond those of this gateway belong to other gateways."""
        self.load = load
        self.num_others = max(0, load.num_inflight - self.num_inflight)
        self._unreported_tokens = 0
        self._others_lent = max(0, load.num_lent - self.num_lent)
        self._others_images = max(0, load.num_images - self.num_images)

    @property
    def accepts(self) -> bool:
        """Whether it accepts new requests, according to the cluster and to the worker."""
        load = self.load
        return self.pod.accepting and not self.refuses and (load is None or load.accepting)

    @property
    def candidate(self) -> Candidate | None:
        """The worker as input of the route selection; None before its Hello."""
        hello, load = self.hello, self.load
        if hello is None:
            return None
        kv_free_tokens = load.kv_free_tokens if load else hello.limits.kv_capacity_tokens
        return Candidate(
            name=self.pod.name,
            address=self.pod.address,
            role=hello.role,
            stages=self._stages(hello),
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
            kv_free_tokens=max(0, kv_free_tokens - self._unreported_tokens),
            max_lent=load.max_lent if load else 0,
            num_lent=self.num_lent + self._others_lent,
            num_images=self.num_images + self._others_images,
            lent_queued_seconds=load.lent_queued_seconds if load else 0.0,
            grammars=hello.grammars,
            min_tokens=hello.min_tokens,
            prompt_logprobs=hello.prompt_logprobs,
            embed_layout=hello.embed_layout,
        )

    @property
    def usable(self) -> tuple[bool, frozenset[Stage]]:
        """Whether it accepts, and the stages that it serves: what a load report may change."""
        return self.accepts, self._stages(self.hello) if self.hello else frozenset()

    def _stages(self, hello: Hello) -> frozenset[Stage]:
        """The stages that it serves; an encoder's first load report says what others are for."""
        is_unknown = self.load is None and hello.role is Role.ENCODER
        return hello.stages & {Stage.ENCODER} if is_unknown else hello.stages

    def lend(self, num_tokens: int) -> None:
        """Count a text-only request of so many tokens."""
        self.num_lent += 1
        self._unreported_tokens += num_tokens


class Registry:
    """All worker connections, `peers` by pod name; `caches` has what the connected pods hold."""

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
        self.num_waiting_for_wake = 0
        self.num_lent_total = 0
        self.synced = False
        self._lost_at: dict[Stage, float] = {}
        self.peers: dict[str, PodConnection] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.waiters = Waiters()
        self.caches = PodCaches()

    def apply(self, pods: Sequence[KnownPod]) -> None:
        """Set the known pods: connect to new ones, close removed ones.

        A pod with a new address is a new pod. `synced` is True after the first call.
        """
        self.synced = True
        by_name = {pod.name: pod for pod in pods}
        for name, peer in list(self.peers.items()):
            pod = by_name.get(name)
            if pod is None or pod.address != peer.pod.address:
                self._disconnect(self.peers.pop(name))
            elif pod != peer.pod:
                peer.pod = pod
                peer.news.set()
                self.waiters.notify()
        for name, pod in by_name.items():
            if name not in self.peers:
                peer = self.peers[name] = PodConnection(
                    pod, self._connect(pod.address, timers=self.timers)
                )
                peer.task = asyncio.create_task(self._follow(peer), name=f"follow {name}")

    def candidates(self) -> list[Candidate]:
        """Return every worker that answered Hello, in the order of names."""
        candidates = (peer.candidate for _, peer in sorted(self.peers.items()))
        return [candidate for candidate in candidates if candidate is not None]

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[WorkerClient]:
        """Return a worker's client and count the request as in flight there.

        Raises:
            PeerLostError: the pod is not known any more.
        """
        peer = self.peers.get(name)
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
    def borrows(self, name: str, *, num_tokens: int) -> Iterator[None]:
        """Count a text-only request on an encoder, before the encoder reports it."""
        peer = self.peers.get(name)
        if peer is None:  # the calls of the request raise PeerLostError
            yield
            return
        self.num_lent_total += 1
        peer.lend(num_tokens)
        try:
            yield
        finally:
            peer.num_lent -= 1
            self.waiters.notify()

    @contextlib.contextmanager
    def encodes(self, name: str, num_images: int) -> Iterator[None]:
        """Count the images that a pod has to encode, before the pod reports them."""
        peer = self.peers.get(name)
        if peer is None:
            yield
            return
        peer.num_images += num_images
        try:
            yield
        finally:
            peer.num_images -= num_images

    @contextlib.contextmanager
    def held_for_pool(self, role: Role) -> Iterator[None]:
        """Count a request in `held_for` while it waits for a pool."""
        self._held[role] += 1
        try:
            yield
        finally:
            self._held[role] -= 1

    @contextlib.contextmanager
    def waits_for_wake(self) -> Iterator[None]:
        """Count a request that waits for the pods of a service at zero; in `/stats`."""
        self.num_waiting_for_wake += 1
        try:
            yield
        finally:
            self.num_waiting_for_wake -= 1

    @property
    def held_for(self) -> dict[str, int]:
        """Requests that wait for a pool without pods or free KV, by role; in `/stats`."""
        return {role.value: count for role, count in self._held.items() if count}

    def refused(self, boot_id: bytes) -> None:
        """Mark a worker as draining, before its next load report."""
        for peer in self.peers.values():
            if peer.hello is not None and peer.hello.boot_id == boot_id:
                peer.refuses = True
                self.waiters.notify()

    def lost_at(self, stage: Stage) -> float | None:
        """Return when a pod with this stage was last lost or removed; None if never."""
        return self._lost_at.get(stage)

    def start(self, work: Coroutine[None, None, None], *, name: str) -> None:
        """Run `work` as a task that outlives its request. `work` must handle its errors."""
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Close all connections, each after its last request, and end the background tasks."""
        while self._background:
            await asyncio.gather(*self._background)
        for peer in self.peers.values():
            self._disconnect(peer)
        self.peers.clear()
        await asyncio.gather(*self._background)

    def _disconnect(self, peer: PodConnection) -> None:
        self._note_loss(peer)
        self.start(self._close(peer), name=f"close {peer.pod.name}")
        self.waiters.notify()

    async def _close(self, peer: PodConnection) -> None:
        if peer.task is not None:
            peer.task.cancel()
            await asyncio.gather(peer.task, return_exceptions=True)
        # A removed pod may still answer; its streams end by themselves.
        await peer.unused.wait()
        await peer.client.close()

    async def _follow(self, peer: PodConnection) -> None:
        """Follow one worker until cancelled: Hello, then its load; on errors retry with backoff."""
        timers = self.timers
        delay = timers.retry
        while True:
            try:
                hello = await peer.client.hello(timeout=timers.hello)
                self._check(hello, peer.client.certified_role)
                peer.hello, peer.load, peer.num_others = hello, None, 0
                peer.refuses, peer.unusable_reason = False, ""
                self.waiters.notify()
                logger.info("worker found", extra={"pod": peer.pod.name, "role": hello.role})
                delay = timers.retry
                await self._follow_load(peer)
            except IncompatibleError as error:
                self._lost(peer, error)
                delay = timers.max_retry
            except (WorkerError, TimeoutError) as error:
                self._lost(peer, error)
            except Exception as error:
                # A defect in this code must not exclude the worker permanently.
                logger.exception("following a worker failed", extra={"pod": peer.pod.name})
                self._lost(peer, error)
            if await _is_set_within(peer.news, delay):
                delay = timers.retry  # it became ready: connect without backoff
            else:
                delay = min(delay * 2, timers.max_retry)

    async def _follow_load(self, peer: PodConnection) -> None:
        async with aclosing(peer.client.watch_load()) as loads:
            while True:
                async with asyncio.timeout(self.timers.silence):
                    load = await anext(loads, None)
                if load is None or (peer.hello and load.boot_id != peer.hello.boot_id):
                    return
                before = peer.usable
                peer.report(load)
                if peer.usable != before:
                    self.waiters.notify()

    def _lost(self, peer: PodConnection, error: Exception) -> None:
        if str(error) != peer.unusable_reason:
            message = "worker not reached" if peer.hello is None else "worker lost"
            logger.warning(message, extra={"pod": peer.pod.name, "reason": str(error)})
        peer.unusable_reason = str(error)
        self._note_loss(peer)
        peer.hello, peer.load, peer.num_others = None, None, 0
        self.waiters.notify()

    def is_connected(self, boot_id: bytes) -> bool:
        """Whether a connected pod has this boot id. A pod that ended or restarted has another."""
        return any(p.hello is not None and p.hello.boot_id == boot_id for p in self.peers.values())

    def _note_loss(self, peer: PodConnection) -> None:
        if peer.hello is not None:
            self.caches.forget(peer.hello.boot_id)
            self._lost_at |= dict.fromkeys(peer.hello.stages, self._clock())

    def _check(self, hello: Hello, certified: Role | None) -> None:
        """Raise IncompatibleError if the worker serves another model or compatibility set.

        With mutual TLS, its role must be the one of its certificate.
        """
        if certified is not None and hello.role is not certified:
            raise IncompatibleError(f"its role is {hello.role}, its certificate is of {certified}")
        if hello.model != self._served_name:
            raise IncompatibleError(f"it serves {hello.model!r}, not {self._served_name!r}")
        if self._compat and hello.compat != self._compat:
            compat = hello.compat or "not set (--compat)"
            raise IncompatibleError(f"its compat is {compat}, not {self._compat}")


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event and clear it; return False after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


def static_pods(addresses: Sequence[str]) -> list[KnownPod]:
    return [KnownPod(name=address, address=address) for address in addresses]


class PodsInUse:
    """The pods that the attempt `key` has called. The end of the context releases them.

    Attributes:
        failed_boot_ids: boot ids of the pods that failed.
        decoding: the decode pod sends tokens, so a later failure is not its producer's.
    """

    def __init__(self, key: RequestKey, registry: Registry) -> None:
        self.failed_boot_ids: set[bytes] = set()
        self.decoding = False
        self._key = key
        self._registry = registry
        self._used = contextlib.ExitStack()
        self._clients: dict[str, WorkerClient] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._used.close()

    def client(self, pod: Candidate) -> WorkerClient:
        """Return the client of a pod, which counts as in use until the attempt ends."""
        if pod.name not in self._clients:
            self._clients[pod.name] = self._used.enter_context(self._registry.use(pod.name))
        return self._clients[pod.name]

    @contextlib.contextmanager
    def record_failure(self, pod: Candidate, *producers: Candidate) -> Iterator[None]:
        """Record failures: of the called pod, and of the producers that it fetches from."""
        try:
            yield
        except DrainingError:
            self._registry.refused(pod.boot_id)
            self.failed_boot_ids.add(pod.boot_id)
            raise
        except WorkerError:
            self.failed_boot_ids.add(pod.boot_id)
            if not self.decoding:
                self.failed_boot_ids.update(producer.boot_id for producer in producers)
            raise

    def record_held(self, pod: Candidate, digests: Iterable[bytes]) -> None:
        """Record what a pod holds from now on, unless it is lost."""
        if self._registry.is_connected(pod.boot_id):
            self._registry.caches.record(pod.boot_id, digests)

    def record_prefix(self, pod: Candidate, marks: Sequence[Mark]) -> None:
        """Record that a pod holds a prompt, unless it is lost."""
        # As on the pod, the end of a prompt is forgotten before its beginning.
        self.record_held(pod, [mark.digest for mark in reversed(marks)])

    def cancel_everywhere(self) -> None:
        """Cancel the attempt on all its pods, in the background."""
        for name in self._clients:
            self._registry.start(self._cancel(name), name=f"cancel {self._key.request_id}")

    async def _cancel(self, name: str) -> None:
        """Cancel the attempt on one pod. A lost pod needs no cancellation."""
        with contextlib.suppress(WorkerError), self._registry.use(name) as client:
            await client.cancel(self._key, timeout=self._registry.timers.cancel)
