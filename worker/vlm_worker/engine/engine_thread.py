"""The engine thread: it executes commands, copies between steps, and takes turns of the state.

All queued commands come first. Copies are commands that take long: the thread flushes the events of
the last step before them, and limits the bytes that it copies between two steps, so that decoding
sequences wait little. If a turn finds no work, the runner prefaults memory until the next command.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from vlm_worker.engine.constraints import Constraints
from vlm_worker.engine.embedding_files import EmbeddingFiles
from vlm_worker.engine.events import LoopNotifier, OutputEvent, deliver
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions
from vlm_worker.engine.settings import EngineSettings, EngineStats
from vlm_worker.engine.state import State
from vlm_worker.errors import DrainingError, EngineError, WorkerError

T = TypeVar("T")

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.05
"""Wait for a command before prefaulting: an image that arrives soon finds the thread free."""
SNAPSHOT_SECONDS = 0.05
"""Maximum age of the statistics while the engine is busy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A call to make on the thread, and `refuse`, called on the loop if it cannot be made.

    If it copies `num_bytes`, it may be overtaken by commands that copy nothing.
    """

    work: Callable[[State], None]
    refuse: Callable[[EngineError], None] = lambda _: None
    num_bytes: int = 0


class EngineThread:
    """Owns `state`. Others reach the state through commands.

    `start`, `stop`, `post` and `call` are called on the loop given to `start`, `wake` by any
    thread.
    `files` is the disk tier of the encoder cache; the thread starts and closes it.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        settings: EngineSettings,
        positions: Positions,
        clock: Callable[[], float],
        files: EmbeddingFiles | None,
        constraints: Constraints | None,
    ) -> None:
        self._runner, self._settings, self._clock, self._files = runner, settings, clock, files
        self.state = State(
            runner,
            settings=settings,
            positions=positions,
            clock=clock,
            send=self._send,
            files=files,
            constraints=constraints,
        )
        self.state.encode_requests.queue.on_ended = self.wake
        self.stats: EngineStats = self.state.snapshot()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._copies: collections.deque[Command] = collections.deque()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._notifier = LoopNotifier()
        self._stopped: asyncio.Future[None] | None = None
        self._stopping = False
        self._death: BaseException | None = None
        self._turn_started: float | None = None
        self._snapshot_at = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events are delivered on `loop`."""
        self._notifier.open(loop)
        self._stopped = loop.create_future()
        if self._files is not None:
            self._files.start(self.wake)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current turn; unfinished work fails with DrainingError.

        Raises the error that ended the thread, if any.
        """
        if self._stopped is None:
            return
        self._commands.put(Command(self._stop))
        await asyncio.shield(self._stopped)
        self._thread.join()
        if self._files is not None:
            await asyncio.to_thread(self._files.close)
        if self._death is not None:
            raise self._death

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the thread cannot go on: it ended, a step is stuck, or too many steps failed."""
        if not self._thread.is_alive():
            return "it has ended" if self._death is None else f"it died: {self._death!r}"
        starts = self._turn_started, self.state.encode_requests.queue.async_encode_started
        longest = max((self._clock() - start for start in starts if start is not None), default=0.0)
        if longest > self._settings.stuck_step_seconds:
            return f"a step has taken {longest:.0f} s: it is stuck"
        return self.state.unhealthy_reason

    def post(self, command: Command) -> None:
        """Queue a command; it is refused at once if the thread does not run."""
        if self._stopped is None or self._stopped.done():
            command.refuse(EngineError("the engine does not run"))
        else:
            self._commands.put(command)

    async def call(self, work: Callable[[State], T], *, num_bytes: int = 0) -> T:
        """Queue a command and wait for its result or its WorkerError.

        If the caller is cancelled, a queued copy is skipped: its memory may be in other use.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def answer(_: State) -> None:
            if not (num_bytes and future.cancelled()):
                self._answer(future, work)

        self.post(Command(answer, functools.partial(refuse, future), num_bytes))
        return await future

    def wake(self) -> None:
        """Start a turn soon. Called by any thread."""
        self._commands.put(Command(lambda _: None))

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
            self.state.fail_pending(DrainingError("the engine stopped"))
        except BaseException as error:  # every waiting caller gets it
            logger.exception("the engine thread died")
            self._death = error
            self.state.fail_pending(EngineError(f"the engine died: {error!r}"))
        finally:
            self._call_loop(functools.partial(deliver, self.state.events.take()))
            self._call_loop(self._finish)

    def _run(self) -> None:
        busy = False
        while not self._stopping:
            self._do_commands(wait=not busy and not self._copies)
            self._do_copies()
            self._turn_started = self._clock()
            busy = self.state.turn()
            self._turn_started = None
            if not busy:
                self.state.check_idle()
            self._take_snapshot(busy=busy)
            if not busy:
                self.state.events.flush()

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
                command.work(self.state)
            wait = False

    def _awaited(self) -> Command:
        """The next command; the runner prefaults until then. queue.Empty if a turn is due."""
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=IDLE_SECONDS)
        reads = self.state.encode_requests.reads
        is_reading = reads.seconds_left is not None
        while not is_reading and self._commands.empty() and self._runner.prefault():
            pass
        return self._commands.get(timeout=reads.seconds_to_turn)

    def _do_copies(self) -> None:
        """Execute copies in order, at most `max_copy_bytes` between two steps, at least one."""
        if self._copies:
            self.state.events.flush()
        remaining_bytes = self._settings.max_copy_bytes
        while self._copies and remaining_bytes > 0:
            command = self._copies.popleft()
            command.work(self.state)
            remaining_bytes -= command.num_bytes

    def _answer(self, future: asyncio.Future[T], work: Callable[[State], T]) -> None:
        result: Any
        try:
            result = work(self.state)
        except WorkerError as error:
            result = error
        except Exception as error:
            self.state.events.answer(future, EngineError(f"the engine died: {error!r}"))
            raise
        self.state.events.answer(future, result)

    def _take_snapshot(self, *, busy: bool) -> None:
        """Renew the statistics if a request came or ended, at rest, and periodically."""
        now, inflight = self._clock(), len(self.state.attempts.by_key)
        stale = now - self._snapshot_at >= SNAPSHOT_SECONDS
        if stale or not busy or inflight != self.stats.inflight:
            self._snapshot_at = now
            self.stats = self.state.snapshot()

    def _send(self, events: Iterator[OutputEvent]) -> None:
        """Deliver events in one call into the loop, with up-to-date statistics."""
        self._take_snapshot(busy=True)
        self._call_loop(functools.partial(deliver, events))

    def _call_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._notifier.call(callback)
        except RuntimeError:  # the loop is closed: no reader exists
            self._stopping = True

    def _stop(self, _: State) -> None:
        self._stopping = True


def refuse(future: asyncio.Future[Any], error: EngineError) -> None:
    """Fail a future that has no result yet."""
    if not future.done():
        future.set_exception(error)
