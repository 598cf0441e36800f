"""Prefetches the beginning of a conversation's next turn, when an answer has ended.

answer ended ─▶ settle ─▶ beginning of the next prompt ─▶ plan ─▶ Prefetch on the prefill pod
                              (its tokens, exactly)         └─ why not: an outcome

The next prompt has the answer as a message, behind the conversation. Its KV is missing on a prefill
pod that another pod decoded for, and wherever the template writes an answer with other tokens than
the model. The pod that computed the prompt gets at most one prefetch at a time, if it is idle, and
ends it as soon as a request comes. A prefetch is in no count of requests (docs/decisions/0045).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from vlm_worker.errors import WorkerError
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.pod_caches import RequestDigests
from vlm_worker.gateway.pod_registry import PodConnection, Registry
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.route import Route
from vlm_worker.types import Request, RequestKey, SamplingParams
from vlm_worker.wire.prefetch_messages import PrefetchCall, PrefetchOutcome

logger = logging.getLogger(__name__)

UNKNOWN: Final = "unknown"
"""The template gives no beginning, the images of the next turn may differ, or no client can send
the answer back: a call was cut."""
TOO_LONG: Final = "too_long"
"""The next turn exceeds the context."""
LOST: Final = "lost"
"""The pod is lost, drains, or is of a release without Prefetch."""
OUTCOMES: Final = (*(one.value for one in PrefetchOutcome), UNKNOWN, TOO_LONG, LOST)


@dataclasses.dataclass(frozen=True, slots=True)
class EndedTurn:
    """An answer that ended. It keeps no bytes of images.

    Attributes:
        request: as the workers had it.
        answer: its tokens.
        message: the assistant's message, as the client has it.
        pod_name, boot_id: the pod that computed the prompt.
        decoded_there: this pod decoded the answer, too.
    """

    request: Request
    answer: tuple[int, ...]
    message: Mapping[str, Any]
    pod_name: str
    boot_id: bytes
    decoded_there: bool
    next_turn: Callable[[Mapping[str, Any]], Prompt | None]
    digests: RequestDigests

    @classmethod
    def of(
        cls,
        prepared: PreparedRequest,
        route: Route | None,
        request: Request | None,
        *,
        answer: tuple[int, ...],
        message: Mapping[str, Any],
    ) -> EndedTurn | None:
        """None if nothing is to prefetch: an image was left out, or an encoder lent itself."""
        if prepared.next_turn is None or route is None or request is None:
            return None
        if route.lent is not None or len(request.items) != len(prepared.images):
            return None
        pod = route.prefill.pod
        return cls(
            request,
            answer,
            message,
            pod.name,
            pod.boot_id,
            route.decode is not None and route.decode.pod.boot_id == pod.boot_id,
            prepared.next_turn,
            prepared.digests,
        )

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens whose KV the pod wrote. The last token of an answer has no KV."""
        prompt = self.request.token_ids[: self.request.num_prompt_tokens]
        return (*prompt, *self.answer[:-1]) if self.decoded_there else prompt


def plan(turn: EndedTurn, begun: Prompt | None, *, max_model_len: int) -> Request | str:
    """The request to prefetch, or the outcome that says why there is none. Pure."""
    items = turn.request.items
    if begun is None or len(begun.offsets) != len(items):
        return UNKNOWN
    if any(item.num_tokens != n for item, n in zip(items, begun.counts, strict=True)):
        return UNKNOWN
    num_tokens = len(begun.token_ids)
    if num_tokens >= max_model_len:
        return TOO_LONG
    offsets = tuple(item.offset for item in items)
    num_held = _num_shared(begun.token_ids, turn.held) if offsets == begun.offsets else 0
    block_size = turn.digests.block_size
    if num_tokens // block_size <= num_held // block_size:
        return PrefetchOutcome.CACHED
    return Request(
        key=RequestKey(f"{turn.request.key.request_id}:next", 1),
        token_ids=begun.token_ids,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),
        items=tuple(
            dataclasses.replace(item, offset=offset)
            for item, offset in zip(items, begun.offsets, strict=True)
        ),
        cache_salt=turn.request.cache_salt,
    )


class SessionPrefetcher:
    """Prefetches next turns, at most one per pod. The owner calls `close`."""

    def __init__(self, registry: Registry, *, max_model_len: int) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._registry = registry
        self._max_model_len = max_model_len
        self._running: dict[str, asyncio.Task[None]] = {}

    def ended(self, turn: EndedTurn) -> None:
        """Prefetch the next turn in the background, or count why not. Returns at once."""
        if turn.pod_name in self._running:
            self.outcomes[PrefetchOutcome.BUSY] += 1
            return
        task = asyncio.create_task(self._run(turn), name=f"prefetch {turn.pod_name}")
        self._running[turn.pod_name] = task
        task.add_done_callback(lambda _: self._running.pop(turn.pod_name))

    async def close(self) -> None:
        """End all prefetches."""
        tasks = tuple(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, turn: EndedTurn) -> None:
        try:
            # The pods free what the request held; a client that goes on at once needs no prefetch.
            await asyncio.sleep(self._registry.timers.retry)
            outcome = await self._prefetch(turn)
        except WorkerError as error:
            logger.debug("prefetch lost", extra={"reason": str(error)})
            outcome = LOST
        except Exception:  # a defect here must not end more than the prefetch
            logger.exception("prefetch failed")
            outcome = PrefetchOutcome.FAILED
        self.outcomes[outcome] += 1

    async def _prefetch(self, turn: EndedTurn) -> str:
        if not _is_idle(self._registry.peers.get(turn.pod_name), turn.boot_id):
            return PrefetchOutcome.BUSY
        begun = await asyncio.to_thread(turn.next_turn, turn.message)
        planned = plan(turn, begun, max_model_len=self._max_model_len)
        if isinstance(planned, str):
            return planned
        peer = self._registry.peers.get(turn.pod_name)
        if peer is None or not _is_idle(peer, turn.boot_id):
            return PrefetchOutcome.BUSY
        # not `Registry.use`: routing must not see a prefetch as load
        call = PrefetchCall(planned)
        result = await peer.client.prefetch(call, timeout=self._registry.timers.prefill)
        is_held = result.outcome in (PrefetchOutcome.COMPUTED, PrefetchOutcome.CACHED)
        if is_held and begun is not None and self._registry.is_connected(turn.boot_id):
            marks = turn.digests.of_beginning(begun)
            digests = [mark.digest for mark in reversed(marks)]
            self._registry.caches.record(turn.boot_id, digests)
        return result.outcome


def _is_idle(peer: PodConnection | None, boot_id: bytes) -> bool:
    """Whether the pod of a turn is there, accepts work and has none."""
    candidate = None if peer is None else peer.candidate
    if candidate is None or candidate.boot_id != boot_id:
        return False
    if not (candidate.ready and candidate.accepting):
        return False
    return candidate.num_requests == 0 and candidate.work_queued_seconds == 0


def _num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of tokens with which both begin."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
