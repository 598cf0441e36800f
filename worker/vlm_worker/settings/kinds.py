"""The kinds of values of a worker's and gateway's options: how each is written on a command line.

A `read` raises ArgumentTypeError, whose text says what to write.
"""

from __future__ import annotations

import argparse
from typing import Final

from vlm_worker.settings.options import MAX_PORT, Kind, number
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.types import STAGES, Stage
from vlm_worker.weights import PARTS, Part, canonical

MAX_IMAGES: Final = 64
"""Maximum images of a request: as many as a worker accepts in one call."""
DELAYS: Final = (*STAGES, "kv_transfer")


def _stages(text: str) -> frozenset[Stage]:
    try:
        return frozenset(Stage(part) for part in text.split(","))
    except ValueError:
        known = ",".join(stage.value for stage in Stage)
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a comma-separated choice of {known}"
        ) from None


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} must read HOST:PORT")
    return text


def _delay(text: str) -> tuple[str, float]:
    stage, _, milliseconds = text.partition("=")
    if stage not in DELAYS or not milliseconds.isdecimal() or int(milliseconds) > 60_000:
        raise argparse.ArgumentTypeError(
            f"{text!r} must read STAGE=MS with MS up to 60000 and STAGE one of {', '.join(DELAYS)}"
        )
    return stage, int(milliseconds) / 1000


_SCALE: Final = number(float, 0.01, 1.0, "a factor from 0.01 to 1")


def _weights(text: str) -> str:
    try:
        return canonical(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parts(text: str) -> tuple[Part, ...]:
    found = tuple(part for part in PARTS if part in text.split(","))
    if sorted(found) != sorted(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} must name some of {', '.join(PARTS)}, once")
    return found


def _sha256(text: str) -> str:
    if not text:  # as `to_argv` writes what is not set
        return text
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} must be 64 hexadecimal digits in lower case")
    return text


SCALED_TIMERS: Final = Kind(
    lambda text: PRODUCTION.scaled(_SCALE.read(text)), lambda timers: repr(timers.scale)
)
STAGE_LIST: Final = Kind(_stages, lambda stages: ",".join(sorted(stage.value for stage in stages)))
IMAGES: Final = number(int, 0, MAX_IMAGES, f"a whole number, 0 to {MAX_IMAGES}")
ADDRESSES: Final = Kind(_address, collect=tuple)
WEIGHTS: Final = Kind(_weights)
PART_LIST: Final = Kind(_parts, ",".join)
SHA256: Final = Kind(_sha256)
DELAY_BY_STAGE: Final = Kind(
    _delay, lambda item: f"{item[0]}={round(1000 * item[1])}", collect=dict
)
