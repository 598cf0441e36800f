"""Levers of a service: what each would change in ITL, TTFT or cost, by its own counters. Pure.

Profile + Service ─▶ levers, the largest gain in a missed goal first ─▶ sections of the report
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from vlm_cli.advise.profile import Profile, StepFit
from vlm_cli.sections import FactSection, Figure, NoteSection, Section, TableSection
from vlm_operator.names import Role

IDLE: Final = 0.10
"""An encoder pool that is busy for a smaller share of its time is idle."""
SUPER_LINEAR: Final = 1.3
"""Growth of the slope from which steps are called super-linear; less is noise of two halves."""
UNCERTAIN: Final = 0.5
INT8_KV: Final = 0.52
"""Bytes of int8 KV over bfloat16, for heads of 128: (128 + 4) / 256."""
INT8_WEIGHTS: Final = 0.5
LOW_DETAIL: Final = 0.25
"""Visual tokens of `detail: low` over `auto`, for images that use the whole pixel limit."""
MIN_GAIN: Final = 0.02
"""Smaller gains are not listed."""

_FEWER_PIXELS: Final = "the model sees fewer pixels; no effect on families with one size"
_QUEUES: Final = {
    "encoder_queue": Role.ENCODER,
    "prefill_queue": Role.PREFILL,
    "decode_reserve": Role.DECODE,
}


@dataclasses.dataclass(frozen=True)
class Service:
    """What the manifest and the status say.

    Attributes:
        replicas: of each pool.
        price: of one pod per hour; a role without one has no price.
        has_int8_kv, has_rounded_weights: whether these levers are in use.
    """

    name: str
    replicas: Mapping[Role, int]
    price: Mapping[Role, float]
    has_int8_kv: bool
    has_rounded_weights: bool
    ttft_goal: float | None
    itl_goal: float | None


@dataclasses.dataclass(frozen=True)
class Lever:
    """One change.

    Attributes:
        metric: what it improves: ITL, TTFT or cost.
        gain: share by which the metric shrinks, 0 to 1, an estimate.
        formula: of the gain.
        price: its cost: money per hour if positive, saved if negative; None if unknown or none.
        side_effect: what else changes; "" if nothing.
    """

    name: str
    metric: str
    gain: float
    formula: str
    price: float | None
    side_effect: str
    is_goal_missed: bool


def levers(found: Profile, service: Service) -> tuple[Lever, ...]:
    """Return the levers with a gain, those for a missed goal first."""
    listed = [
        *_itl_levers(found, service),
        *_ttft_levers(found, service),
        *_cost_levers(found, service),
    ]
    useful = [lever for lever in listed if lever.gain >= MIN_GAIN]
    return tuple(sorted(useful, key=lambda lever: (not lever.is_goal_missed, -lever.gain)))


def misses_itl(found: Profile, service: Service) -> bool:
    return (
        service.itl_goal is not None
        and found.itl_p95 is not None
        and found.itl_p95 > service.itl_goal
    )


def _itl_levers(found: Profile, service: Service) -> list[Lever]:
    fit = found.fit
    if fit is None or fit.seconds <= 0:
        return []
    missed = misses_itl(found, service)
    kv_share = fit.slope * fit.kv_tokens / fit.seconds
    pods = service.replicas.get(Role.DECODE, 1)
    listed = [
        Lever(
            "one more decode pod",
            "ITL",
            kv_share / (pods + 1),
            f"KV share of a step / ({pods} + 1 pods)",
            service.price.get(Role.DECODE),
            "",
            missed,
        )
    ]
    if not service.has_int8_kv:
        listed.append(
            Lever(
                "model.kvCacheDtype: Int8",
                "ITL",
                kv_share * (1 - INT8_KV),
                f"KV share of a step · (1 - {INT8_KV}); twice the answers fit, too",
                None,
                "a small loss of accuracy; all pods restart",
                missed,
            )
        )
    if not service.has_rounded_weights:
        listed.append(
            Lever(
                "engine.extraArgs: [--weights=int8]",
                "ITL",
                fit.base / fit.seconds * (1 - INT8_WEIGHTS),
                f"base of a step · (1 - {INT8_WEIGHTS}), at most: the base is not all weights",
                None,
                "a small loss of accuracy; all pods restart",
                missed,
            )
        )
    visual = visual_share(found, fit)
    listed.append(
        Lever(
            "clients send detail: low",
            "ITL",
            kv_share * visual * (1 - LOW_DETAIL),
            f"KV share of a step · visual share of KV · (1 - {LOW_DETAIL})",
            None,
            _FEWER_PIXELS,
            missed,
        )
    )
    decode = found.roles.get(Role.DECODE)
    if decode is not None and Role.PREFILL not in service.replicas:
        listed.append(
            Lever(
                "a prefill pool",
                "ITL",
                min(1.0, decode.shares.get("prefill", 0.0) + decode.shares.get("encode", 0.0)),
                "share of a decode pod's time for prefill and encoding",
                service.price.get(Role.DECODE),
                "KV of each prompt crosses the network",
                missed,
            )
        )
    return listed


def _ttft_levers(found: Profile, service: Service) -> list[Lever]:
    total = sum(found.stages.values())
    if total <= 0:
        return []
    goal = service.ttft_goal
    missed = goal is not None and found.ttft is not None and found.ttft > goal
    stages: dict[Role, list[str]] = {}
    for stage, role in _QUEUES.items():
        stages.setdefault(role if role in service.replicas else Role.DECODE, []).append(stage)
    listed = []
    for role, names in stages.items():
        pods = service.replicas.get(role, 1)
        waited = sum(found.stages.get(stage, 0.0) for stage in names)
        listed.append(
            Lever(
                f"one more {role} pod",
                "TTFT",
                waited / total / (pods + 1),
                f"share of {', '.join(names)} in TTFT / ({pods} + 1 pods), at least",
                service.price.get(role),
                "",
                missed,
            )
        )
    listed.append(
        Lever(
            "clients send detail: low",
            "TTFT",
            found.stages.get("encode", 0.0) / total * (1 - LOW_DETAIL),
            f"share of encode in TTFT · (1 - {LOW_DETAIL}); shorter prompts, too",
            None,
            _FEWER_PIXELS,
            missed,
        )
    )
    return listed


def _cost_levers(found: Profile, service: Service) -> list[Lever]:
    encoder = found.roles.get(Role.ENCODER)
    if encoder is None or encoder.busy >= IDLE:
        return []
    total = sum(service.price.get(role, 0.0) * pods for role, pods in service.replicas.items())
    saved = service.price.get(Role.ENCODER, 0.0) * service.replicas.get(Role.ENCODER, 0)
    return [
        Lever(
            "encoder minReplicas: 0, with encodeInline",
            "cost",
            saved / total if total else 0.0,
            "price of the encoder pods / price of all pods",
            -saved,
            "the next role encodes while the pool is at zero",
            False,
        )
    ]


def visual_share(found: Profile, fit: StepFit) -> float:
    """Return the share of visual tokens in the KV that a step reads."""
    per_sequence = fit.kv_tokens / fit.sequences if fit.sequences else 0.0
    return min(1.0, found.visual_tokens / per_sequence) if per_sequence else 0.0


def report(found: Profile, service: Service) -> tuple[Section, ...]:
    """Return the sections of `vlm advise`."""
    chosen = levers(found, service)
    sections: list[Section] = [_phases(found)]
    if found.fit is not None:
        sections.append(_steps(found, found.fit))
    notes = [*_findings(found, service), *_best(chosen)]
    sections.append(NoteSection("findings", "Findings", notes))
    if chosen:
        sections.append(_levers(chosen))
    return tuple(sections)


def _phases(found: Profile) -> Section:
    rows: list[dict[str, Figure | str]] = []
    for role, one in found.roles.items():
        row: dict[str, Figure | str] = {
            "pool": str(role),
            "pods": Figure(one.num_pods, "pods", "pods that answered twice"),
        }
        for kind in ("encode", "prefill", "decode"):
            row[kind] = Figure(
                100 * one.shares.get(kind, 0.0), "%", "busy seconds / (seconds · pods)"
            )
        occupancy = one.kv_occupancy
        row["KV in use"] = (
            "-"
            if occupancy is None
            else Figure(100 * occupancy, "%", "(running + reserved) / capacity")
        )
        rows.append(row)
    return TableSection("phases", f"Time of pods by phase, {found.seconds:.0f} s", rows)


def _steps(found: Profile, fit: StepFit) -> Section:
    visual = found.visual_tokens
    rows: dict[str, Figure | str] = {
        "mean step": Figure(fit.seconds, "s", "busy seconds of decode / steps"),
        "KV tokens per step": Figure(round(fit.kv_tokens), "tokens", "KV tokens read / steps"),
        "base": Figure(fit.base, "s", "step of the fitted line without KV"),
        "slope per 1000 KV tokens": Figure(
            1000 * fit.slope, "s", f"least squares over {fit.num_points} intervals"
        ),
        "KV share of a step": Figure(
            100 * fit.slope * fit.kv_tokens / fit.seconds if fit.seconds else 0.0,
            "%",
            "slope · KV tokens / step",
        ),
        "visual tokens per request": Figure(round(visual), "tokens", "counters of the gateways"),
        "ITL per request's images": Figure(
            fit.slope * visual, "s", "slope · visual tokens: longer steps for every answer"
        ),
    }
    rows["explained"] = Figure(
        100 * fit.explained, "%", "R²: share of the variance of steps that the line explains"
    )
    if fit.growth is not None:
        rows["growth of the slope"] = Figure(
            fit.growth, "times", "slope of the upper half of KV tokens / slope of the lower half"
        )
    return FactSection("steps", "Steps of decode", rows)


def _findings(found: Profile, service: Service) -> list[str]:
    notes = []
    fit = found.fit
    if fit is None:
        notes.append("Too few steps of decode for a slope: send traffic, or raise --seconds.")
    elif fit.growth is None:
        notes.append("The load did not vary enough to see whether steps grow super-linearly.")
    elif fit.growth >= SUPER_LINEAR:
        notes.append(
            f"Steps grow super-linearly: the slope at high load is {fit.growth:.1f} times as large."
            " Bandwidth is contended."
        )
    else:
        notes.append("Steps do not grow faster than their KV tokens.")
    if fit is not None and fit.explained < UNCERTAIN:
        notes.append(
            f"KV tokens explain {fit.explained:.0%} of the variance of steps: the slope, and gains "
            "from it, are uncertain."
        )
    encoder = found.roles.get(Role.ENCODER)
    if encoder is not None and encoder.busy < IDLE:
        notes.append(f"Encoders are idle: busy for {encoder.busy:.0%} of the time.")
    if found.itl_p95 is not None and service.itl_goal is not None:
        word = "misses" if misses_itl(found, service) else "meets"
        notes.append(
            f"ITL p95 is at most {found.itl_p95 * 1000:.0f} ms and {word} the goal of "
            f"{service.itl_goal * 1000:.0f} ms."
        )
    if found.stages and found.ttft is not None and (total := sum(found.stages.values())) > 0:
        stage = max(found.stages, key=lambda name: found.stages[name])
        share = found.stages[stage] / total
        notes.append(f"Mean TTFT is {found.ttft * 1000:.0f} ms; {stage} has {share:.0%} of it.")
    if not found.requests:
        notes.append("No request reached a gateway in the window.")
    return notes


def _best(chosen: tuple[Lever, ...]) -> list[str]:
    if not chosen:
        return [f"No lever has a gain of {MIN_GAIN:.0%} or more."]
    best = chosen[0]
    cost = "" if best.price is None else f", for {best.price:.2f} per hour"
    return [f"The first lever is {best.name}: {best.gain:.0%} less {best.metric}{cost}."]


def _levers(chosen: tuple[Lever, ...]) -> Section:
    rows: list[dict[str, Figure | str]] = [
        {
            "lever": lever.name,
            "improves": lever.metric,
            "by": Figure(100 * lever.gain, "%", lever.formula),
            "cost": "-"
            if lever.price is None
            else Figure(lever.price, "per hour", "price of the pods"),
            "goal": "missed" if lever.is_goal_missed else "",
            "side effect": lever.side_effect,
        }
        for lever in chosen
    ]
    return TableSection("levers", "Levers, the largest gain first", rows)
