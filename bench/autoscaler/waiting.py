"""How long work waits for one of N replicas: Erlang's C, and what follows from it. Pure.

C(N, a)    probability that an item waits, for a Erlang offered to N servers
W95(N, a)  = φ · S / (N - a) · max(0, ln(C(N, a) / 0.05))      S  mean seconds of one item
                                                               φ  variability, 1 for M/M/N
exact for M/M/N, the heavy-traffic approximation (Allen-Cunneen) otherwise.
"""

from __future__ import annotations

import math

LATE = 0.05  # share that may wait longer than W95
MOST = 10_000  # servers that are tried


def erlang_c(servers: int, erlangs: float) -> float:
    """Return the probability that an item waits; 1 where more comes than can be served."""
    if erlangs <= 0:
        return 0.0
    if erlangs >= servers:
        return 1.0
    blocked = 1.0  # Erlang's B, by its recursion over servers
    for count in range(1, servers + 1):
        blocked = erlangs * blocked / (count + erlangs * blocked)
    return _waits(blocked, servers, erlangs)


def wait_p95(servers: int, erlangs: float, *, seconds: float, variability: float = 1.0) -> float:
    """Return the 95th percentile of the wait in seconds; infinite where more comes than goes."""
    if erlangs >= servers:
        return math.inf
    return _wait(erlang_c(servers, erlangs), servers, erlangs, seconds * variability)


def least_servers(
    erlangs: float, *, seconds: float, within: float, variability: float = 1.0
) -> int:
    """Return the fewest servers whose W95 is at most `within` seconds."""
    if erlangs <= 0:
        return 0
    if not erlangs < MOST:
        return MOST
    blocked = 1.0
    for count in range(1, MOST):
        blocked = erlangs * blocked / (count + erlangs * blocked)
        if count > erlangs:
            waits = _waits(blocked, count, erlangs)
            if _wait(waits, count, erlangs, seconds * variability) <= within:
                return count
    return MOST


def _waits(blocked: float, servers: int, erlangs: float) -> float:
    return blocked / (1.0 - erlangs / servers * (1.0 - blocked))


def _wait(waits: float, servers: int, erlangs: float, seconds: float) -> float:
    if waits <= LATE:
        return 0.0
    return seconds / (servers - erlangs) * math.log(waits / LATE)
