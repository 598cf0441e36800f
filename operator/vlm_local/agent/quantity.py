"""Kubernetes quantities as numbers."""

import re
from decimal import Decimal
from math import ceil

_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(m|k|Ki|[MGTPE]i?|)"
)

_SUFFIXES = {"m": Decimal("0.001"), "": Decimal(1)}
_SUFFIXES |= {unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)}
_SUFFIXES |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)}


def parse(quantity: str | int) -> Decimal:
    """Return a quantity such as `250m`, `4` or `1.5Gi` as a number.

    Raises:
        ValueError: Not a quantity.
    """
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity")
    return Decimal(match[1]) * _SUFFIXES[match[2]]


def in_units(quantity: str | int, divisor: str | int) -> int:
    """Return how many divisors a quantity has, rounded up, as the downward API does."""
    return ceil(parse(quantity) / (parse(divisor) or Decimal(1)))
