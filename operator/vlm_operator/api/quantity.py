"""Converts Kubernetes quantities to exact numbers: 40Gi is 42949672960, 250m 0.25, 1e3 1000."""

from __future__ import annotations

import re
from decimal import Decimal

_BINARY = {
    unit: Decimal(1024) ** power
    for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)
}
_DECIMAL = {
    "n": Decimal(10) ** -9,
    "u": Decimal(10) ** -6,
    "m": Decimal(10) ** -3,
    **{
        unit: Decimal(1000) ** power for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)
    },
}


def parse(text: str) -> Decimal:
    """Return the exact value of a quantity.

    Raises:
        ValueError: the text is not a quantity.
    """
    for factors in (_BINARY, _DECIMAL):
        for unit, factor in factors.items():
            if text.endswith(unit):
                return _number(text, text.removesuffix(unit)) * factor
    # an exponent takes the place of a unit, so both together are invalid
    digits, mark, power = text.replace("E", "e").partition("e")
    if mark and re.fullmatch(r"[-+]?[0-9]{1,2}", power):
        return _number(text, digits) * Decimal(10) ** int(power)
    return _number(text, text)


def _number(text: str, digits: str) -> Decimal:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", digits):
        raise ValueError(
            f"{text!r} is no quantity: write a number with an optional unit, as 40Gi or 250m"
        )
    return Decimal(digits)
