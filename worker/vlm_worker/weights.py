"""The value of `--weights`: the types of a model's linear layers, by part.

    --weights=int8                          every part that the family may round
    --weights=encoder=int8,layers=int8      these parts, which the family must allow

    encoder   the vision tower, without what is `merger`
    merger    from the tower's width to the language model's: merger or projector
    layers    the layers of the language model
    head      its logits

`auto` is the type of the computation. A part that is not named is `auto`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, get_args

Part = Literal["encoder", "merger", "layers", "head"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)
AUTO: Final = "auto"
TYPES: Final = (AUTO, "int8", "int4")
SCALES_DIGITS: Final = 12
"""The first digits of the sha256 of a file of scales that a label has."""


def canonical(text: str) -> str:
    """The one way to write the value `text`: parts in the order of `PARTS`, without `auto`.

    Raises:
        ValueError: no type, or an unknown part or type, or a part twice; the message names it.
    """
    if "=" not in text:
        if text not in TYPES:
            raise ValueError(
                f"{text!r} must be {', '.join(TYPES[:-1])} or {TYPES[-1]}, or parts such as "
                "encoder=int8,layers=int8"
            )
        return text
    types: dict[str, str] = {}
    for item in text.split(","):
        part, _, kind = item.partition("=")
        if part not in PARTS:
            raise ValueError(f"{item!r}: the part must be one of {', '.join(PARTS)}")
        if kind not in TYPES:
            raise ValueError(f"{item!r}: the type must be one of {', '.join(TYPES)}")
        if part in types:
            raise ValueError(f"{item!r}: {part} is given twice")
        types[part] = kind
    rounded = [f"{part}={types[part]}" for part in PARTS if types.get(part, AUTO) != AUTO]
    return ",".join(rounded) or AUTO


def names_parts(text: str) -> bool:
    """Whether a value names parts, so that each of them must be rounded."""
    return "=" in text


def label(text: str, allowed: Collection[Part], *, dtype: str, scales_sha256: str = "") -> str:
    """What a worker publishes about its weights, at most 64 characters (`annotations.MAX_LABEL`).

    Equal for equal weights, however `text` names them: one type if all parts that may be rounded
    have it; if all four parts are named, the type of most of them, then the other parts.

    Args:
        text: a value of `--weights`.
        allowed: the parts that the family rounds.
        dtype: the type of the computation, which is the label of `auto`.
        scales_sha256: of the file of scales of int8 layers' inputs; empty without one.

    Raises:
        ValueError: as `canonical`.
    """
    scaled = f";activations={scales_sha256[:SCALES_DIGITS]}" if scales_sha256 else ""
    return _types_label(canonical(text), allowed, dtype) + scaled


def _types_label(chosen: str, allowed: Collection[Part], dtype: str) -> str:
    if chosen == AUTO:
        return dtype
    if not names_parts(chosen):
        return chosen
    types = dict(item.split("=") for item in chosen.split(","))
    kinds = list(types.values())
    most = max(TYPES, key=kinds.count)  # of two that are as many, the first of TYPES
    if len(types) == len(PARTS) or (len(set(kinds)) == 1 and types.keys() == set(allowed)):
        others = [f"{part}={kind}" for part, kind in types.items() if kind != most]
        return ",".join([most, *others])
    return chosen


def rounded_types(text: str, allowed: Collection[Part]) -> dict[Part, str]:
    """The types of the parts that are rounded, for a family that rounds the parts `allowed`.

    Raises:
        ValueError: as `canonical`, or `text` names a part that is not `allowed`.
    """
    chosen = canonical(text)
    if chosen == AUTO:
        return {}
    if not names_parts(chosen):
        return {part: chosen for part in PARTS if part in allowed}
    types = dict(item.split("=") for item in chosen.split(","))
    for part, kind in types.items():
        if part not in allowed:
            raise ValueError(
                f"this family rounds {', '.join(sorted(allowed))} alone; remove {part}={kind}"
            )
    return {part: types[part] for part in PARTS if part in types}
