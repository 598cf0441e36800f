"""Quantities are exact."""

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_cli.definitions import structural
from vlm_operator.api import quantity
from vlm_operator.api.kinds import NodeCost

POWERS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


@settings(deadline=None)
@given(st.integers(0, 10**12), st.sampled_from(sorted(POWERS)))
def test_a_whole_number_times_its_unit(number: int, unit: str) -> None:
    assert quantity.parse(f"{number}{unit}") == number * POWERS[unit]


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_a_thousand_thousandths_are_one(number: int) -> None:
    assert quantity.parse(f"{number}m") * 1000 == number


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 30), st.sampled_from("eE"))
def test_an_exponent_is_a_unit(number: int, power: int, mark: str) -> None:
    assert quantity.parse(f"{number}{mark}{power}") == number * 10**power
    assert quantity.parse(f"{number}{mark}-{power}") * 10**power == number


def test_fractions_are_exact() -> None:
    assert quantity.parse("0.1") == Decimal("0.1")
    assert quantity.parse("1.5Gi") == 3 * 2**29


@pytest.mark.parametrize(
    "text", ["", "Gi", "1 Gi", "one", "1Gib", "inf", "nan", "--1", "1K", "1e", "1e3Ki", "1e999"]
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity.parse(text)


def test_an_example_of_a_quantity_with_a_fraction_is_in_quotes() -> None:
    """YAML reads it without quotes as a float, which the API server refuses."""
    found = structural(NodeCost)["properties"]["perHour"]["description"]
    assert found.endswith('E.g. "1.20".')
