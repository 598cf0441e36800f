"""State that all requests of a gateway share: settings, workers, limits, metrics, phase."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from vlm_worker.annotations import MAX_WEIGHTED_SECONDS
from vlm_worker.client import WorkerClient
from vlm_worker.core.process_memory import ProcessMemory
from vlm_worker.gateway.client_embeddings import common_layout
from vlm_worker.gateway.config import ConfigWatcher, Salts
from vlm_worker.gateway.fair_queue import WorkEstimate
from vlm_worker.gateway.fetching.fetcher import ImageFetcher
from vlm_worker.gateway.memory import MemoryBudget, MemoryReservation
from vlm_worker.gateway.metrics import GatewayMetrics
from vlm_worker.gateway.orchestrate.generation import RetryPolicy
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.pod_registry import Connect, Registry
from vlm_worker.gateway.prompts import PromptBuilder
from vlm_worker.gateway.rate_limits import RateLimits, RequestCharge, limits_of
from vlm_worker.gateway.request_preparation import Preparer
from vlm_worker.gateway.session_prefetch import SessionPrefetcher
from vlm_worker.route import least_queued_seconds, missing_stages
from vlm_worker.settings import GatewaySettings
from vlm_worker.supervision import Supervisor
from vlm_worker.telemetry import SpanExporter
from vlm_worker.types import EmbedLayout, Role, Stage

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0

_ALWAYS_NEEDED = frozenset({Stage.PREFILL, Stage.DECODE})


class GatewayContext:
    """The shared state of one gateway. The event loop is its only writer."""

    def __init__(
        self,
        settings: GatewaySettings,
        prompt_builder: PromptBuilder,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect = WorkerClient,
    ) -> None:
        self.settings = settings
        self.prompt_builder = prompt_builder
        self.clock = clock
        self.config_watcher = ConfigWatcher(
            settings.config, settings.api_keys_dir, images_per_request=settings.images_per_request
        )
        self.registry = Registry(
            served_name=settings.served_name,
            compat=settings.compat,
            timers=settings.timers,
            clock=clock,
            connect=connect,
        )
        self.retry_policy = RetryPolicy(
            patience_seconds=settings.patience_seconds,
            max_waiting=settings.max_waiting,
            clock=clock,
        )
        self.memory = MemoryBudget(settings.memory_bytes)
        self.meters = GatewayMetrics(clock(), memory=self.memory)
        self.meters.caches = self.registry.caches
        self.rate_limits = RateLimits()
        self.meters.accounts = self.rate_limits.accounts
        self.work = WorkEstimate()
        self.registry.waiters.weight_of = self._weight_of
        self.tasks = Supervisor(clock=clock)
        self.fetcher = ImageFetcher(self.meters.fetched, is_shared=self.has_several_tenants)
        self.preparer = Preparer(
            prompt_builder=prompt_builder,
            served_name=settings.served_name,
            max_model_len=settings.max_model_len,
            block_size=settings.block_size,
            salts=Salts(settings.served_name, lambda: self.config_watcher.now.keys),
            any_priority=settings.any_priority,
            fetcher=self.fetcher,
            session_prefetch=settings.session_prefetch,
            mark_history=settings.mark_history,
            client_embeddings=settings.client_embeddings,
            embed_layout=self._embed_layout,
        )
        self.prefetcher: SessionPrefetcher | None = None
        if settings.session_prefetch:
            self.prefetcher = SessionPrefetcher(self.registry, max_model_len=settings.max_model_len)
            self.meters.prefetches = self.prefetcher.outcomes
        self.tracer: SpanExporter | None = None
        if settings.trace_ratio:
            from vlm_worker.tracing import Tracer

            self.tracer = Tracer(settings.identity, Role.GATEWAY, ratio=settings.trace_ratio)
        self.boot_id = secrets.token_hex(16)
        self.started = clock()
        self.created = int(time.time())
        self.num_inflight = 0
        self._num_for_workers = 0  # of those in flight
        self._last_active = self.started
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False
        self.refusing = False
        self.failed: str | None = None  # reason of a permanent failure
        self.drain_ended = asyncio.Event()
        self.discovery_problem = ""  # why pods cannot be read; "" if they can
        self._was_ready = False

    def _embed_layout(self) -> EmbedLayout | None:
        """The layout of the embeddings that clients may send; None if the workers name none."""
        peers = self.registry.peers.values()
        return common_layout(peer.hello for peer in peers if peer.hello is not None)

    def declare(self, memory: ProcessMemory, resident: Callable[[], int]) -> None:
        """Limit requests to their part of the declared memory, and export all parts."""
        self.memory.num_bytes = memory.requests
        self.meters.declare(memory, resident)

    def hold_memory(self, tenant: str) -> MemoryReservation:
        """Start the memory account of a request of this tenant."""
        return self.memory.hold(tenant, shared=self.has_several_tenants())

    def charge(self, tenant: str) -> RequestCharge:
        """Return the charge of a new request against its tenant's limits."""
        limits = limits_of(tenant, self.config_watcher.now.config.tenants)
        return self.rate_limits.charge(tenant, limits)

    def note_gateways(self, num_ready: int) -> None:
        """Set the number of ready gateways of the service, among which limits are divided."""
        self.rate_limits.num_gateways = max(1, num_ready)

    def in_turn(self, prepared: PreparedRequest, tenant: str) -> PreparedRequest:
        """Return the request as one of its tenant, if tenants take turns."""
        if not self.config_watcher.now.config.is_fair:
            return prepared
        seconds = self.work.seconds(prepared.num_prompt_tokens, prepared.sampling.max_tokens)
        weighted = min(seconds / self._weight_of(tenant), MAX_WEIGHTED_SECONDS)
        return dataclasses.replace(
            prepared, tenant=tenant, work_seconds=seconds, weighted_seconds=weighted
        )

    def _weight_of(self, tenant: str) -> float:
        limits = limits_of(tenant, self.config_watcher.now.config.tenants)
        return 1 if limits is None or limits.weight is None else limits.weight

    def has_several_tenants(self) -> bool:
        """Whether several tenants have keys, so that each has a share of this gateway."""
        keys = self.config_watcher.now.keys
        return keys is not None and len(keys.tenants) > 1

    def enter(self, *, needs_workers: bool = True) -> None:
        """Count a request as in flight."""
        self.num_inflight += 1
        self._num_for_workers += needs_workers
        self.idle.clear()

    def leave(self, outcome: str, *, needs_workers: bool = True) -> None:
        """Record the end of a request. Sets `idle` after the last one.

        One that needs no workers keeps no pods of an idle service.
        """
        self.meters.request(outcome)
        self.num_inflight -= 1
        self._num_for_workers -= needs_workers
        if needs_workers and outcome != "invalid":
            self._last_active = self.clock()
        if self.num_inflight == 0:
            self.idle.set()

    @property
    def idle_seconds(self) -> float:
        """Seconds without a request for workers since the last one, or since the process started.

        A request that was invalid counts only while it is in flight.
        """
        return 0.0 if self._num_for_workers else self.clock() - self._last_active

    def fail(self, reason: str) -> None:
        """Mark the process as failed, neither healthy nor ready, and end all requests."""
        self.failed = reason
        self.refusing = True
        self.drain_ended.set()

    @property
    def unhealthy_reason(self) -> str | None:
        """Why this process must be restarted; None while it is healthy."""
        return self.failed or self.tasks.unhealthy_reason

    def note_discovery(self, problem: str) -> None:
        """Record why pods cannot be read, "" once they can; /readyz and /stats show it."""
        self.discovery_problem = problem

    async def tick(self) -> None:
        while True:
            self.meters.tick(self.clock())
            self._observe_encoders()
            await asyncio.sleep(TICK_SECONDS)

    def _observe_encoders(self) -> None:
        """Begin or end the brown-out of visual tokens."""
        queued = least_queued_seconds(self.registry.candidates(), Stage.ENCODER)
        limit = self.config_watcher.now.config.limits.visual.brown_out_seconds
        brown_out, was_on = self.preparer.brown_out, self.preparer.brown_out.is_on
        brown_out.observe(queued, limit, now=self.clock())
        if brown_out.is_on != was_on:
            logger.warning(
                "brown-out of visual tokens",
                extra={"is_on": brown_out.is_on, "queued_seconds": queued, "limit": limit},
            )

    def not_ready_because(self) -> str | None:
        """Return why this gateway should get no traffic; None if it is ready.

        It becomes ready once every stage has a ready pod. Later, a missing encoder alone does not
        make it unready, because requests without images need none. If `on_demand` is Queue or
        Reject, it becomes ready without an encoder.

        If the service scales to zero, it becomes ready without pods: it holds requests for them.
        """
        if self.failed is not None:
            return self.failed
        if self.draining:
            return "draining"
        if self.config_watcher.now.config.wake_timeout_seconds is not None:
            if not self._was_ready and (self.discovery_problem or not self.registry.synced):
                return self.discovery_problem or "the pods are not listed yet"
            self._was_ready = True
            return None
        needed = _ALWAYS_NEEDED
        inline = self.config_watcher.now.config.on_demand == "InlineAtPrefill"
        if not self._was_ready and inline:
            needed |= {Stage.ENCODER}
        missing = self.missing_stages()
        if needed.intersection(missing):
            return self.discovery_problem or f"no ready pod for: {', '.join(missing)}"
        self._was_ready = True
        return None

    def missing_stages(self) -> list[Stage]:
        """Return the stages without a ready pod, in request order.

        The encoder counts only if requests may have images.
        """
        used = _ALWAYS_NEEDED
        if self.config_watcher.now.config.limits.images_per_request > 0:
            used |= {Stage.ENCODER}
        return missing_stages(self.registry.candidates(), used)

    def stats(self) -> dict[str, Any]:
        """Return the document of `/stats`, version 1 (docs/stats.schema.json)."""
        settings, meters = self.settings, self.meters
        identity = settings.identity
        reason = self.not_ready_because()
        phase = "draining" if self.draining else "loading" if reason else "ready"
        return {
            "version": 1,
            "role": Role.GATEWAY,
            "stages": [],
            "service": settings.service or identity.service,
            "revision": identity.revision,
            "compat": settings.compat,
            "variant": identity.variant,
            "pod_name": identity.pod_name,
            "pod_uid": identity.pod_uid,
            "boot_id": self.boot_id,
            "uptime_seconds": self.clock() - self.started,
            "phase": phase,
            "message": reason or "",
            "accepting": not self.draining,
            "inflight": self.num_inflight,
            "queue": {"requests": 0, "work_seconds": 0.0, "started_work_seconds_total": 0.0},
            "kv": None,
            "encoder_cache": None,
            "leases": None,
            "counters": {
                "requests": meters.num_requests,
                "images": meters.num_images,
                "visual_tokens": meters.num_visual_tokens,
                "output_tokens": meters.num_output_tokens,
                "preemptions": 0,
            },
            "rates": meters.rates(self.clock()),
            "model": None,
            "busy": None,
            "gaps": meters.gaps,
            "held_for": self.registry.held_for,
            "wake": {
                "idle_seconds": self.idle_seconds,
                "waiting_requests": self.registry.num_waiting_for_wake,
            },
            "ttft": {modality: ttft.body for modality, ttft in meters.ttft.items()},
            "config_hash": self.config_watcher.now.config_hash,
        }
