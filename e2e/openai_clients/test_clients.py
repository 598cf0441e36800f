"""Clients that nobody here wrote work unmodified; those that need an installation run in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_clients.clients import CLIENTS
from openai_clients.run import calls_of, served
from pinned import UnavailableError

INSTALLED = [name for name, client in CLIENTS.items() if not client.pins]
OTHERS = [
    pytest.param(name, marks=[pytest.mark.full, pytest.mark.timeout(1800)])
    for name in CLIENTS
    if name not in INSTALLED
]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Path]]:
    with served() as started:
        yield started


@pytest.mark.parametrize("name", [*INSTALLED, *OTHERS])
def test_each_call_of_a_client_does_what_the_client_promises(
    name: str, server: tuple[str, Path]
) -> None:
    url, model = server
    try:
        calls = calls_of(name, url, model)
    except UnavailableError as error:
        pytest.skip(str(error))
    assert [call for call in calls if call.error is not None] == []
