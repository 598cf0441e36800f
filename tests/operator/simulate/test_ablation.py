"""Every row of the ablation replaces something that exists, and is undone at its end."""

import importlib

import pytest
from autoscaler.ablate import ROWS, Row, changed, compare, play, replaced

from vlm_cli.simulator.scenario import standard


def attribute(path: str) -> object:
    module, _, name = path.partition(":")
    found: object = importlib.import_module(f"vlm_operator.autoscale.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_a_row_changes_the_policy_or_a_function_and_restores_it(name):
    row = ROWS[name]
    before = {path: attribute(path) for path in row.functions}
    with replaced(row.functions):
        assert all(attribute(path) is not found for path, found in before.items())
    assert {path: attribute(path) for path in row.functions} == before
    setup = standard()
    assert bool(row.functions) or changed(setup, row) != setup


@pytest.mark.timeout(120)
def test_the_full_policy_gives_the_same_result_twice():
    assert play(Row(""), ["steady"], 1) == play(Row(""), ["steady"], 1)


def test_a_mechanism_pays_if_a_metric_is_worse_without_it_on_every_seed():
    ours = [{"missed": 50, "hours": 60.0, "changes": 100}] * 2
    worse = [{"missed": 60, "hours": 60.0, "changes": 100}] * 2
    mixed = [{"missed": 60, "hours": 50.0, "changes": 100}] * 2
    noisy = [ours[0] | {"missed": 70}, ours[0] | {"missed": 40}]
    verdicts = [compare(ours, found)["verdict"] for found in (ours, worse, mixed, noisy)]
    assert verdicts == ["does not pay", "pays", "trades", "does not pay"]
