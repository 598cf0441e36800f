"""How long a call takes on a GPU, and what the GPU could do: both probed in the same run.

Rounds are interleaved: in each, every candidate runs some calls between two events, one candidate
after the other; medians over rounds. Calls are captured in a CUDA graph where that is possible, so
that what is measured is the GPU and not Python's launching; a line says where it was not.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

L2_BYTES = 200 << 20
"""What is read between two reads of the same: more than any L2 cache (60 MB on an H200)."""

COPIES = 32
"""At most, of what a case reads, and calls in one measurement, so that each copy has its turn."""

Call = Callable[[], Any]

Case = Callable[[], dict[str, Any]]
"""Measures something, and says so in a line."""


@dataclass(frozen=True)
class Limits:
    """Of this device, in this run: bytes per second, and floating-point operations per second."""

    read: float
    copy: float
    flops: float


@dataclass(frozen=True)
class Bench:
    """What cases are given."""

    device: torch.device
    dtype: torch.dtype
    rounds: int
    is_smoke: bool
    limits: Limits

    @property
    def calls(self) -> int:
        """In one measurement."""
        return 1 if self.is_smoke else COPIES

    @classmethod
    def probed(cls, *, rounds: int, is_smoke: bool) -> Bench:
        """For the GPU of this machine, or for the interpreter, in float32."""
        device = torch.device("cpu" if is_smoke else "cuda")
        dtype = torch.float32 if is_smoke else torch.bfloat16
        bench = cls(device, dtype, rounds, is_smoke, Limits(1, 1, 1))
        return cls(device, dtype, rounds, is_smoke, bench.probe())

    def probe(self) -> Limits:
        """Read and copy 4 GiB, and multiply 8192 x 8192, of random numbers: zeros run faster."""
        num_bytes, size = (1 << 20, 64) if self.is_smoke else (4 << 30, 8192)
        source = self.randn(num_bytes // self.dtype.itemsize)
        target = torch.empty_like(source)
        a, b = self.randn(size, size), self.randn(size, size)
        took = self.medians(
            {
                "read": lambda: source.view(torch.float32).sum(),  # of int32, torch sums a copy
                "copy": lambda: target.copy_(source),
                "product": lambda: a @ b,
            }
        )
        return Limits(
            read=num_bytes / took["read"],
            copy=2 * num_bytes / took["copy"],
            flops=2 * size**3 / took["product"],
        )

    def medians(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """Seconds per call."""
        runs = {name: self._repeated(call) for name, call in calls.items()}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, run in runs.items():
                seconds[name].append(self._timed(run) / self.calls)
        return {name: statistics.median(values) for name, values in seconds.items()}

    def randn(self, *shape: int) -> torch.Tensor:
        """Random numbers, made in their own type: no float32 copy of a large tensor."""
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_()

    def rotating(self, num_bytes: int, make: Callable[[], Any]) -> Iterator[Any]:
        """Endless turns of copies that are more than an L2 cache together, at least two.

        Of less than 2 MB, all `COPIES` fit into it, and are measured there.
        """
        copies = 2 if self.is_smoke else max(2, min(COPIES, L2_BYTES // num_bytes + 1))
        return itertools.cycle([make() for _ in range(copies)])

    def _repeated(self, call: Call) -> Call:
        """Several of it: a replay of a captured graph, where it can be captured."""

        def repeat() -> None:
            for _ in range(self.calls):
                call()

        repeat()
        return repeat if self.device.type != "cuda" else captured(repeat)

    def _timed(self, run: Call) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def captured(run: Call) -> Call:
    """A replay of what it launches, on its own stream; raises where that cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def report(case: str, took: Mapping[str, float], *, of: float, limit: float) -> dict[str, Any]:
    """One line: microseconds, and `of` per second as a share of `limit`, of each candidate."""
    return {
        "case": case,
        "microseconds": {name: round(s * 1e6, 2) for name, s in took.items()},
        "share": {name: round(of / s / limit, 3) for name, s in took.items()},
    }
