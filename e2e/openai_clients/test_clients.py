"""Clients that nobody here wrote work unmodified; those that need an installation run in full."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai_clients.clients import CLIENTS
from openai_clients.run import END, HEADER, START, Call, Server, calls_of, row, served, with_rows
from pinned import UnavailableError

INSTALLED = [name for name, client in CLIENTS.items() if not client.pins]
OTHERS = [
    pytest.param(name, marks=[pytest.mark.full, pytest.mark.timeout(1800)])
    for name in CLIENTS
    if name not in INSTALLED
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as started:
        yield started


@pytest.mark.parametrize("name", [*INSTALLED, *OTHERS])
def test_each_call_of_a_client_does_what_the_client_promises(name: str, server: Server) -> None:
    try:
        calls = calls_of(name, server)
    except UnavailableError as error:
        pytest.skip(str(error))
    assert [call for call in calls if call.error is not None] == []


def test_a_table_keeps_the_rows_of_clients_that_did_not_run() -> None:
    first, second, third = list(CLIENTS)[:3]
    kept = [f"| {name} | 0.1 | a call; **fails: another** |" for name in (first, third)]
    page = "\n".join(["text", START, "", *HEADER, *kept, "", END, "text", ""])

    new = row(second, [Call("create", None), Call("parse", "it raised")])
    table = [*HEADER, kept[0], new, kept[1]]
    assert with_rows(page, {second: new}) == "\n".join(
        ["text", START, "", *table, "", END, "text", ""]
    )
    assert new.endswith("| create; **fails: parse** |")

    rerun = row(first, [Call("create", None)])
    rows = with_rows(page, {first: rerun}).split("\n")
    assert rerun in rows
    assert kept[0] not in rows
    assert kept[1] in rows


def test_a_table_drops_the_rows_of_clients_that_are_no_more() -> None:
    page = f"{START}\n\n| abandoned | 1.0 | create |\n\n{END}"
    assert "abandoned" not in with_rows(page, {})
