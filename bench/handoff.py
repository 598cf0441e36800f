"""The time that a KV handoff from prefill to decode adds, with and without overlap.

    python bench/run.py handoff          python bench/handoff.py [--rounds 2] [--only small]

Two `vlm-worker` processes on this machine, random weights (`random_vlm`), over data connections.

    small   575 tokens, 14 MB       exposed: at most 3 % of the time of prefill
    large   3,584 tokens, 352 MB    one KV head per head, chunks of 512 tokens; exposed: at most
                                    0.25 of the time if decode is called after prefill

Exposed is the gap between the first two tokens less the usual gap. Both ways alternate. The pools
hold two prompts, and the first round is a warm-up, so that later rounds write no new memory.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import random_vlm
from workers import running

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "worker"))

from vlm_worker.client import WorkerClient  # noqa: E402
from vlm_worker.types import Request, RequestKey, SamplingParams, Source  # noqa: E402
from vlm_worker.wire.messages import (  # noqa: E402
    Accepted,
    DecodeCall,
    FirstToken,
    PrefillCall,
    ReserveCall,
    Tokens,
)

TIMEOUT = 120.0
NUM_TOKENS_OUT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model, a prompt, and the goal."""

    size: random_vlm.Size
    num_tokens: int
    max_model_len: int
    kv_bytes: int
    max_batched_tokens: int
    goal: tuple[str, float]

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of both workers."""
        return (
            f"--kv-memory-bytes={self.kv_bytes}",
            f"--max-batched-tokens={self.max_batched_tokens}",
            f"--max-model-len={self.max_model_len}",
        )


CASES = {
    "small": Case(random_vlm.FULL, 575, 1024, 32 << 20, 2048, ("of prefill", 0.03)),
    "large": Case(
        dataclasses.replace(random_vlm.FULL, kv_heads=8),
        3584, 4096, 768 << 20, 512, ("of un-overlapped", 0.25),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Times of one answer, in seconds."""

    prefill: float
    exposed: float


async def main() -> None:
    """Print every case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=CASES)
    args = parser.parse_args()
    for name in [args.only] if args.only else CASES:
        with tempfile.TemporaryDirectory(prefix="triptych-bench-") as made:
            random_vlm.make_model(Path(made), CASES[name].size)
            figures = await measure(Path(made), CASES[name], num_rounds=args.rounds)
        print(json.dumps({"bench": "handoff", "what": name, **figures}), flush=True)


async def measure(model_dir: Path, case: Case, *, num_rounds: int) -> dict[str, Any]:
    """Medians; the first round is not counted."""
    overlapped: list[Times] = []
    after: list[Times] = []
    with (
        running(model_dir, "prefill", *case.flags) as here,
        running(model_dir, "decode", *case.flags) as there,
    ):
        async with WorkerClient(here) as prefill, WorkerClient(there) as decode:
            for number in range(num_rounds + 1):
                for kept, overlap in ((overlapped, True), (after, False)):
                    name = f"{number}-{overlap}"
                    times = await answer(prefill, decode, prompt(case, name), overlap=overlap)
                    if number:
                        kept.append(times)
    prefill_seconds = statistics.median(one.prefill for one in [*overlapped, *after])
    exposed, whole = (
        statistics.median(one.exposed for one in kept) for kept in (overlapped, after)
    )
    ratios = {"of prefill": exposed / prefill_seconds, "of un-overlapped": exposed / whole}
    which, goal = case.goal
    return {
        "tokens": case.num_tokens,
        "ms": {
            "prefill": round(1e3 * prefill_seconds, 1),
            "exposed": round(1e3 * exposed, 1),
            "un-overlapped": round(1e3 * whole, 1),
        },
        **{name: round(ratio, 3) for name, ratio in ratios.items()},
        "goal": {which: goal},
        "met": ratios[which] <= goal,
    }


def prompt(case: Case, name: str) -> Request:
    """Words of a unique prompt."""
    rng = random.Random(name)
    words = range(random_vlm.FIRST_WORD, random_vlm.LAST_WORD)
    tokens = tuple(rng.choice(words) for _ in range(case.num_tokens))
    sampling = SamplingParams(NUM_TOKENS_OUT, ignore_eos=True)
    return Request(RequestKey(name, 1), tokens, len(tokens), sampling)


async def answer(
    prefill: WorkerClient, decode: WorkerClient, request: Request, *, overlap: bool
) -> Times:
    """Run one prompt; call decode when prefill has accepted it, or when it has ended."""
    began = time.perf_counter()
    decoding: asyncio.Task[tuple[float, list[float]]] | None = None
    renewing: asyncio.Task[None] | None = None
    first = 0.0
    call = PrefillCall(request, f"{request.key.request_id}.kv", ())
    async with aclosing(prefill.prefill(call, timeout=TIMEOUT)) as replies:
        async for reply in replies:
            if isinstance(reply.event, Accepted):
                accepted = reply.event
                kv = Source(
                    prefill.address,
                    accepted.boot_id,
                    accepted.transfer_id,
                    accepted.layout_fingerprint,
                )
                if overlap:
                    decoding = asyncio.create_task(continue_from(decode, request, kv))
                else:  # as a waiting consumer does
                    renewing = asyncio.create_task(renew(prefill, kv))
            if isinstance(reply.event, FirstToken):
                first = time.perf_counter()
    decoding = decoding or asyncio.create_task(continue_from(decode, request, kv))
    called, (second, *later) = await decoding
    if renewing is not None:
        renewing.cancel()
    gaps = [b - a for a, b in zip([second, *later], later, strict=False)]
    exposed = second - max(first, called) - statistics.median(gaps)
    return Times(first - began, exposed)


async def renew(prefill: WorkerClient, kv: Source) -> None:
    """Renew the lease of KV that is not fetched yet."""
    while True:
        await asyncio.sleep(prefill.timers.renew)
        await prefill.renew(kv.boot_id, [kv.transfer_id])


async def continue_from(
    decode: WorkerClient, request: Request, kv: Source
) -> tuple[float, list[float]]:
    """The time of the Decode call, and of each token."""
    called = time.perf_counter()
    granted = await decode.reserve(ReserveCall(request.key, len(request.token_ids) + 1))
    call = DecodeCall(request, granted.reservation_id, kv, granted.boot_id)
    times = []
    async with aclosing(decode.decode(call, timeout=TIMEOUT)) as replies:
        async for reply in replies:
            if isinstance(reply.event, Tokens):
                times += [time.perf_counter()] * len(reply.event.token_ids)
    return called, times


if __name__ == "__main__":
    asyncio.run(main())
