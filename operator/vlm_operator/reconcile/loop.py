"""One service's loop.

turn() ─▶ observe, scrape ─▶ intend ─▶ carry out ─▶ status, events, memory
       ◀─ seconds until the next one

Every turn may be cut off between any two writes: the next one, here or in another process, sees
what is there and goes on. What the loop remembers only spares work; losing it costs a full read.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from vlm_operator import names
from vlm_operator.api import VLMService, parse
from vlm_operator.apply import Accepted, Learned, apply_gates, contested
from vlm_operator.autoscale.decide import Memory
from vlm_operator.autoscale.outcome import Attribution
from vlm_operator.cluster import Cluster, Manifest
from vlm_operator.errors import SpecError
from vlm_operator.metrics import forget
from vlm_operator.names import Role
from vlm_operator.observe import observe
from vlm_operator.reconcile.accepted_spec import AcceptedSpec
from vlm_operator.reconcile.classes import ClassBook
from vlm_operator.reconcile.decisions import Intent, Options, held_gates, intend
from vlm_operator.reconcile.deletion import Deletion
from vlm_operator.reconcile.report import Reporter, stored_memory
from vlm_operator.reconcile.retries import Retries
from vlm_operator.reconcile.tracking import Tracker
from vlm_operator.reconcile.writing import Done, carry_out
from vlm_operator.scrape import Scraper
from vlm_operator.state import Observed
from vlm_operator.status import (
    Event,
    Failure,
    View,
    build_status,
    class_uses,
    events,
    refusal,
    refused_status,
)

DRAIN_TICK_SECONDS = 1.0
WAKE_TICK_SECONDS = 1.0  # while requests may be held for a pool at zero


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A manifest, the view that it was decided on, and what it wants."""

    observed: Observed
    written: VLMService
    intent: Intent


class Loop:
    """Looks after one VLMService. Not shared between tasks.

    Args:
        namespace: of the service.
        name: of the service.
        cluster: where it lives, fenced by the lease.
        scraper: reads pods.
        options: the operator's settings.
        clock: seconds since the epoch.
        resync: a full read at least this often, in seconds.
        epoch: leaseTransitions, for decision records.
        learned: what the API server adds to objects by itself; all loops share it.
        book: told which node classes the pods run on.
        gate: how many turns may decide and write together; reading pods counts not, which may
            take its whole timeout.
    """

    def __init__(
        self,
        namespace: str,
        name: str,
        *,
        cluster: Cluster,
        scraper: Scraper,
        options: Options,
        clock: Callable[[], float],
        resync: float = 60.0,
        epoch: Callable[[], int] = lambda: 0,
        learned: Learned | None = None,
        book: ClassBook | None = None,
        gate: asyncio.Semaphore | None = None,
    ) -> None:
        self._namespace = namespace
        self._name = name
        self._cluster = cluster
        self._scraper = scraper
        self._options = options
        self._clock = clock
        self._resync = resync
        self._epoch = epoch
        self._book = book or ClassBook()
        self._gate = gate or asyncio.Semaphore(1)
        self._seen: Observed | None = None
        self._memory: Memory | None = None
        self._slo: tuple[Attribution, ...] = ()
        self._accepted = Accepted(learned=learned or Learned())
        self._contests = self._accepted.contests
        self._retries = Retries()
        self._tracker = Tracker()
        self._report = Reporter(cluster, namespace=namespace, name=name)

    async def turn(self, *, woken: bool = True) -> float:
        """Take one turn; returns the seconds after which the next one is due.

        `woken` says that something changed; without it a recent view is used again, with fresh
        samples.

        Raises:
            ClusterError: the API server could not be reached or somebody wrote in between.
            LeaseLostError: this process no longer leads.
        """
        observed = await self._observe(woken)
        async with self._gate:
            return await self._act(observed)

    async def _act(self, observed: Observed) -> float:
        body = observed.service
        if body is None or "deletionTimestamp" in body["metadata"]:
            return self._resync
        self._retries.begin(int(body["metadata"]["generation"]))
        try:
            turn = self._intend(body, observed)
        except SpecError as error:
            failure = refusal(error, body.get("status", {}), now=observed.now)
            last = self._last_accepted(body, observed)
            if last is None:
                return await self._refuse(observed, body, failure)
            done = await self._carry_out(last)
            return await self._finish(body, last, dataclasses.replace(done, failure=failure))
        done = await self._carry_out(turn)
        if done.failure is not None and not done.failure.accepted:
            last = self._last_accepted(body, observed)
            if last is not None:
                again = await self._carry_out(last)
                wrote = again.wrote or done.wrote
                done = dataclasses.replace(again, failure=done.failure, wrote=wrote)
                turn = last
        elif not turn.written.spec.paused and not self._accepted.ends:
            accepted = AcceptedSpec.of(body, turn.written, observed)
            if await self._report.accepted(turn.written, accepted, observed):
                done = dataclasses.replace(done, wrote=True)
        return await self._finish(body, turn, done)

    def _intend(self, body: Manifest, observed: Observed) -> _Turn:
        """Decide what `body` asks for.

        Raises:
            SpecError: the manifest, or what it names, cannot be acted on.
        """
        written = parse(body)
        memory = self._memory or stored_memory(observed, self._name)
        since = self._tracker.progressed(body.get("status", {}), now=observed.now)
        intent = intend(written, observed, memory, options=self._options, progressed=since)
        return _Turn(observed, written, intent)

    def _last_accepted(self, body: Manifest, observed: Observed) -> _Turn | None:
        """What the last accepted manifest asks for now; None if there is none to act on."""
        last = AcceptedSpec.stored(observed, self._name)
        if last is None:
            return None
        try:
            return self._intend(last.instead_of(body), last.seen_in(observed))
        except SpecError:
            return None

    async def _carry_out(self, turn: _Turn) -> Done:
        return await carry_out(
            self._cluster,
            turn.intent,
            turn.observed,
            accepted=self._accepted,
            retries=self._retries,
        )

    async def _finish(self, body: Manifest, turn: _Turn, done: Done) -> float:
        """Tell of a turn; returns the seconds until the next one."""
        observed, written, intent = turn.observed, turn.written, turn.intent
        previous: Manifest = body.get("status", {})
        self._book.note((self._namespace, self._name), class_uses(written, observed))
        if done.wrote:
            self._seen = None  # what we saw is no longer what is there
        # the echo of our own writes wakes nobody: a child made now is told of now
        failure = self._tracker.failure(done.failure, now=observed.now)
        view = self._view(written, intent, observed.with_children(done.answers), failure)
        view = dataclasses.replace(view, pending=done.pending)
        view = self._tracker.view(view, self._accepted.contests)
        status = build_status(view, previous, now=observed.now)
        fights = contested(self._contests, self._accepted.contests)
        self._contests = self._accepted.contests
        said = (*(Event("ChildContested", message) for message in fights),)
        said += (*(Event("ChildRepaired", message) for message in self._accepted.told()),)
        said += self._report.foreign(observed)
        ends = self._accepted.ends  # then no Event can be created either
        news = () if ends else (*events(previous, status, intent.decisions.items()), *said)
        await self._tell(body, status, news)
        self._note(await self._report.pools(view))
        if not ends and not written.spec.paused and await self._report.memory(intent, observed):
            self._seen = None
        self._report.count(view, intent)
        self._memory = intent.sizing.outcome.memory
        return self._next(intent)

    async def drain(self) -> float | None:
        """Let a deleted service finish; seconds until the next look, None when it may go.

        Raises:
            ClusterError, LeaseLostError: as `turn`.
        """
        observed = await self._observe(True)
        body = observed.service
        if body is None or "deletionTimestamp" not in body["metadata"]:
            # gone; another service may have its name already, with a loop of its own
            self._forget()
            return None
        deletion = Deletion(observed)
        await deletion.stop_gateway(self._cluster, namespace=self._namespace)
        if deletion.finished:  # a status that cannot be written must not keep the object
            self._forget()
            return None
        previous: Manifest = body.get("status", {})
        status = deletion.status(previous)
        news = events(previous, status)
        await self._tell(body, status, news)
        return DRAIN_TICK_SECONDS

    def _forget(self) -> None:
        forget(self._namespace, self._name)
        self._book.forget((self._namespace, self._name))

    async def _refuse(self, observed: Observed, body: Manifest, failure: Failure) -> float:
        """Say what is wrong and leave what serves alone: no manifest was accepted before."""
        gates = held_gates(observed)
        if await apply_gates(self._cluster, gates, namespace=self._namespace, now=observed.now):
            self._seen = None
        previous: Manifest = body.get("status", {})
        generation = int(body["metadata"]["generation"])
        status = refused_status(failure, previous, observed, generation=generation)
        await self._tell(body, status, events(previous, status))
        return self._resync

    async def _observe(self, woken: bool) -> Observed:
        now = self._clock()
        seen = self._seen
        if woken or seen is None or now - seen.now >= self._resync:
            seen = await observe(self._cluster, self._namespace, self._name, now=now)
            self._seen = seen
        samples = await self._scraper.scrape(seen.pods)
        return dataclasses.replace(seen, samples=samples, now=now)

    async def _tell(self, body: Manifest, status: Manifest, news: tuple[Event, ...]) -> None:
        status = await self._report.status(body, status, news, now=self._clock())
        if self._seen is not None and status != body.get("status"):
            service = {**body, "status": status}
            self._seen = dataclasses.replace(self._seen, service=service)

    def _note(self, written: dict[tuple[str, str], Manifest]) -> None:
        """Keep the view up to date with what was just written."""
        if self._seen is not None and written:
            children = {**self._seen.children, **written}
            self._seen = dataclasses.replace(self._seen, children=children)

    def _view(
        self, written: VLMService, intent: Intent, observed: Observed, failure: Failure | None
    ) -> View:
        found = intent.sizing.outcome.estimate
        if found.counted or not found.attributions:
            # a window that only slides on is no news: an idle service is not written
            self._slo = found.attributions
        port = intent.service.spec.gateway.service.port
        host = f"{names.child(self._name, Role.GATEWAY)}.{self._namespace}.svc"
        suffix = "" if port == 80 else f":{port}"
        return View(
            written=written,
            service=intent.service,
            observed=observed,
            revisions=intent.revisions,
            policy=intent.sizing.policy,
            outcome=intent.sizing.outcome,
            desired=intent.desired,
            step=intent.step,
            slo=self._slo,
            url=f"http://{host}.{self._options.cluster_domain}{suffix}/v1",
            epoch=self._epoch(),
            failure=failure,
        )

    def _next(self, intent: Intent) -> float:
        if intent.draining:
            return DRAIN_TICK_SECONDS
        tick = float(intent.service.spec.autoscaling.tick_seconds)
        return min(tick, WAKE_TICK_SECONDS) if intent.asleep else tick
