"""The engine thread: executes commands and turns, flushes events, reports its own failure.

all commands -> [flush -> some copies] -> turn -> all commands ...

If a turn finds no work, the runner prefaults memory until the next command. Copies are commands
that take long. The thread flushes the events of the last step before them, and limits the bytes
that it copies between two steps, so that decoding sequences wait little.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from vlm_worker.engine.events import LoopNotifier, OutputEvent, deliver
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions
from vlm_worker.engine.settings import EngineSettings, EngineStats
from vlm_worker.engine.state import State
from vlm_worker.errors import DrainingError, EngineError, WorkerError

T = TypeVar("T")

Refuse = Callable[[EngineError], None]

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.05
"""Wait for a command before prefaulting: an image that arrives soon finds the thread free."""
SNAPSHOT_SECONDS = 0.05
"""Maximum age of the statistics while the engine is busy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A call to make on the thread, and `refuse`, called on the loop if it cannot be made.

    Attributes:
        num_bytes: bytes that it copies; 0 is executed at once.
    """

    work: Callable[[State], None]
    refuse: Refuse
    num_bytes: int = 0


class EngineThread:
    """Runs a `State`. The loop calls `post_command` and `call`; the rest runs on the thread."""

    def __init__(
        self,
        runner: Runner,
        *,
        settings: EngineSettings,
        positions: Positions,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._clock = clock
        self._state = State(
            runner, settings=settings, positions=positions, clock=clock, send=self._send
        )
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._copies: collections.deque[Command] = collections.deque()
        self._state.encode_requests.queue.on_ended = self._wake
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._notifier = LoopNotifier()
        self._stopped: asyncio.Future[None] | None = None
        self._stopping = False
        self.readable_blocks = self._state.sequences.readable_blocks
        self._death: BaseException | None = None
        self._turn_started: float | None = None
        self._snapshot_at = 0.0
        self.stats: EngineStats = self._state.snapshot()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events are delivered on `loop`."""
        self._notifier.open(loop)
        self._stopped = loop.create_future()
        self._thread.start()

    async def stop(self) -> None:
        """Stop the thread; raises the error that ended it, if any."""
        if self._stopped is None:
            return
        self._commands.put(Command(self._stop, refuse=lambda _: None))
        await asyncio.shield(self._stopped)
        self._thread.join()
        if self._death is not None:
            raise self._death

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the engine is unhealthy; None while it is alive, not stuck and not failing."""
        if not self._thread.is_alive():
            return "it has ended" if self._death is None else f"it died: {self._death!r}"
        begun = self._turn_started, self._state.encode_requests.queue.async_encode_started
        longest = max((self._clock() - since for since in begun if since is not None), default=0.0)
        if longest > self._settings.stuck_step_seconds:
            return f"a step has taken {longest:.0f} s: it is stuck"
        return self._state.unhealthy_reason

    # ---- on the loop -----------------------------------------------------------------------------
    def post_command(
        self, work: Callable[[State], None], *, refuse: Refuse, num_bytes: int = 0
    ) -> None:
        """Queue a command. Its result arrives through its stream, or `refuse` is called.

        A command that copies `num_bytes` may be overtaken by commands that copy nothing.
        """
        if self._stopped is None or self._stopped.done():
            refuse(EngineError("the engine does not run"))
        else:
            self._commands.put(Command(work, refuse=refuse, num_bytes=num_bytes))

    async def call(self, work: Callable[[State], T], *, num_bytes: int = 0) -> T:
        """Queue a command and wait for its result or its WorkerError; see `post_command`.

        If the caller is cancelled, a queued copy is skipped: its memory may be in other use.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def answer(_: State) -> None:
            if not (num_bytes and future.cancelled()):
                self._answer(future, work)

        def refuse(error: EngineError) -> None:
            if not future.done():
                future.set_exception(error)

        self.post_command(answer, refuse=refuse, num_bytes=num_bytes)
        return await future

    def _finish(self) -> None:
        """Refuse the commands that the ended thread did not execute."""
        assert self._stopped is not None
        while not self._commands.empty():
            self._copies.append(self._commands.get())
        for command in self._copies:
            command.refuse(EngineError("the engine does not run"))
        self._notifier.close()
        self._stopped.set_result(None)

    # ---- on the thread ---------------------------------------------------------------------------
    def _main(self) -> None:
        try:
            self._run()
            self._state.fail_pending(DrainingError("the engine stopped"))
        except BaseException as error:  # every waiting caller gets it
            logger.exception("the engine thread died")
            self._death = error
            self._state.fail_pending(EngineError(f"the engine died: {error!r}"))
        finally:
            self._call_loop(deliver, self._state.events.take())
            self._call_loop(self._finish)

    def _run(self) -> None:
        busy = False
        while not self._stopping:
            self._do_commands(wait=not busy and not self._copies)
            self._do_copies()
            self._turn_started = self._clock()
            busy = self._state.turn()
            self._turn_started = None
            if not busy:
                self._check_idle()
            self._take_snapshot(busy=busy)
            if not busy:
                self._state.events.flush()

    def _do_commands(self, *, wait: bool) -> None:
        """Execute all queued commands and queue the copies; with `wait`, wait for a command."""
        while True:
            try:
                command = self._awaited() if wait else self._commands.get_nowait()
            except queue.Empty:
                return
            if command.num_bytes:
                self._copies.append(command)
            else:
                command.work(self._state)
            wait = False

    def _awaited(self) -> Command:
        """The next command; until it arrives, the runner prefaults memory."""
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=IDLE_SECONDS)
        while self._commands.empty() and self._runner.prefault():
            pass
        return self._commands.get()

    def _do_copies(self) -> None:
        """Execute copies in order, at most `max_copy_bytes` between two steps, at least one."""
        if self._copies:
            self._state.events.flush()
        left = self._settings.max_copy_bytes
        while self._copies and left > 0:
            command = self._copies.popleft()
            command.work(self._state)
            left -= command.num_bytes

    def _answer(self, future: asyncio.Future[T], work: Callable[[State], T]) -> None:
        result: Any
        try:
            result = work(self._state)
        except WorkerError as error:
            result = error
        except Exception as error:
            self._state.events.answer(future, EngineError(f"the engine died: {error!r}"))
            raise
        self._state.events.answer(future, result)

    def _check_idle(self) -> None:
        violations = self._state.violations()
        if not violations:
            return
        self._state.num_violations += len(violations)
        logger.error("resources not freed", extra={"violations": violations})
        assert not self._settings.strict, f"resources not freed: {violations}"

    def _take_snapshot(self, *, busy: bool) -> None:
        """Renew the statistics if a request came or ended, at rest, and periodically."""
        now, inflight = self._clock(), self._state.inflight
        stale = now - self._snapshot_at >= SNAPSHOT_SECONDS
        if stale or not busy or inflight != self.stats.inflight:
            self._snapshot_at = now
            self.stats = self._state.snapshot()

    def _send(self, events: Iterator[OutputEvent]) -> None:
        """Deliver events in one call into the loop, with up-to-date statistics."""
        self._take_snapshot(busy=True)
        self._call_loop(deliver, events)

    def _call_loop(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._notifier.call(callback, *args)
        except RuntimeError:  # the loop is closed: no reader exists
            self._stopping = True

    def _stop(self, _: State) -> None:
        self._stopping = True

    def _wake(self) -> None:
        """Start a turn soon. Called by any thread."""
        self._commands.put(Command(lambda _: None, refuse=lambda _: None))
