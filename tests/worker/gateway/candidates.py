"""Pods of a service and requests, as values for the choice of a route."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from vlm_worker.route import Candidate, Demand, NoRoute, Route
from vlm_worker.types import Role, Stage

E, P, D = Stage.ENCODER, Stage.PREFILL, Stage.DECODE
TEXT = Demand(num_tokens=100, image_digest=b"", prefix_digest=b"prefix")
IMAGE = dataclasses.replace(TEXT, image_digest=b"image")


def pod(
    name: str, role: Role, stages: Iterable[Stage] | None = None, **changes: object
) -> Candidate:
    stages = frozenset(stages or {Stage(role.value)})
    kv = bool(stages & {P, D})
    made = Candidate(
        name=name,
        address=f"{name}:9000",
        role=role,
        stages=stages,
        boot_id=name.encode(),
        layout_fingerprint=b"kv" if kv else b"",
        embed_fingerprint=b"embed",
        kv_capacity_tokens=1000 if kv else 0,
        max_model_len_tokens=4096 if kv else 0,
        kv_free_tokens=1000 if kv else 0,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def encoder(name: str = "e", **changes: object) -> Candidate:
    return pod(name, Role.ENCODER, **changes)  # type: ignore[arg-type]


def prefill(name: str = "p", stages: Iterable[Stage] = (P,), **changes: object) -> Candidate:
    return pod(name, Role.PREFILL, stages, **changes)


def decode(name: str = "d", stages: Iterable[Stage] = (D,), **changes: object) -> Candidate:
    return pod(name, Role.DECODE, stages, **changes)


def names(route: Route | NoRoute) -> tuple[str | None, ...]:
    assert isinstance(route, Route), route
    choices = (route.encoder, route.prefill, route.decode)
    return tuple(choice and choice.pod.name for choice in choices)
