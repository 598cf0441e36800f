"""One service's loop.

turn() ─▶ observe, scrape ─▶ intend ─▶ carry out ─▶ status, events, memory
       ◀─ seconds until the next one

Every turn may be cut off between any two writes: the next one, here or in another process, sees
what is there and goes on. What the loop remembers only spares work; losing it costs a full read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from vlm_operator import names
from vlm_operator.api import VLMService, parse
from vlm_operator.apply import (
    MEMORY_KEY,
    Accepted,
    apply_pool_status,
    apply_status,
    post_events,
    save_memory,
)
from vlm_operator.autoscale import History, dump_history, load_history, record
from vlm_operator.cluster import CONFIG_MAP, Cluster, Manifest
from vlm_operator.errors import SpecError
from vlm_operator.metrics import DESIRED_REPLICAS, READY_REPLICAS, SCALE_DECISIONS, forget
from vlm_operator.names import Role
from vlm_operator.observe import observe
from vlm_operator.plan import owner_reference, pool_claim
from vlm_operator.pods import object_labels
from vlm_operator.reconcile.decisions import Intent, Options, intend
from vlm_operator.reconcile.deletion import Deletion
from vlm_operator.reconcile.writing import carry_out
from vlm_operator.scrape import Scraper
from vlm_operator.state import Observed
from vlm_operator.status import (
    Event,
    Failure,
    SloWindow,
    View,
    build_status,
    events,
    pool_status_of_kind,
    refused_status,
)

logger = logging.getLogger(__name__)

DRAIN_TICK_SECONDS = 1.0
PERSON_SECONDS = 60.0  # between tries at what only a person can change
MEMORY_SECONDS = 30.0  # between two writes of the autoscaler's memory


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
    ) -> None:
        self._namespace = namespace
        self._name = name
        self._cluster = cluster
        self._scraper = scraper
        self._options = options
        self._clock = clock
        self._resync = resync
        self._epoch = epoch
        self._seen: Observed | None = None
        self._histories: dict[Role, History] | None = None
        self._memory_at = float("-inf")
        self._slo = SloWindow()
        self._accepted = Accepted()
        self._posted: dict[Event, float] = {}

    async def turn(self, *, woken: bool = True) -> float:
        """Take one turn; returns the seconds after which the next one is due.

        `woken` says that something changed; without it a recent view is used again, with fresh
        samples.

        Raises:
            ClusterError: the API server could not be reached or somebody wrote in between.
            LeaseLostError: this process no longer leads.
        """
        observed = await self._observe(woken)
        body = observed.service
        if body is None or "deletionTimestamp" in body["metadata"]:
            return self._resync
        previous: Manifest = body.get("status", {})
        try:
            written = parse(body)
        except SpecError as error:
            failure = Failure("SpecInvalid", str(error), accepted=False)
            status = refused_status(
                failure, previous, generation=body["metadata"]["generation"], now=observed.now
            )
            await self._report(body, previous, status, ())
            return self._resync
        self._remember(observed, written)
        assert self._histories is not None
        intent = intend(written, observed, self._histories, options=self._options)
        failure_found, wrote = await carry_out(
            self._cluster, intent, observed, accepted=self._accepted
        )
        if wrote:
            self._seen = None  # what we saw is no longer what is there
        view = self._view(written, intent, observed, failure_found)
        status = build_status(view, previous, now=observed.now)
        news = events(previous, status, intent.decisions.items())
        await self._report(body, previous, status, news)
        await self._report_pools(view, observed)
        await self._save(intent, observed)
        self._count(view, intent)
        self._histories = dict(intent.histories)
        return self._next(intent, failure_found)

    async def drain(self) -> float | None:
        """Let a deleted service finish; seconds until the next look, None when it may go.

        Raises:
            ClusterError, LeaseLostError: as `turn`.
        """
        observed = await self._observe(True)
        if observed.service is None:
            forget(self._namespace, self._name)
            return None
        deletion = Deletion(observed)
        await deletion.stop_gateway(self._cluster, namespace=self._namespace)
        previous: Manifest = observed.service.get("status", {})
        status = deletion.status(previous)
        news = events(previous, status)
        await self._report(observed.service, previous, status, news)
        if deletion.finished:
            forget(self._namespace, self._name)
            return None
        return DRAIN_TICK_SECONDS

    async def _observe(self, woken: bool) -> Observed:
        now = self._clock()
        seen = self._seen
        if woken or seen is None or now - seen.now >= self._resync:
            seen = await observe(self._cluster, self._namespace, self._name, now=now)
            self._seen = seen
        samples = await self._scraper.scrape(seen.pods)
        return dataclasses.replace(seen, samples=samples, now=now)

    def _remember(self, observed: Observed, written: VLMService) -> None:
        """Advance what is kept from turn to turn; read the autoscaler's memory at first."""
        if self._histories is None:
            stored = observed.child(CONFIG_MAP.kind, names.child(self._name, "autoscaler"))
            data = {} if stored is None else stored.get("data", {})
            self._histories = {
                role: load_history(data.get(f"{role}.{MEMORY_KEY}"), now=observed.now)
                for role in names.POOL_ROLES
            }
        window = float(written.spec.slo.window_seconds)
        self._slo = self._slo.advance(observed.samples.values(), now=observed.now, window=window)

    def _view(
        self, written: VLMService, intent: Intent, observed: Observed, failure: Failure | None
    ) -> View:
        port = intent.service.spec.gateway.service.port
        host = f"{names.child(self._name, Role.GATEWAY)}.{self._namespace}.svc"
        suffix = "" if port == 80 else f":{port}"
        return View(
            written=written,
            service=intent.service,
            observed=observed,
            revisions=intent.revisions,
            decisions=intent.decisions,
            histories=intent.histories,
            desired=intent.desired,
            step=intent.step,
            slo=self._slo,
            url=f"http://{host}.{self._options.cluster_domain}{suffix}/v1",
            epoch=self._epoch(),
            failure=failure,
        )

    async def _report(
        self, body: Manifest, previous: Manifest, status: Manifest, news: tuple[Event, ...]
    ) -> None:
        """Write the status where it differs, then say what changed."""
        uid = body["metadata"]["uid"]
        if status != previous:
            await apply_status(
                self._cluster,
                namespace=self._namespace,
                name=self._name,
                uid=uid,
                status=status,
            )
            if self._seen is not None and self._seen.service is not None:
                seen = {**self._seen.service, "status": status}
                self._seen = dataclasses.replace(self._seen, service=seen)
        now = self._clock()
        fresh = [item for item in news if now - self._posted.get(item, float("-inf")) > 60.0]
        self._posted |= dict.fromkeys(fresh, now)
        await post_events(
            self._cluster,
            fresh,
            namespace=self._namespace,
            name=self._name,
            uid=uid,
            now=now,
        )

    async def _report_pools(self, view: View, observed: Observed) -> None:
        """Keep each VLMPool's status; HPA reads it."""
        for role in view.service.spec.pools.present:
            name = names.child(self._name, role)
            pool = observed.child(names.KIND_POOL, name)
            wanted = pool_status_of_kind(view, role)
            if pool is not None and pool.get("status") != wanted:
                claim = pool_claim(view.service, role, 0)
                await apply_pool_status(self._cluster, claim, status=wanted)
                if self._seen is not None:
                    kept = {(names.KIND_POOL, name): {**pool, "status": wanted}}
                    children = {**self._seen.children, **kept}
                    self._seen = dataclasses.replace(self._seen, children=children)

    async def _save(self, intent: Intent, observed: Observed) -> None:
        """Write the autoscaler's memory: only when it changed, and not too often."""
        pools = intent.service.spec.pools.present
        data = {
            f"{role}.{MEMORY_KEY}": dump_history(intent.histories[role])
            for role in pools
            if intent.histories[role].decisions
        }
        stored = observed.child(CONFIG_MAP.kind, names.child(self._name, "autoscaler"))
        known = {} if stored is None else stored.get("data", {})
        if not data or data == known or observed.now - self._memory_at < MEMORY_SECONDS:
            return
        self._memory_at = observed.now
        await save_memory(
            self._cluster,
            namespace=self._namespace,
            service=self._name,
            owner=owner_reference(intent.service),
            labels=object_labels(self._name, "autoscaler"),
            data=data,
        )
        self._seen = None

    def _count(self, view: View, intent: Intent) -> None:
        """Metrics and the log's decision records."""
        for role in view.service.spec.pools.present:
            labels = {"namespace": self._namespace, "service": self._name, "role": role.value}
            DESIRED_REPLICAS.labels(**labels).set(view.desired[role])
            READY_REPLICAS.labels(**labels).set(len(view.serving(role)))
            decision = intent.decisions[role]
            known = () if self._histories is None else self._histories[role].decisions
            if intent.histories[role].decisions == known:
                continue
            SCALE_DECISIONS.labels(**labels, reason=decision.reason).inc()
            samples = view.observed.samples
            inputs = {
                pod.name: dataclasses.asdict(samples[pod.uid])
                for pod in view.observed.of(role)
                if pod.uid in samples
            }
            fields = {**record(decision, epoch=view.epoch), "role": role.value, "inputs": inputs}
            logger.info("decision", extra={"service": self._name, "decision": fields})

    def _next(self, intent: Intent, failure: Failure | None) -> float:
        if failure is not None:
            return PERSON_SECONDS
        if intent.draining:
            return DRAIN_TICK_SECONDS
        return float(intent.service.spec.autoscaling.tick_seconds)
