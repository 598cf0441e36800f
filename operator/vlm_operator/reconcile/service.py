"""Runs the turns of one service.

turn() ─▶ observe, scrape ─▶ plan_turn ─▶ execute ─▶ status, events, memory ─▶ Outcome
                  └─ is being deleted ─▶ drain its gateways, remove our finalizer

A turn may be interrupted between any two writes. The next turn, in this process or another,
observes the objects and continues. The loop's state only saves work; if lost, all is read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping

from vlm_operator import names
from vlm_operator.api import VLMService, parse
from vlm_operator.apply.learned import Learned
from vlm_operator.apply.pod_and_status_writes import apply_pod_patches, write_finalizers
from vlm_operator.apply.sync_state import SyncState
from vlm_operator.autoscale.decide import Memory
from vlm_operator.autoscale.outcome import Attribution
from vlm_operator.cluster import Cluster, Manifest
from vlm_operator.errors import ClusterError, SpecError
from vlm_operator.identity.authority import Authority
from vlm_operator.identity.keeper import IdentityKeeper
from vlm_operator.metrics import forget
from vlm_operator.observe import observe
from vlm_operator.reconcile.accepted_spec import AcceptedSpec
from vlm_operator.reconcile.class_and_pool_status import NodeClassUsage
from vlm_operator.reconcile.decisions import Options, TurnPlan, hold_drains, plan_turn
from vlm_operator.reconcile.deletion import Deletion, gateway_nodes
from vlm_operator.reconcile.gate import Gate
from vlm_operator.reconcile.queue import Cause, Outcome
from vlm_operator.reconcile.report import Reporter, stored_memory
from vlm_operator.reconcile.retries import Retries
from vlm_operator.reconcile.tracking import Tracker
from vlm_operator.reconcile.writing import ExecutionResult, execute
from vlm_operator.scrape import Scraper
from vlm_operator.state import Observed
from vlm_operator.state.downloads import download_state
from vlm_operator.state.identities import IdentityState
from vlm_operator.status.build import build_status
from vlm_operator.status.classes import class_uses
from vlm_operator.status.events import Event, events
from vlm_operator.status.inputs import Failure, StatusInputs
from vlm_operator.status.refused import refusal, refused_status

DRAIN_TICK_SECONDS = 1.0
DOWNLOAD_TICK_SECONDS = 5.0
WAKE_TICK_SECONDS = 1.0  # while gateways may queue requests for a pool with zero replicas


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A manifest, the view of the cluster, and the plan that follows from both."""

    observed: Observed
    written: VLMService
    turn_plan: TurnPlan


class ServiceReconciler:
    """Reconciles one VLMService. Not shared between tasks.

    Args:
        cluster: cluster of the service; the lease fences its writes.
        clock: seconds since the epoch.
        resync: longest time between two full reads, in seconds.
        epoch: returns the Lease's leaseTransitions, for decision records.
        learned: defaults that the API server adds to objects; all loops share it.
        authority: the operator's CAs; all loops share it.
        book: records which node classes the pods use.
        gate: limits the number of turns that decide and write at once. Scraping pods is outside
            of the gate, because it may take its whole timeout.
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
        book: NodeClassUsage | None = None,
        gate: Gate | None = None,
        authority: Authority | None = None,
    ) -> None:
        self._namespace = namespace
        self._name = name
        self._cluster = cluster
        self._scraper = scraper
        self._options = options
        self._clock = clock
        self._resync = resync
        self._epoch = epoch
        self._book = book or NodeClassUsage()
        self._gate = gate or Gate(1)
        if authority is None:
            authority = Authority(cluster, namespace=names.OPERATOR_NAMESPACE, name=names.CA_SECRET)
        self._keeper = IdentityKeeper(
            cluster,
            authority,
            check_seconds=options.identity_check_seconds,
            poll_seconds=resync,
        )
        self._identity = IdentityState()
        self._uid: str | None = None
        self._seen: Observed | None = None
        self._memory: Memory | None = None
        self._slo: tuple[Attribution, ...] = ()
        self._sync_state = SyncState(learned=learned or Learned())
        self._retries = Retries()
        self._tracker = Tracker()
        self._reporter = Reporter(cluster, namespace=namespace, name=name)

    async def turn(self, *, woken: bool = True, rank: float = 0.0) -> Outcome:
        """Take one turn.

        If `woken` is False, nothing is known to have changed: the turn reuses a recent view with
        fresh samples. If the service is deleted, or another one has its name, nothing is written.
        `rank` is that of the turn at the gate.

        Raises:
            ClusterError: the API server is unreachable, or another writer changed an object.
            LeaseLostError: this process no longer leads.
        """
        observed = await self._observe(woken)
        if observed.service is None:
            return self._gone()
        meta = observed.service["metadata"]
        if self._uid not in (None, meta["uid"]):
            return self._gone(again={Cause.SPEC: 0.0})
        self._uid = meta["uid"]
        async with self._gate.entered(rank):
            service = observed.service
            if "deletionTimestamp" in meta:
                return await self._drain(service, observed)
            if names.FINALIZER not in meta.get("finalizers", []):
                # before the first child exists that it drains
                finalizers = (*meta.get("finalizers", []), names.FINALIZER)
                service = await write_finalizers(self._cluster, service, finalizers)
                self._seen = observed = dataclasses.replace(observed, service=service)
            return Outcome(again=await self._act(service, observed))

    async def _act(self, body: Manifest, observed: Observed) -> dict[Cause, float]:
        self._retries.begin(int(body["metadata"]["generation"]))
        try:
            turn = self._plan(body, observed)
        except SpecError as error:
            failure = refusal(error, body.get("status", {}), now=observed.now)
            last = self._last_accepted(body, observed)
            if last is None:
                return await self._refuse(observed, body, failure)
            done = await self._execute(last)
            return await self._report_turn(body, last, dataclasses.replace(done, failure=failure))
        done = await self._execute(turn)
        if done.failure is not None and not done.failure.accepted:
            last = self._last_accepted(body, observed)
            if last is not None:
                again = await self._execute(last)
                wrote = again.wrote or done.wrote
                done = dataclasses.replace(again, failure=done.failure, wrote=wrote)
                turn = last
        elif not turn.written.spec.paused and not self._sync_state.ends:
            accepted = AcceptedSpec.of(body, turn.written, observed)
            if await self._reporter.accepted(turn.written, accepted, observed):
                done = dataclasses.replace(done, wrote=True)
            conflict = self._reporter.name_conflict()
            done = dataclasses.replace(done, failure=done.failure or conflict)
        return await self._report_turn(body, turn, done)

    def _plan(self, body: Manifest, observed: Observed) -> _Turn:
        """Parse `body` and plan the turn.

        Raises:
            SpecError: the manifest, or an object that it names, is invalid.
        """
        written = parse(body)
        memory = self._memory or stored_memory(observed, self._name)
        since = self._tracker.progressed(body.get("status", {}), now=observed.now)
        turn_plan = plan_turn(written, observed, memory, options=self._options, progressed=since)
        return _Turn(observed, written, turn_plan)

    def _last_accepted(self, body: Manifest, observed: Observed) -> _Turn | None:
        """Plan the turn for the last accepted manifest; None if there is no valid one."""
        last = AcceptedSpec.stored(observed, self._name)
        if last is None:
            return None
        try:
            return self._plan(last.instead_of(body), last.seen_in(observed))
        except SpecError:
            return None

    async def _execute(self, turn: _Turn) -> ExecutionResult:
        """Issue certificates first: a pod starts only if its Secret exists."""
        observed = turn.observed
        if not self._sync_state.ends:
            self._identity = await self._keeper.keep(
                turn.written,
                turn.turn_plan.identities,
                (observed.service or {}).get("status", {}),
                now=observed.now,
            )
        done = await execute(
            self._cluster,
            turn.turn_plan,
            observed,
            sync_state=self._sync_state,
            retries=self._retries,
        )
        return dataclasses.replace(done, wrote=done.wrote or self._identity.wrote)

    async def _report_turn(
        self, body: Manifest, turn: _Turn, done: ExecutionResult
    ) -> dict[Cause, float]:
        observed, written, turn_plan = turn.observed, turn.written, turn.turn_plan
        previous: Manifest = body.get("status", {})
        self._book.note((self._namespace, self._name), class_uses(written, observed))
        if done.wrote:
            self._seen = None  # our writes made the view stale
        view = self._status_inputs(turn, done)
        view = self._tracker.view(view, self._sync_state.write_conflicts)
        status = build_status(view, previous, now=observed.now)
        notices = self._reporter.notices(self._sync_state, observed)
        ends = self._sync_state.ends  # a namespace that is being deleted accepts no Event
        new_events = (
            () if ends else (*events(previous, status, turn_plan.decisions.items()), *notices)
        )
        await self._write_status(body, status, new_events)
        self._update_seen(await self._reporter.pools(view))
        fixed = ends or written.spec.paused
        if not fixed and await self._reporter.memory(turn_plan, observed):
            self._seen = None
        self._reporter.count(view, turn_plan)
        self._memory = turn_plan.sizing.outcome.memory
        return self._next(turn_plan)

    async def _drain(self, body: Manifest, observed: Observed) -> Outcome:
        """Take a turn of a service that is being deleted; its last turn removes our finalizer."""
        if names.FINALIZER not in body["metadata"].get("finalizers", []):
            return self._gone()
        deletion = Deletion(observed, await gateway_nodes(self._cluster, observed))
        await deletion.stop_gateway(self._cluster, namespace=self._namespace)
        previous: Manifest = body.get("status", {})
        status = deletion.status(previous)
        new_events = events(previous, status)
        if not deletion.finished:
            await self._write_status(body, status, new_events)
            return Outcome(again={Cause.DELETION: DRAIN_TICK_SECONDS})
        # first, because a failed status write must not keep our finalizer
        await write_finalizers(self._cluster, body, deletion.others)
        if deletion.overdue and deletion.foreign:  # other finalizers keep the object
            with contextlib.suppress(ClusterError):
                await self._write_status(body, status, new_events)
        return self._gone()

    def _gone(self, *, again: Mapping[Cause, float] | None = None) -> Outcome:
        forget(self._namespace, self._name)
        self._book.forget((self._namespace, self._name))
        return Outcome(again=again or {}, gone=True)

    async def _refuse(
        self, observed: Observed, body: Manifest, failure: Failure
    ) -> dict[Cause, float]:
        """Report the refusal and change no child: there is no accepted manifest."""
        pod_patches = hold_drains(observed)
        if await apply_pod_patches(
            self._cluster, pod_patches, namespace=self._namespace, now=observed.now
        ):
            self._seen = None
        previous: Manifest = body.get("status", {})
        generation = int(body["metadata"]["generation"])
        status = refused_status(failure, previous, observed, generation=generation)
        await self._write_status(body, status, events(previous, status))
        return {Cause.TICK: self._resync}

    async def _observe(self, woken: bool) -> Observed:
        now = self._clock()
        seen = self._seen
        if woken or seen is None or now - seen.now >= self._resync:
            seen = await observe(self._cluster, self._namespace, self._name, now=now)
            self._seen = seen
        samples, progress = await asyncio.gather(
            self._scraper.scrape(seen.pods), self._scraper.downloads(seen.downloads)
        )
        downloads = tuple(
            dataclasses.replace(pod, progress=progress.get(pod.uid)) for pod in seen.downloads
        )
        return dataclasses.replace(seen, samples=samples, downloads=downloads, now=now)

    async def _write_status(
        self, body: Manifest, status: Manifest, new_events: tuple[Event, ...]
    ) -> None:
        status = await self._reporter.status(body, status, new_events, now=self._clock())
        if self._seen is not None and status != body.get("status"):
            service = {**body, "status": status}
            self._seen = dataclasses.replace(self._seen, service=service)

    def _update_seen(self, written: dict[tuple[str, str], Manifest]) -> None:
        """Update the view with children that this turn wrote."""
        if self._seen is not None and written:
            children = {**self._seen.children, **written}
            self._seen = dataclasses.replace(self._seen, children=children)

    def _status_inputs(self, turn: _Turn, done: ExecutionResult) -> StatusInputs:
        """Return what the status is about; it includes the children that this turn wrote.

        Events of our own writes start no turn.
        """
        turn_plan = turn.turn_plan
        estimate = turn_plan.sizing.outcome.estimate
        if estimate.counted or not estimate.attributions:
            # without new requests the window only moves; an unchanged slo avoids a write
            self._slo = estimate.attributions
        gateway = turn_plan.service.spec.gateway
        observed = turn.observed.with_children(done.answers)
        return StatusInputs(
            written=turn.written,
            service=turn_plan.service,
            observed=observed,
            revisions=turn_plan.revisions,
            policy=turn_plan.sizing.policy,
            outcome=turn_plan.sizing.outcome,
            desired=turn_plan.desired,
            step=turn_plan.step,
            slo=self._slo,
            url=names.api_url(
                self._name,
                self._namespace,
                domain=self._options.cluster_domain,
                port=gateway.service.port,
                tls=gateway.tls.secret_ref is not None,
            ),
            epoch=self._epoch(),
            failure=done.failure,
            pending=done.pending,
            identity=self._identity,
            download=download_state(turn_plan.service, observed),
            held=turn_plan.held,
        )

    def _next(self, turn_plan: TurnPlan) -> dict[Cause, float]:
        if turn_plan.draining:
            return {Cause.DRAIN: DRAIN_TICK_SECONDS}
        tick = float(turn_plan.service.spec.autoscaling.interval_seconds)
        download = turn_plan.download
        if download is not None and not download.complete and download.failed is None:
            tick = min(tick, DOWNLOAD_TICK_SECONDS)
        if turn_plan.asleep and tick > WAKE_TICK_SECONDS:
            return {Cause.WAKE: WAKE_TICK_SECONDS}
        return {Cause.TICK: tick}
