"""Real workers over real gRPC in this process, with arithmetic for a model, and a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import openai

from vlm_worker.client import WorkerClient
from vlm_worker.gateway.gateway_server import Gateway, running
from vlm_worker.gateway.pod_registry import Connect
from vlm_worker.serve.worker import worker
from vlm_worker.server.components import WorkerComponents
from vlm_worker.server.worker_server import WorkerServer
from vlm_worker.settings import (
    EncoderCacheSettings,
    GatewaySettings,
    ModelSource,
    WorkerSettings,
)
from vlm_worker.testing import ChecksumRunner
from vlm_worker.types import Role, Stage

MODEL = Path(__file__).parents[3] / "examples" / "shapes" / "model"
BLOCK_SIZE = 4
NOBODY = "127.0.0.1:1"  # a worker's address where nothing listens
E, P, D = Stage.ENCODER, Stage.PREFILL, Stage.DECODE


@dataclasses.dataclass(eq=False)
class Worker:
    """One worker in this process."""

    server: WorkerServer
    alive: bool = True

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.grpc_port}"

    @property
    def role(self) -> Role:
        return self.server.settings.role

    @property
    def components(self) -> WorkerComponents:
        components = self.server._components
        assert components is not None
        return components

    @property
    def boot_id(self) -> bytes:
        return self.server.state.boot_id

    @property
    def runner(self) -> ChecksumRunner:
        runner = self.components.engine._thread.state.sequences._runner
        assert isinstance(runner, ChecksumRunner)
        return runner

    @property
    def num_held(self) -> int:
        """Everything that the worker still owes to somebody."""
        return self.components.context.num_inflight + self.components.engine.stats().inflight

    async def kill(self) -> None:
        """As a process that dies: every connection is cut, nobody is told."""
        self.alive = False
        await self.server._grpc.stop(grace=None)


@contextlib.asynccontextmanager
async def started(
    role: Role,
    stages: Sequence[Stage] | None = None,
    *,
    drain_timeout: float = 5.0,
    runner: str = "checksum",
    trace_ratio: float = 0.0,
    max_lent: int = 0,
    session_pin_seconds: int = 0,
    kv_prune_text: int = 0,
    **delays: float,
) -> AsyncIterator[Worker]:
    """A worker that is ready."""
    settings = WorkerSettings(
        role=role,
        stages=frozenset(stages or (Stage(role.value),)),
        model=ModelSource(str(MODEL)),
        served_name="shapes",
        bind="127.0.0.1",
        grpc_port=0,
        data_port=0,
        http_port=0,
        block_size=BLOCK_SIZE,
        drain_timeout_seconds=drain_timeout,
        delays=delays,
        runner=runner,
        trace_ratio=trace_ratio,
        max_lent_requests=max_lent,
        encoder_cache=EncoderCacheSettings(session_pin_seconds=session_pin_seconds),
        kv_prune_text=kv_prune_text,
    )
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with worker(settings, stopping=never) as server:
        yield Worker(server)


def gateway_settings(workers: Sequence[Worker], **changes: object) -> GatewaySettings:
    settings = GatewaySettings(
        model=ModelSource(str(MODEL)),
        served_name="shapes",
        bind="127.0.0.1",
        http_port=0,
        admin_port=0,
        workers=tuple(worker.address for worker in workers) or (NOBODY,),
        block_size=BLOCK_SIZE,
        drain_timeout_seconds=5.0,
    )
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def serving(
    settings: GatewaySettings, connect: Connect = WorkerClient
) -> AsyncIterator[Gateway]:
    """A gateway that serves, and that has found its workers."""
    stop = asyncio.Event()
    async with running(settings, connect=connect) as gateway:
        task = asyncio.create_task(gateway.serve(stop, notice_seconds=0.0))
        if settings.workers != (NOBODY,):
            registry = gateway.context.registry
            found = await registry.waiters.wait_until(
                lambda: len(registry.candidates()) == len(settings.workers), timeout=30
            )
            assert found
        try:
            yield gateway
        finally:
            stop.set()
            await task


@dataclasses.dataclass
class Stack:
    """Workers and one gateway."""

    workers: list[Worker]
    gateway: Gateway

    def of(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers if worker.role is role]

    @property
    def url(self) -> str:
        return self.gateway.url

    def forget(self, ability: str) -> None:
        """Let the Hello of all workers lack a flag, as that of workers of an older version."""
        for peer in self.gateway.context.registry.peers.values():
            assert peer.hello is not None
            assert getattr(peer.hello, ability)
            peer.hello = dataclasses.replace(peer.hello, **{ability: False})

    async def until_idle(self, timeout: float = 60.0) -> None:
        """Every worker that lives has given everything back."""
        async with asyncio.timeout(timeout):
            while any(w.num_held for w in self.workers if w.alive):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def client(served: Stack) -> openai.AsyncOpenAI:
    """The unmodified client, which retries nothing."""
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@contextlib.asynccontextmanager
async def stack(
    *plans: tuple[Role, Sequence[Stage]],
    worker_delays: dict[str, float] | None = None,
    one_process: bool = False,
    runner: str = "checksum",
    trace_ratio: float = 0.0,
    session_pin_seconds: int = 0,
    kv_prune_text: int = 0,
    connect: Connect = WorkerClient,
    **changes: object,
) -> AsyncIterator[Stack]:
    """A gateway before workers of these roles and stages; all torn down in the end.

    With `one_process` it has tokens as `vlm-worker serve` has them of its one worker.
    """
    async with contextlib.AsyncExitStack() as exits:
        workers = await asyncio.gather(
            *(
                exits.enter_async_context(
                    started(
                        role,
                        stages,
                        runner=runner,
                        trace_ratio=trace_ratio,
                        session_pin_seconds=session_pin_seconds,
                        kv_prune_text=kv_prune_text,
                        **(worker_delays or {}),
                    )
                )
                for role, stages in plans
            )
        )
        if one_process:
            connect = workers[0].server.connect
        settings = gateway_settings(workers, trace_ratio=trace_ratio, **changes)
        async with serving(settings, connect) as gateway:
            yield Stack(list(workers), gateway)


EPD = ((Role.ENCODER, (E,)), (Role.PREFILL, (P,)), (Role.DECODE, (D,)))
E_PD = ((Role.ENCODER, (E,)), (Role.DECODE, (P, D)))
P_D = ((Role.PREFILL, (E, P)), (Role.DECODE, (D,)))
COLOCATED = ((Role.DECODE, (E, P, D)),)
TOPOLOGIES = {"E-P-D": EPD, "E-PD": E_PD, "P-D": P_D, "colocated": COLOCATED}
ONE_PROCESS = "one process"
"""The gateway in the process of a colocated worker."""


def stack_of(name: str, **changes: object) -> contextlib.AbstractAsyncContextManager[Stack]:
    """A stack in one of `TOPOLOGIES`, or in one process, with these settings of the gateway."""
    if name == ONE_PROCESS:
        return stack(*COLOCATED, one_process=True, **changes)  # type: ignore[arg-type]
    return stack(*TOPOLOGIES[name], **changes)  # type: ignore[arg-type]
