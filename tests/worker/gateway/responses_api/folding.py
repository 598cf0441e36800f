"""Reads the events of a stream as a client does, without the code that writes them."""

from __future__ import annotations

import copy
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FINAL = ("response.completed", "response.incomplete", "response.failed")
# What two answers to the same request differ in.
_OWN = {"id", "item_id", "call_id", "created_at", "completed_at", "timing"}


def valid(event: dict[str, Any]) -> dict[str, Any]:
    """Check an event against the client's types; return it."""
    parsed = EVENT.validate_python(event)
    assert parsed.type == event["type"]
    assert type(parsed).__name__.startswith("Response")
    if "response" in event:
        valid_response(event["response"])
    return event


def valid_response(response: dict[str, Any]) -> None:
    """Check that a response has every field of the client's type, but those of features that are
    refused."""
    Response.model_validate(response)
    refused = {
        "access_programs", "conversation", "image", "input_transformations", "moderation",
        "prompt", "prompt_cache_diagnostics", "prompt_cache_options", "prompt_cache_retention",
        "tool_usage",
    }  # fmt: skip
    assert set(Response.model_fields) - refused <= set(response)


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up the output of a stream from its deltas alone; check that its events are in order."""
    items: list[dict[str, Any]] = []
    is_open, has_part = False, False
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open
            assert event["output_index"] == len(items)
            items.append(copy.deepcopy(event["item"]))
            assert items[-1]["status"] == "in_progress"
            is_open, has_part = True, False
            continue
        assert is_open, kind
        item = items[-1]
        assert event["output_index"] == len(items) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            assert (item["content"], event["content_index"]) == ([], 0)
            item["content"].append(copy.deepcopy(event["part"]))
            has_part = True
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            assert has_part
            item["content"][0]["text"] += event["delta"]
            if kind == "output_text.delta":
                item["content"][0]["logprobs"] += event["logprobs"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item["content"][0]["text"] == event["text"]
            assert item["content"][0].get("logprobs") == event.get("logprobs")
        elif kind == "content_part.done":
            assert item["content"][0] == event["part"]
            has_part = False
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        else:
            assert kind == "output_item.done"
            item["status"] = event["item"]["status"]
            assert item == event["item"]
            is_open = False
    assert not is_open
    return items


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response of a stream, whose events are checked."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *rest, last = map(valid, events)
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert last["type"] in FINAL
    response: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert response["id"] == created["response"]["id"]
    assert response["output"] == folded(rest)
    return response


def told(value: Any) -> Any:
    """A response without what is its own: ids and times."""
    if isinstance(value, dict):
        return {name: told(one) for name, one in value.items() if name not in _OWN}
    return [told(one) for one in value] if isinstance(value, list) else value
