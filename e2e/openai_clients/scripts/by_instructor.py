"""instructor: pydantic classes by each mode that OpenAI's API has."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from calls import IMAGE, MODEL, PARTS, URL, call
from pydantic import BaseModel

api = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
USER: Any = {"role": "user", "content": PARTS}


class Seen(BaseModel):
    color: Literal["red", "blue", "yellow"]
    count: Literal[0, 1, 2]


def _extract(mode: instructor.Mode, **changes: Any) -> None:
    client = instructor.from_openai(api, mode=mode)
    seen = client.create(
        model=MODEL, messages=[USER], response_model=Seen, max_retries=1, max_tokens=700, **changes
    )
    assert isinstance(seen, Seen)


@call("Mode.TOOLS")
def _tools() -> None:
    _extract(instructor.Mode.TOOLS)


@call("Mode.TOOLS_STRICT")
def _strict() -> None:
    _extract(instructor.Mode.TOOLS_STRICT)


@call("Mode.JSON_SCHEMA")
def _schema() -> None:
    _extract(instructor.Mode.JSON_SCHEMA)


@call("create_partial")
def _partial() -> None:
    client = instructor.from_openai(api, mode=instructor.Mode.TOOLS)
    parts = list(
        client.create_partial(model=MODEL, messages=[USER], response_model=Seen, max_tokens=700)
    )
    assert parts[-1].color in ("red", "blue", "yellow")


@call("Image.from_path")
def _image() -> None:
    client = instructor.from_openai(api, mode=instructor.Mode.TOOLS)
    seen = client.create(
        model=MODEL,
        messages=[{"role": "user", "content": ["What?", instructor.Image.from_path(IMAGE)]}],
        response_model=Seen,
        max_tokens=700,
    )
    assert isinstance(seen, Seen)
