"""Runs one container: starts it, probes it, restarts it with back-off, ends it.

start ─▶ startup probe ─▶ readiness and liveness probes ─▶ exit ─▶ back-off ─▶ start …
end:  preStop hook ─▶ SIGTERM ─ grace ─▶ SIGKILL
"""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from . import probes
from .cgroups import ContainerCgroup
from .logs import ContainerLog
from .process import KILLED, Process, ProcessSpec, StartFailedError
from .status import ContainerView, Running, Terminated, Waiting

logger = logging.getLogger(__name__)
HEALTHY_SECONDS = 600  # after a run this long the back-off starts again at zero
HANDLER_SECONDS = 5.0  # the time that a new program may take to install a SIGTERM handler
AFTER_HOOK_SECONDS = 2.0  # the time for SIGTERM after a hook that used the whole grace

Record = Callable[..., Coroutine[Any, Any, None]]
"""Writes an event: reason, message, and `warning`."""


@dataclasses.dataclass(frozen=True)
class Backoff:
    """The wait before a restart: none for the first one, then it doubles."""

    first_seconds: float = 10
    longest_seconds: float = 300

    def before(self, num_failures: int) -> float:
        """Return the wait before a start after `num_failures` short runs in a row."""
        if num_failures <= 1:
            return 0
        return min(self.first_seconds * 2.0 ** min(num_failures - 2, 30), self.longest_seconds)


class CannotStartError(Exception):
    """The container cannot be started now.

    Attributes:
        reason: the kubelet's, as in `waiting`: ErrImagePull, CreateContainerConfigError, …
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything that one run needs, prepared again for each run."""

    process: ProcessSpec
    cgroup: ContainerCgroup
    log: ContainerLog


class Container:
    """One container of one pod. `view` is its observed state, which only its own task writes.

    Args:
        sidecar: it is an init container that runs as long as the pod does.
        prepare: returns what a run needs, given the number of restarts; raises `CannotStartError`.
        changed: is called after each change of `view`.
        grace_seconds: the pod's, for a container that failed a probe.
        num_restarts: restarts by earlier agents.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        restart_policy: str,
        sidecar: bool = False,
        prepare: Callable[[int], Awaitable[Prepared]],
        prober: Callable[[Process], probes.Prober],
        changed: Callable[[], None],
        record: Record,
        backoff: Backoff,
        grace_seconds: float,
        num_restarts: int = 0,
    ) -> None:
        self.spec = spec
        self.view = ContainerView(
            spec["name"], spec["image"], num_restarts=num_restarts, sidecar=sidecar
        )
        self.started = asyncio.Event()  # once it has passed its startup probe
        self.process: Process | None = None
        self.logs: list[ContainerLog] = []
        self._restart_policy = restart_policy
        self._prepare = prepare
        self._prober = prober
        self._changed = changed
        self._record = record
        self._backoff = backoff
        self._stopping = asyncio.Event()
        self._grace_seconds = grace_seconds

    async def run(self) -> None:
        """Run it, with restarts by the restart policy, until it ends or is stopped."""
        num_failures = 0
        while not self._stopping.is_set():
            ended = await self._run_once()
            if ended is None:  # it could not start: retry, as a kubelet does
                num_failures = max(2, num_failures + 1)
            else:
                lasted = ended.finished_at - ended.started_at
                num_failures = 1 if lasted > HEALTHY_SECONDS else num_failures + 1
                if not self._restarts(ended):
                    return
            await self._wait_to_restart(ended, self._backoff.before(num_failures))

    async def stop(self, grace_seconds: float) -> None:
        """End it. After several calls, the shortest grace applies."""
        self._stopping.set()
        if self.process is not None and self.process.running:
            await self._end(self.process, grace_seconds)

    def kill(self) -> None:
        self._stopping.set()
        if self.process is not None:
            self.process.signal(signal.SIGKILL)

    def _restarts(self, ended: Terminated) -> bool:
        if self._stopping.is_set() or self._restart_policy == "Never":
            return False
        return self._restart_policy == "Always" or ended.exit_code != 0

    async def _run_once(self) -> Terminated | None:
        """Do one run; None if it could not start. An unexpected error ends only the run."""
        began = time.time()
        try:
            return await self._run_to_end()
        except Exception as error:
            logger.exception(
                "a run failed with an unexpected error", extra={"container": self.view.name}
            )
            if self.process is not None:
                self.process.signal(signal.SIGKILL)
            lost = Terminated(KILLED, began, time.time(), "ContainerStatusUnknown", repr(error))
            return await self._failed(lost)

    async def _run_to_end(self) -> Terminated | None:
        try:
            prepared = await self._prepare(self.view.num_restarts)
        except CannotStartError as error:
            await self._cannot_start(error)
            return None
        self.logs = [*self.logs[-1:], prepared.log]
        started_at = time.time()
        try:
            process = await Process.start(prepared.process, prepared.log)
        except (StartFailedError, OSError) as error:
            prepared.cgroup.remove()
            return await self._failed(
                Terminated(128, started_at, time.time(), "StartError", str(error))
            )
        self.process = process
        if self._stopping.is_set():
            process.signal(signal.SIGKILL)
        number = self.view.num_restarts
        has_startup, has_readiness = "startupProbe" in self.spec, "readinessProbe" in self.spec
        self._show(
            state=Running(started_at),
            started=not has_startup,
            ready=not has_startup and not has_readiness,
            container_id=f"process://{process.pid}",
        )
        recording = asyncio.create_task(
            self._record("Started", f"Started container {self.view.name} (restart {number})")
        )
        probing = asyncio.create_task(self._probe(process, prepared.cgroup))
        try:
            code = await process.wait()
        except asyncio.CancelledError:  # it ends with its task
            process.signal(signal.SIGKILL)
            await process.wait()
            prepared.cgroup.remove()
            raise
        finally:
            probing.cancel()
            for result in await asyncio.gather(probing, recording, return_exceptions=True):
                if isinstance(result, Exception):
                    logger.error("a probe failed", exc_info=result)
            process.close()
        return self._ended(code, started_at, prepared)

    def _ended(self, code: int, started_at: float, prepared: Prepared) -> Terminated:
        out_of_memory = prepared.cgroup.num_oom_kills() > 0 and code == KILLED
        prepared.cgroup.remove()
        ended = Terminated(
            exit_code=code,
            started_at=started_at,
            finished_at=time.time(),
            reason="OOMKilled" if out_of_memory else "",
            message=self._final_message(prepared.log, code),
            container_id=self.view.container_id,
        )
        self._show(state=ended, ready=False, started=False)
        return ended

    def _final_message(self, log: ContainerLog, code: int) -> str:
        if code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            return log.last_lines(20)[-2048:]
        return ""

    async def _failed(self, ended: Terminated) -> Terminated:
        self._show(state=ended, ready=False, started=False)
        await self._record("Failed", f"Error: {ended.message}", warning=True)
        return ended

    async def _cannot_start(self, error: CannotStartError) -> None:
        self._show(state=Waiting(error.reason, str(error)), ready=False, started=False)
        await self._record("Failed", f"Error: {error}", warning=True)

    async def _wait_to_restart(self, ended: Terminated | None, seconds: float) -> None:
        if seconds and ended is not None:
            message = f"back-off {seconds:g}s restarting failed container={self.view.name}"
            self._show(state=Waiting("CrashLoopBackOff", message), last=ended)
            await self._record("BackOff", message, warning=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        if self._stopping.is_set():
            if ended is not None:
                self._show(state=ended, last=self.view.last)
        elif ended is not None:
            self._show(last=ended, num_restarts=self.view.num_restarts + 1)

    async def _probe(self, process: Process, cgroup: ContainerCgroup) -> None:
        """Probe one run until cancelled. The other probes wait for the startup probe."""
        prober = self._prober(process)
        if startup := self.spec.get("startupProbe"):
            await self._await_startup(process, prober, startup)
            self._show(started=True, ready="readinessProbe" not in self.spec)
        async with asyncio.TaskGroup() as group:
            if readiness := self.spec.get("readinessProbe"):
                on_verdict = self._on_readiness(cgroup)
                group.create_task(probes.watch(prober, readiness, on_verdict))
            else:
                cgroup.limit_cpu()
            if liveness := self.spec.get("livenessProbe"):
                group.create_task(self._stay_alive(process, prober, liveness))

    async def _await_startup(
        self, process: Process, prober: probes.Prober, probe: Mapping[str, Any]
    ) -> None:
        if await probes.first_verdict(prober, probe, wanted=None):
            return
        await self._unhealthy(process, "startup", probe)
        await asyncio.Event().wait()  # until this run ends, and this task with it

    async def _stay_alive(
        self, process: Process, prober: probes.Prober, probe: Mapping[str, Any]
    ) -> None:
        await probes.first_verdict(prober, probe, wanted=False)
        if not self._stopping.is_set():
            await self._unhealthy(process, "liveness", probe)

    async def _unhealthy(self, process: Process, kind: str, probe: Mapping[str, Any]) -> None:
        message = f"Container {self.view.name} failed {kind} probe, will be restarted"
        await self._record("Killing", message, warning=True)
        grace = probe.get("terminationGracePeriodSeconds", self._grace_seconds)
        await self._end(process, grace)

    def _on_readiness(
        self, cgroup: ContainerCgroup
    ) -> Callable[[bool | None, probes.Answer], None]:
        def on_verdict(verdict: bool | None, answer: probes.Answer) -> None:
            if verdict and not self.view.ready:
                cgroup.limit_cpu()
            if not answer.healthy and self.view.ready:
                logger.info(
                    "not ready", extra={"container": self.view.name, "answer": answer.message}
                )
            self._show(ready=bool(verdict))

        return on_verdict

    async def _end(self, process: Process, grace_seconds: float) -> None:
        await _end(
            process,
            hook=self.spec.get("lifecycle", {}).get("preStop"),
            grace_seconds=grace_seconds,
            prober=self._prober(process),
            record=self._record,
        )

    def _show(self, **changes: Any) -> None:
        view = dataclasses.replace(self.view, **changes)
        if view != self.view:
            self.view = view
            if view.started:
                self.started.set()
            self._changed()


async def _end(
    process: Process,
    *,
    hook: Mapping[str, Any] | None,
    grace_seconds: float,
    prober: probes.Prober,
    record: Record,
) -> None:
    """End `process` and return when it has ended.

    `grace_seconds` is for the preStop hook and for SIGTERM together. `prober` sends the HTTP
    request of the hook.
    """
    deadline = time.monotonic() + grace_seconds
    if hook is not None:
        problem = await _pre_stop(process, hook, grace_seconds, prober)
        if problem:
            await record("FailedPreStopHook", f"PreStopHook failed: {problem}", warning=True)
    await _await_handler(process, seconds=min(HANDLER_SECONDS, deadline - time.monotonic()))
    process.signal(signal.SIGTERM)
    remaining = max(deadline - time.monotonic(), AFTER_HOOK_SECONDS if hook else 0.0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(remaining):
            await process.wait()
            return
    process.signal(signal.SIGKILL)
    await process.wait()


async def _await_handler(process: Process, *, seconds: float) -> None:
    """Wait until the program has a handler for SIGTERM, at most for `seconds`.

    The kernel drops signals that the first process of a pid namespace does not handle. If SIGTERM
    were sent while the interpreter starts, the pod would run for its whole grace.
    """
    deadline = time.monotonic() + seconds
    while process.running and not process.handles(signal.SIGTERM):
        if time.monotonic() >= deadline:
            return
        await asyncio.sleep(0.02)


async def _pre_stop(
    process: Process, hook: Mapping[str, Any], seconds: float, prober: probes.Prober
) -> str:
    """Run a hook; return why it failed, or ""."""
    try:
        async with asyncio.timeout(seconds):
            if "exec" in hook:
                code, output = await process.run_inside(hook["exec"]["command"])
                return "" if code == 0 else output.decode(errors="replace")[-512:] or f"code {code}"
            if "httpGet" in hook:
                answer = await prober.http_get(hook["httpGet"])
                return "" if answer.healthy else answer.message
            await asyncio.sleep(hook["sleep"]["seconds"])
    except TimeoutError:
        return f"it took more than the grace of {seconds:g} s"
    except Exception as error:
        logger.exception("a preStop hook failed", extra={"pid": process.pid})
        return str(error)
    return ""
