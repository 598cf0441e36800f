"""Where a request can be held on its way through a pod, so that a fault falls into that very stage.

    at(stage) ── is it to be held? ──▶ say so on stdout, wait for "go"
              └─ are requests scattered? ──▶ each is held once, in the stage that its id draws

`mark_worker` and `mark_gateway` put `at` into a running process, around the methods in which a
stage begins. A request is told from others by a context variable that its calls set.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from vlm_worker.gateway.endpoint import Endpoint
from vlm_worker.server.components import WorkerComponents
from vlm_worker.types import Stage
from vlm_worker.wire.messages import Finished, Tokens

Say = Callable[[dict[str, Any]], None]

# In the order of a request; where each is.
STAGES = {
    "gateway": "gateway",
    "upload": "encoder",
    "media": "encoder",
    "encoder_queue": "encoder",
    "encode": "encoder",
    "decode_reserve": "decode",
    "prefill_queue": "prefill",
    "embed_transfer": "prefill",
    "kv_first": "decode",
    "kv_middle": "decode",
    "prefill": "prefill",
    "kv_last": "decode",
    "decode_queue": "decode",
    "token": "decode",
    "flush": "decode",
}
_DELAYS = {"kv_transfer": "kv_last"}
_IMPORTS = {1: "kv_first", 2: "kv_middle"}
_MAX_DRAWN_TOKEN = 12

_request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")


class Marks:
    """What is held in this process. `computed` counts prompts computed, by request and attempt."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._wanted: dict[str, tuple[int, str]] = {}
        self._held: set[asyncio.Event] = set()
        self._scatter: tuple[tuple[str, ...], float] = ((), 0.0)
        self._times: Counter[tuple[str, str]] = Counter()
        self.computed: Counter[Any] = Counter()

    def hold(self, stage: str, nth: int, request: str) -> None:
        """The request, or the first, that comes to the stage for its nth time waits there."""
        self._wanted[stage] = (nth, request)

    def go(self) -> None:
        """Whatever is held goes on, and nothing is to be held any more."""
        self._wanted.clear()
        for event in self._held:
            event.set()

    def scatter(self, stages: list[str], seconds: float) -> None:
        """Every request from now on stays so long in one of these stages; none: in none."""
        self._scatter = (tuple(stages), seconds)
        self._times.clear()

    async def at(self, stage: str, request: str = "", **more: Any) -> None:
        """A request is in this stage now."""
        request = request or _request.get()
        self._times[stage, request] += 1
        nth = self._times[stage, request]
        if self._wanted.get(stage) in ((nth, request), (nth, "")):
            del self._wanted[stage]
            await self._hold(stage, request, None)
        elif drawn(self._scatter[0], request) == (stage, nth):
            await self._hold(stage, request, self._scatter[1])

    async def _hold(self, stage: str, request: str, seconds: float | None) -> None:
        event = asyncio.Event()
        self._held.add(event)
        self._say({"at": stage, "request": request})
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()
        except asyncio.CancelledError:
            self._say({"cut": stage, "request": request})
            raise
        finally:
            self._held.discard(event)


def drawn(stages: tuple[str, ...], request: str) -> tuple[str, int] | None:
    """The stage, and the time that it comes to it, at which a scattered request is held."""
    if not stages:
        return None
    number = zlib.crc32(request.encode())
    stage = stages[number % len(stages)]
    return stage, 1 + number // len(stages) % _MAX_DRAWN_TOKEN if stage == "token" else 1


def mark_gateway(marks: Marks) -> None:
    """Requests are named on arrival: which of the client's is which of ours."""
    serve = Endpoint.__call__

    async def call(endpoint: Endpoint, scope: Any, receive: Any, send: Any) -> None:
        state = scope["state"]
        marks._say({"enter": state["request_id"], "client": state["client_request_id"]})
        await marks.at("gateway", state["request_id"])
        await serve(endpoint, scope, receive, send)

    Endpoint.__call__ = call  # type: ignore[method-assign]


def mark_worker(marks: Marks, components: WorkerComponents) -> None:
    """Every stage of a worker, by the seams that its roles have."""
    context, engine = components.context, components.engine
    delay, confirm_blocks, start = context.delay, engine.confirm_blocks, engine.start_decode

    async def at_delay(stage: str) -> None:
        await marks.at(_DELAYS.get(stage, stage))
        await delay(stage)

    imports: Counter[str] = Counter()

    async def at_import(key: Any, first_block: int, num_blocks: int) -> None:
        imports[key.request_id] += 1
        stage = _IMPORTS.get(imports[key.request_id])
        if stage:
            await marks.at(stage)
        await confirm_blocks(key, first_block, num_blocks)

    async def at_start(key: Any, first_token_id: int) -> Any:
        await marks.at("decode_queue")
        return await start(key, first_token_id)

    submit = engine.submit_prefill

    def at_submit(request: Any, **more: Any) -> Any:
        marks.computed[request.key] += 1
        return submit(request, **more)

    engine.submit_prefill = at_submit  # type: ignore[method-assign]
    context.delay = at_delay  # type: ignore[method-assign]
    engine.confirm_blocks = at_import  # type: ignore[method-assign]
    engine.start_decode = at_start  # type: ignore[method-assign]
    if (encoder := components.roles.get(Stage.ENCODER)) is not None:
        _mark_encoder(marks, encoder)
    if (prefill := components.roles.get(Stage.PREFILL)) is not None:
        prefill.prefill = _named(prefill.prefill)
    if (decode := components.roles.get(Stage.DECODE)) is not None:
        _mark_decode(marks, decode)


def _mark_encoder(marks: Marks, role: Any) -> None:
    encode = role.encode

    async def at_upload(call: Any, chunks: AsyncIterator[Any], clock: Any) -> AsyncIterator[Any]:
        async def marked() -> AsyncIterator[Any]:
            async for chunk in chunks:
                await marks.at("upload")
                yield chunk

        _request.set(call.key.request_id)
        async with aclosing(encode(call, marked(), clock)) as replies:
            async for reply in replies:
                yield reply

    role.encode = at_upload


def _mark_decode(marks: Marks, role: Any) -> None:
    reserve, decode = role.reserve, role.decode

    async def at_reserve(call: Any, *, peer: str = "") -> Any:
        _request.set(call.key.request_id)
        return await reserve(call, peer=peer)

    async def at_tokens(call: Any, clock: Any) -> AsyncIterator[Any]:
        _request.set(call.request.key.request_id)
        async with aclosing(decode(call, clock)) as replies:
            async for reply in replies:
                if isinstance(reply.event, Tokens):
                    await marks.at("token")
                elif isinstance(reply.event, Finished):
                    await marks.at("flush")
                yield reply

    role.reserve, role.decode = at_reserve, at_tokens


def _named(method: Any) -> Any:
    async def named(call: Any, clock: Any) -> AsyncIterator[Any]:
        _request.set(call.request.key.request_id)
        async with aclosing(method(call, clock)) as replies:
            async for reply in replies:
                yield reply

    return named
