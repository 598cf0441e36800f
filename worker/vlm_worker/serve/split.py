"""`vlm-worker serve MODEL --split`: one process per role, as on a cluster.

    [encoder] [prefill] [decode]  ready? ─▶ [gateway --worker=... x3]  ready? ─▶ wait for Ctrl-C

Child processes log JSON lines; the line `ready` contains their ports. They end with this process.
If one of them ends, all end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from vlm_worker.serve.local import LOOPBACK, say, say_metrics
from vlm_worker.serve.process import StopSignals
from vlm_worker.settings import GatewaySettings, ServeSettings, WorkerSettings
from vlm_worker.settings.options import to_argv
from vlm_worker.types import WORKER_ROLES, Role, Stage


class Child:
    """The process of one role. `ready` gets the fields of the log line `ready`."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Read its log; forward the lines that the user should see."""
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode(errors="replace").rstrip()
            try:
                fields = json.loads(line)
            except ValueError:
                say(f"{self.name}: {line}")
                continue
            if fields.get("message") in ("ready", "gateway serves") and not self.ready.done():
                self.ready.set_result(fields)
            elif fields.get("level") not in ("info", "debug"):
                say(f"{self.name}: {fields.get('message')}")
        code = await self.process.wait()
        if not self.ready.done():
            self.ready.set_exception(ChildProcessError(f"{self.name} exited with code {code}"))
            self.ready.exception()

    async def stop(self) -> None:
        """Send SIGTERM, which drains, and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        await self.process.wait()
        await self._reader


async def run_split(settings: ServeSettings) -> int:
    """Run until Ctrl-C, or until a child ends; returns the exit code."""
    children: list[Child] = []
    with StopSignals() as signals:
        stopping = asyncio.create_task(signals.stop.wait())
        running = asyncio.create_task(_start(settings, children))
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                ended = [asyncio.create_task(child.process.wait()) for child in children]
                await asyncio.wait({stopping, *ended}, return_when=asyncio.FIRST_COMPLETED)
            for child in children:
                if child.process.returncode is not None:
                    say(f"{child.name} exited with code {child.process.returncode}")
            return 0 if stopping.done() else 1
        except ChildProcessError as error:
            say(str(error))
            return 1
        finally:
            running.cancel()
            # the gateway first, so that its streams end while the workers still run
            for child in children[len(WORKER_ROLES) :]:
                await child.stop()
            await asyncio.gather(*(child.stop() for child in children[: len(WORKER_ROLES)]))
            say("stopped")


async def _start(settings: ServeSettings, children: list[Child]) -> None:
    parent = os.getpid()
    # With more threads than CPUs, threads wait for each other at every barrier.
    share = max(1, len(os.sched_getaffinity(0)) // len(WORKER_ROLES))
    compute = settings.worker.compute
    compute = dataclasses.replace(compute, num_threads=compute.num_threads or share)
    with_disk = settings.worker.encoder_cache
    without_disk = dataclasses.replace(with_disk, embedding_disk_dir=None)
    for role in WORKER_ROLES:
        worker = dataclasses.replace(
            settings.worker,
            role=role,
            stages=frozenset({Stage(role.value)}),
            bind=LOOPBACK,
            compute=compute,
            encoder_cache=with_disk if role is Role.ENCODER else without_disk,
            parent=parent,
        )
        children.append(await _spawn(role, worker))
    say(f"starting {', '.join(role.value for role in WORKER_ROLES)}")
    addresses = []
    for child in children:
        ready = await child.ready
        say(f"{child.name} is ready")
        say_metrics(child.name, f"http://{LOOPBACK}:{ready['http_port']}")
        addresses.append(f"{LOOPBACK}:{ready['grpc_port']}")
    gateway = dataclasses.replace(settings.gateway, workers=tuple(addresses), parent=parent)
    children.append(await _spawn(Role.GATEWAY, gateway))
    ready = await children[-1].ready
    say_metrics(Role.GATEWAY.value, ready["admin_url"])
    say(f"{settings.gateway.served_name} is served at {ready['url']}/v1; Ctrl-C stops it")


async def _spawn(role: Role, settings: WorkerSettings | GatewaySettings) -> Child:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "vlm_worker",
        role.value,
        *to_argv(settings),
        stderr=PIPE,
        # Ctrl-C reaches only this process, which then stops the children in order
        process_group=0,
    )
    return Child(role.value, process)
