"""The engine thread: commands in, turns, letters out (`outbox`), and an honest death.

all commands -> [post -> some copies] -> turn -> all commands ...

A turn that finds nothing to do lets the runner prepare what is to come, until there is a command.
Copies are commands that take long. What the last step brought is told before them, and so few are
done between two steps that those who decode hardly wait.
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

from vlm_worker.engine.loop_calls import LoopCalls
from vlm_worker.engine.outbox import Letter, deliver
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions
from vlm_worker.engine.settings import EngineSettings, EngineStats
from vlm_worker.engine.state import State
from vlm_worker.errors import DrainingError, EngineError, WorkerError

T = TypeVar("T")

Refuse = Callable[[EngineError], None]

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.05
"""Without a command: a picture on its way here, decoded by then, is not met by other work."""
SNAPSHOT_SECONDS = 0.05
"""While busy, stats are at most so old."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """Something to do on the thread, and what to say on the loop if it cannot be.

    Attributes:
        num_bytes: what it copies; 0 is done at once.
    """

    work: Callable[[State], None]
    refuse: Refuse
    num_bytes: int = 0


class EngineThread:
    """Runs a `State`. `tell` and `ask` are called on the loop; all else happens on the thread."""

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
        self._state.pictures.queue.on_ended = self._wake
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._calls = LoopCalls()
        self._stopped: asyncio.Future[None] | None = None
        self._stopping = False
        self.exports = self._state.sequences.exports
        self._death: BaseException | None = None
        self._turn_started: float | None = None
        self._snapshot_at = 0.0
        self.stats: EngineStats = self._state.snapshot()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events are delivered on `loop`."""
        self._calls.open(loop)
        self._stopped = loop.create_future()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; raises what killed it."""
        if self._stopped is None:
            return
        self._commands.put(Command(self._stop, refuse=lambda _: None))
        await asyncio.shield(self._stopped)
        self._thread.join()
        if self._death is not None:
            raise self._death

    @property
    def healthy(self) -> bool:
        """Alive, stepping, and not failing every step."""
        begun = self._turn_started, self._state.pictures.queue.beside_since
        longest = max((self._clock() - since for since in begun if since is not None), default=0.0)
        stuck = longest > self._settings.stuck_step_seconds
        return self._thread.is_alive() and not stuck and not self._state.failing

    # ---- on the loop -----------------------------------------------------------------------------
    def tell(self, work: Callable[[State], None], *, refuse: Refuse, num_bytes: int = 0) -> None:
        """Have something done; it answers through its own stream, or `refuse` does.

        What copies `num_bytes` may be overtaken by what copies none.
        """
        if self._stopped is None or self._stopped.done():
            refuse(EngineError("the engine does not run"))
        else:
            self._commands.put(Command(work, refuse=refuse, num_bytes=num_bytes))

    async def ask(self, work: Callable[[State], T], *, num_bytes: int = 0) -> T:
        """Have something done and wait for its result or its WorkerError; see `tell`.

        A copy is not begun once nobody waits for it: its memory may be somebody else's by then.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def answer(_: State) -> None:
            if not (num_bytes and future.cancelled()):
                self._answer(future, work)

        def refuse(error: EngineError) -> None:
            if not future.done():
                future.set_exception(error)

        self.tell(answer, refuse=refuse, num_bytes=num_bytes)
        return await future

    def _finish(self) -> None:
        """The thread is over: refuse what came too late for it."""
        assert self._stopped is not None
        while not self._commands.empty():
            self._copies.append(self._commands.get())
        for command in self._copies:
            command.refuse(EngineError("the engine does not run"))
        self._calls.close()
        self._stopped.set_result(None)

    # ---- on the thread ---------------------------------------------------------------------------
    def _main(self) -> None:
        try:
            self._run()
            self._state.say_last_words(DrainingError("the engine stopped"))
        except BaseException as error:  # whatever it is, everybody who waits is told
            logger.exception("the engine thread died")
            self._death = error
            self._state.say_last_words(EngineError(f"the engine died: {error!r}"))
        finally:
            self._call_loop(deliver, self._state.outbox.take())
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
                self._state.outbox.post()

    def _do_commands(self, *, wait: bool) -> None:
        """Do all commands that there are, and line up the copies; with `wait`, at least one."""
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
        """The next command; until then, the runner has the time that nobody seems to need."""
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=IDLE_SECONDS)
        while self._commands.empty() and self._runner.use_idle_time():
            pass
        return self._commands.get()

    def _do_copies(self) -> None:
        """Do copies in order, as many as may lie between two steps; one at least."""
        if self._copies:
            self._state.outbox.post()
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
            self._state.outbox.answer(future, EngineError(f"the engine died: {error!r}"))
            raise
        self._state.outbox.answer(future, result)

    def _check_idle(self) -> None:
        violations = self._state.violations()
        if not violations:
            return
        self._state.num_violations += len(violations)
        logger.error("something did not come back", extra={"violations": violations})
        assert not self._settings.strict, f"something did not come back: {violations}"

    def _take_snapshot(self, *, busy: bool) -> None:
        """Renew the stats when somebody came or went, at rest, and now and then."""
        now, inflight = self._clock(), self._state.inflight
        stale = now - self._snapshot_at >= SNAPSHOT_SECONDS
        if stale or not busy or inflight != self.stats.inflight:
            self._snapshot_at = now
            self.stats = self._state.snapshot()

    def _send(self, letters: Iterator[Letter]) -> None:
        """Deliver letters, in one call into the loop; the stats know by then who came or went."""
        self._take_snapshot(busy=True)
        self._call_loop(deliver, letters)

    def _call_loop(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._calls.call(callback, *args)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._stopping = True

    def _stop(self, _: State) -> None:
        self._stopping = True

    def _wake(self) -> None:
        """There may be something to do in a turn. Called by any thread."""
        self._commands.put(Command(lambda _: None, refuse=lambda _: None))
