"""Waiting until no engine computes: what one spins after its answer would slow the next one.

An engine's threads may poll for more work after an answer: Intel's OpenMP, TBB and llama.cpp's pool
do. On the same cores they keep the next engine's threads from running, above all those that sleep
while they wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

PROCESSES = Path("/proc")
WINDOW_SECONDS = 0.05
MOST_SHARE = 0.04
"""Of a window: what an engine at rest takes for its timers."""
PATIENCE_SECONDS = 5.0
SCHEDULED = 2
"""Of the clock of a process on Linux: what its threads have run, in nanoseconds."""


def processor_seconds(sessions: Iterable[int]) -> float:
    """What all threads of these sessions have computed so far; 0 where the system does not say."""
    wanted = {str(session) for session in sessions}
    found = [process for process in PROCESSES.glob("[0-9]*") if _session(process) in wanted]
    return sum(_seconds_of(int(process.name)) for process in found)


def await_rest(
    measure: Callable[[], float],
    pause: Callable[[float], None] = time.sleep,  # noqa: TID251  other processes are polled
) -> float:
    """Wait until hardly anything is computed, at most `PATIENCE_SECONDS`; returns what was.

    Args:
        measure: processor seconds so far.
        pause: waits so many seconds.
    """
    began = before = measure()
    for _ in range(round(PATIENCE_SECONDS / WINDOW_SECONDS)):
        pause(WINDOW_SECONDS)
        now = measure()
        if now - before <= MOST_SHARE * WINDOW_SECONDS:
            break
        before = now
    return before - began


def _session(process: Path) -> str | None:
    try:
        after_name = (process / "stat").read_text().rpartition(")")[2]
    except OSError:  # it has ended
        return None
    return after_name.split()[3]


def _seconds_of(process_id: int) -> float:
    try:
        return time.clock_gettime(~process_id << 3 | SCHEDULED)
    except OSError:  # it has ended
        return 0.0
