"""Drawn specs, asked of a real API server and of `parse`: their types refuse the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from support.specs import broken, drawn
from support.world import body
from vlm_local.client import ApiError
from vlm_local.controlplane import ControlPlane
from vlm_operator.api import parse
from vlm_operator.errors import SpecError

pytestmark = pytest.mark.cluster

SERVICES = "/apis/triptych.dev/v1alpha1/namespaces/default/vlmservices"
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
some = settings(max_examples=40, deadline=None, suppress_health_check=SLOW)


@pytest.fixture(scope="module")
def refusal(api_server: ControlPlane) -> Iterator[Callable[[dict[str, Any]], str]]:
    """What the API server says against a spec; "" where it takes it."""
    with asyncio.Runner() as runner:
        client = runner.run(api_server.client().__aenter__())

        async def ask(spec: dict[str, Any]) -> str:
            manifest = {**body(), "metadata": {"name": "drawn"}, "spec": spec}
            params = {"dryRun": "All", "fieldValidation": "Strict"}
            try:
                await client.request("POST", SERVICES, body=manifest, params=params)
            except ApiError as error:
                if error.status in (400, 422):
                    return str(error)
                raise
            return ""

        yield lambda spec: runner.run(ask(spec))
        runner.run(client.__aexit__())


def unread(spec: dict[str, Any]) -> str:
    """What `parse` says against a spec; "" where it reads it."""
    meta = {"name": "drawn", "namespace": "default", "uid": "u", "generation": 1}
    try:
        parse({"metadata": meta, "spec": spec})
    except SpecError as error:
        return str(error)
    return ""


@given(spec=drawn(right=True))
@some
def test_what_keeps_the_rules_is_taken_by_both(
    refusal: Callable[[dict[str, Any]], str], spec: dict[str, Any]
) -> None:
    assert refusal(spec) == ""
    assert unread(spec) == ""


@given(found=broken())
@some
def test_one_wrong_value_is_refused_by_both(
    refusal: Callable[[dict[str, Any]], str], found: tuple[dict[str, Any], str]
) -> None:
    spec, path = found
    assert refusal(spec), path
    assert unread(spec).startswith("spec"), path


@given(spec=drawn(right=False))
@some
def test_what_the_api_server_takes_is_read(
    refusal: Callable[[dict[str, Any]], str], spec: dict[str, Any]
) -> None:
    assert refusal(spec) or not unread(spec)
