"""Generates traces: shapes that load the three pools differently, each from a seed.

Arrivals are a Poisson process whose rate changes over time. Sizes are log-normal.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping

from vlm_cli.simulator.trace import Request, Trace

_STEP_SECONDS = 1.0  # time with a constant rate
_RAMP_SECONDS = 120.0  # duration of a change of the mix
TEXT_SIGMA, OUTPUT_SIGMA, PATCHES_SIGMA = 0.6, 0.5, 0.4  # sigmas of the logarithms of sizes


@dataclasses.dataclass(frozen=True)
class Mix:
    """The distribution of requests at one moment.

    Attributes:
        rate: requests per second.
        image_share: share of requests with one image.
        text_tokens, output_tokens, patches: medians.
        cached_share: share of the prompt in the prefix cache, for half of the requests.
    """

    rate: float = 6.0
    image_share: float = 0.35
    text_tokens: float = 350.0
    output_tokens: float = 160.0
    patches: float = 2300.0
    cached_share: float = 0.2


MixAt = Callable[[float], Mix]


def generate(name: str, *, seed: int, seconds: float = 3600.0, scale: float = 1.0) -> Trace:
    """Generate the trace of one shape.

    Args:
        name: its key in `ALL_SHAPES`.
        seed: equal seeds give equal traces.
        seconds: length of the trace.
        scale: factor of the rate.
    """
    rng = random.Random(f"{name}/{seed}")
    mix_at = ALL_SHAPES[name](seconds, rng)
    requests = []
    now = 0.0
    while now < seconds:
        mix = mix_at(now)
        until = min(now + _STEP_SECONDS, seconds)
        at = now + rng.expovariate(max(mix.rate * scale, 1e-9))
        while at < until:
            requests.append(_request(at, mix, rng))
            at += rng.expovariate(mix.rate * scale)
        now = until
    return Trace(name, seconds, tuple(requests))


def _request(at: float, mix: Mix, rng: random.Random) -> Request:
    text = _sized(mix.text_tokens, TEXT_SIGMA, 16, 6000, rng)
    cached = int(text * mix.cached_share) if rng.random() < 0.5 else 0
    image = rng.random() < mix.image_share
    return Request(
        at=at,
        text_tokens=text,
        output_tokens=_sized(mix.output_tokens, OUTPUT_SIGMA, 4, 4000, rng),
        patches=(_sized(mix.patches, PATCHES_SIGMA, 256, 9216, rng),) if image else (),
        cached_tokens=cached,
    )


def _sized(median: float, sigma: float, minimum: int, maximum: int, rng: random.Random) -> int:
    return min(maximum, max(minimum, round(median * math.exp(rng.gauss(0.0, sigma)))))


def _steady(_seconds: float, _rng: random.Random) -> MixAt:
    base = Mix()
    return lambda _now: base


def _bursty_images(seconds: float, rng: random.Random) -> MixAt:
    """About every quarter of an hour, three times the images for four minutes."""
    base = Mix()
    burst = dataclasses.replace(base, rate=base.rate * 1.3, image_share=0.85)
    starts = _starts(seconds, rng, every=900.0)
    return lambda now: _blend(
        base, burst, max((_ramp(now, start, start + 240.0, 60.0) for start in starts), default=0.0)
    )


def _long_answers(seconds: float, rng: random.Random) -> MixAt:
    """For a third of the time, answers of three times the length."""
    base = Mix()
    return _episode(
        seconds, rng, base, dataclasses.replace(base, output_tokens=base.output_tokens * 3)
    )


def _long_prompts(seconds: float, rng: random.Random) -> MixAt:
    """For a third of the time, prompts of four times the length and short answers."""
    base = Mix()
    long = dataclasses.replace(
        base, text_tokens=base.text_tokens * 4, output_tokens=base.output_tokens / 4
    )
    return _episode(seconds, rng, base, long)


def _text_only_lull(seconds: float, rng: random.Random) -> MixAt:
    """For half of the time, no images."""
    base = Mix()
    begin = seconds * rng.uniform(0.2, 0.3)
    end = begin + seconds / 2
    lull = dataclasses.replace(base, image_share=0.0)
    return lambda now: _blend(base, lull, _ramp(now, begin, end, _RAMP_SECONDS))


def _diurnal(seconds: float, rng: random.Random) -> MixAt:
    """One day, compressed: from 0.5 of the usual rate to 1.8, and down again."""
    base, shift = Mix(), rng.uniform(-0.05, 0.05)

    def mix(now: float) -> Mix:
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * (now / seconds + shift))
        return dataclasses.replace(base, rate=base.rate * (0.5 + 1.3 * wave))

    return mix


def _bad_node_type(seconds: float, rng: random.Random) -> MixAt:
    """Twice the load for a third of the time. `scenario.standard` adds the bad node type."""
    base = Mix()
    return _episode(seconds, rng, base, dataclasses.replace(base, rate=base.rate * 2))


def _episode(seconds: float, rng: random.Random, base: Mix, other: Mix) -> MixAt:
    """Another mix for a third of the time, from 25 to 40 % of the trace on."""
    begin = seconds * rng.uniform(0.25, 0.4)
    end = begin + seconds / 3
    return lambda now: _blend(base, other, _ramp(now, begin, end, _RAMP_SECONDS))


def _ramp(now: float, begin: float, end: float, seconds: float) -> float:
    """Return 0 outside and 1 inside, with linear ramps of `seconds` inside both ends."""
    return min(1.0, max(0.0, (now - begin) / seconds), max(0.0, (end - now) / seconds))


def _blend(base: Mix, other: Mix, share: float) -> Mix:
    """Interpolate each number of two mixes."""
    if share in (0.0, 1.0):
        return other if share else base
    return Mix(
        *(
            (1 - share) * first + share * second
            for first, second in zip(
                dataclasses.astuple(base), dataclasses.astuple(other), strict=True
            )
        )
    )


def _starts(seconds: float, rng: random.Random, *, every: float) -> tuple[float, ...]:
    starts, at = [], rng.uniform(0.3, 0.7) * every
    while at < seconds:
        starts.append(at)
        at += every * rng.uniform(0.8, 1.2)
    return tuple(starts)


def _campaign(seconds: float, rng: random.Random) -> MixAt:
    """Repeatedly three times the usual load within 30 s, which then decays exponentially."""
    base = Mix(rate=4.0)
    starts = _starts(seconds, rng, every=1200.0)

    def mix(now: float) -> Mix:
        added = max(
            (
                min(1.0, (now - start) / 30.0) * math.exp(-max(0.0, now - start - 30.0) / 240.0)
                for start in starts
                if now >= start
            ),
            default=0.0,
        )
        return dataclasses.replace(base, rate=base.rate * (1 + 2 * added))

    return mix


def _square(seconds: float, rng: random.Random) -> MixAt:
    """Alternately high and low for 100 to 170 s each: about one scale-down window."""
    base, edges, at = Mix(), [], 0.0
    while at < seconds:
        at += rng.uniform(100.0, 170.0)
        edges.append(at)
    high = dataclasses.replace(base, rate=base.rate * 1.7)
    low = dataclasses.replace(base, rate=base.rate * 0.6)
    return lambda now: high if sum(edge <= now for edge in edges) % 2 else low


def _collapse(seconds: float, rng: random.Random) -> MixAt:
    """The load grows linearly to 2.5 times, and drops to half at once."""
    base, peak = Mix(rate=3.5), seconds * rng.uniform(0.6, 0.75)

    def mix(now: float) -> Mix:
        growth = 1.5 * now / peak if now < peak else -0.5
        return dataclasses.replace(base, rate=base.rate * (1 + growth))

    return mix


def _pareto_bursts(seconds: float, rng: random.Random) -> MixAt:
    """Bursts whose heights and lengths have heavy tails."""
    base, bursts, at = Mix(rate=4.0), [], 0.0
    while at < seconds:
        at += rng.expovariate(1 / 150.0)
        length = min(300.0, 20.0 * rng.paretovariate(1.5))
        bursts.append((at, at + length, min(3.0, 0.4 * rng.paretovariate(1.5))))

    def mix(now: float) -> Mix:
        added = sum(height for begin, end, height in bursts if begin <= now < end)
        return dataclasses.replace(base, rate=base.rate * (1 + min(3.0, added)))

    return mix


def _mix_shift(seconds: float, rng: random.Random) -> MixAt:
    """A constant rate whose mix moves from images to long prompts to long answers."""
    base = Mix(rate=5.0)
    phases = [
        dataclasses.replace(base, image_share=0.7, text_tokens=200.0),
        dataclasses.replace(base, image_share=0.1, text_tokens=1200.0, output_tokens=60.0),
        dataclasses.replace(base, image_share=0.1, output_tokens=420.0),
    ]
    rng.shuffle(phases)
    phase_seconds = seconds / len(phases)

    def mix(now: float) -> Mix:
        at = min(int(now / phase_seconds), len(phases) - 1)
        share = min(1.0, (now - at * phase_seconds) / 60.0)
        return _blend(phases[at - 1] if at else base, phases[at], share)

    return mix


def _recorded_like(seconds: float, rng: random.Random) -> MixAt:
    """A rate like recorded ones: a slow wave, autocorrelated noise, a few drops to 0.3 times."""
    base, level, levels = Mix(rate=4.5), 0.0, []
    phase = rng.uniform(0.0, 2 * math.pi)
    for step in range(math.ceil(seconds / 10.0) + 1):
        level = 0.95 * level + rng.gauss(0.0, 0.09)
        wave = 0.35 * math.sin(phase + 2 * math.pi * step * 10.0 / 2400.0)
        drop = 0.3 if rng.random() < 0.01 else 1.0
        levels.append(drop * math.exp(level + wave))
    return lambda now: dataclasses.replace(
        base, rate=base.rate * min(3.0, levels[min(int(now / 10.0), len(levels) - 1)])
    )


SHAPES: Mapping[str, Callable[[float, random.Random], MixAt]] = {
    "steady": _steady,
    "bursty-images": _bursty_images,
    "long-answers": _long_answers,
    "long-prompts": _long_prompts,
    "text-only-lull": _text_only_lull,
    "diurnal": _diurnal,
    "bad-node-type": _bad_node_type,
}

# Not used for tuning. They test whether settings that are tuned on `SHAPES` generalise.
HELD_OUT_SHAPES: Mapping[str, Callable[[float, random.Random], MixAt]] = {
    "campaign": _campaign,
    "square": _square,
    "collapse": _collapse,
    "pareto-bursts": _pareto_bursts,
    "mix-shift": _mix_shift,
    "recorded-like": _recorded_like,
}
ALL_SHAPES = {**SHAPES, **HELD_OUT_SHAPES}
