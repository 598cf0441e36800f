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
