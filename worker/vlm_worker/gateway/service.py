"""What every request shares: the model's language, live settings, workers, meters, the end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from vlm_worker.client import WorkerClient
from vlm_worker.gateway.auth import Salts
from vlm_worker.gateway.config import Live
from vlm_worker.gateway.memory import Held, MemoryBudget
from vlm_worker.gateway.meters import Meters
from vlm_worker.gateway.orchestrate.background import Background
from vlm_worker.gateway.orchestrate.recovery import Recovery
from vlm_worker.gateway.prepare import Preparer
from vlm_worker.gateway.prompt import Language
from vlm_worker.gateway.registry import Connect, Registry
from vlm_worker.gateway.supervision import Supervisor
from vlm_worker.route import missing_stages
from vlm_worker.settings import GatewaySettings
from vlm_worker.types import Role, Stage

TICK_SECONDS = 1.0

_ALWAYS_NEEDED = frozenset({Stage.PREFILL, Stage.DECODE})


class Service:
    """One gateway. The event loop is its only writer."""

    def __init__(
        self,
        settings: GatewaySettings,
        language: Language,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect = WorkerClient,
    ) -> None:
        self.settings = settings
        self.language = language
        self.clock = clock
        self.live = Live(
            settings.config, settings.api_keys_dir, images_per_request=settings.images_per_request
        )
        self.registry = Registry(
            served_name=settings.served_name,
            compat=settings.compat,
            timers=settings.timers,
            clock=clock,
            connect=connect,
        )
        self.recovery = Recovery(
            patience_seconds=settings.patience_seconds,
            max_waiting=settings.max_waiting,
            clock=clock,
        )
        self.memory = MemoryBudget(settings.memory_bytes)
        self.meters = Meters(clock(), memory=self.memory)
        self.background = Background()
        self.tasks = Supervisor(clock)
        self.preparer = Preparer(
            language=language,
            served_name=settings.served_name,
            max_model_len=settings.max_model_len,
            block_size=settings.block_size,
            salts=Salts(settings.served_name, lambda: self.live.now.keys),
            any_priority=settings.any_priority,
        )
        self.boot_id = secrets.token_hex(16)
        self.started = clock()
        self.created = int(time.time())
        self.num_inflight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False
        self.refusing = False
        self.cut = asyncio.Event()
        self.discovery_problem = ""  # why the pods cannot be read, "" where they can
        self._was_ready = False

    def hold_memory(self, tenant: str) -> Held:
        """What a request of this tenant will hold in this gateway."""
        keys = self.live.now.keys
        return self.memory.hold(tenant, shared=keys is not None and len(keys.by_tenant) > 1)

    def enter(self) -> None:
        """A request begins."""
        self.num_inflight += 1
        self.idle.clear()

    def leave(self, outcome: str) -> None:
        """It had its last word."""
        self.meters.request(outcome)
        self.num_inflight -= 1
        if self.num_inflight == 0:
            self.idle.set()

    def note_discovery(self, problem: str) -> None:
        """Keep why the pods cannot be read, "" once they can; /readyz and /stats say it."""
        self.discovery_problem = problem

    async def tick(self) -> None:
        """Let the meters follow the rates, until cancelled."""
        while True:
            self.meters.tick(self.clock())
            await asyncio.sleep(TICK_SECONDS)

    def not_ready_because(self) -> str | None:
        """Why this gateway should get no traffic; None when it should.

        It waits for every stage once. Later a missing encoder alone does not take it away: requests
        without pictures need none. Where pictures are held or refused without an encoder, it does
        not wait for one.
        """
        if self.draining:
            return "draining"
        needed = _ALWAYS_NEEDED
        config = self.live.now.config
        inline = config.on_demand == "InlineAtPrefill"
        if not self._was_ready and inline and config.limits.images_per_request > 0:
            needed |= {Stage.ENCODER}
        missing = missing_stages(self.registry.candidates(), needed)
        if missing:
            return self.discovery_problem or f"no ready pod for: {', '.join(missing)}"
        self._was_ready = True
        return None

    def stats(self) -> dict[str, Any]:
        """`/stats`, version 1 (docs/stats.schema.json)."""
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
            "queue": {"requests": 0, "work_seconds": 0.0, "admitted_work_seconds_total": 0.0},
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
            "ttft": {modality: ttft.body for modality, ttft in meters.ttft.items()},
            "config_hash": self.live.now.config_hash,
        }
