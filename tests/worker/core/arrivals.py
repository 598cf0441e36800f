"""Requests of text as they arrive, and the settings that they meet."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from worker.core.simulation import Work

from vlm_worker.core.sequence import Lane
from vlm_worker.settings import AdmissionPolicy, AdmissionSettings
from vlm_worker.types import Request, RequestKey, SamplingParams

AGEING = 12.0
FCFS = AdmissionSettings(ageing_seconds=AGEING)
DUAL = AdmissionSettings(
    AdmissionPolicy.DUAL_QUEUE, max_text=4, max_vision=2, ageing_seconds=AGEING
)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Text of some length and importance."""

    length: int
    max_tokens: int
    priority: int
    lane: Lane

    def work(self, name: str) -> Work:
        token = 20 + sum(name.encode()) % 70
        sampling = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        key, tokens = RequestKey(name, 0), (token,) * self.length
        return Work(Request(key, tokens, self.length, sampling, priority=self.priority), (), 0)


arrivals = st.builds(
    Arrival, st.integers(1, 50), st.integers(1, 12), st.integers(-1, 2), st.sampled_from(Lane)
)
patterns = st.lists(st.lists(arrivals, max_size=3), min_size=1, max_size=5)


def text(name: str, length: int = 4, *, max_tokens: int = 4, priority: int = 0) -> Work:
    return Arrival(length, max_tokens, priority, Lane.TEXT).work(name)
