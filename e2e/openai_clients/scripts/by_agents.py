"""OpenAI's agent SDK, over chat completions and over responses."""

from __future__ import annotations

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from calls import ANSWER, IMAGE_URL, MODEL, QUESTION, URL, call
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
INPUT: Any = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ],
    }
]
MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
noted: list[str] = []


class Seen(BaseModel):
    color: Literal["red", "blue", "yellow"]


@function_tool
def note(color: Literal["red", "blue"]) -> str:
    """Note a colour."""
    noted.append(color)
    return f"noted {color}"


def _run(kind: str, **changes: Any) -> Any:
    # A model belongs to one event loop, and `run_sync` makes one.
    model = MODELS[kind](model=MODEL, openai_client=AsyncOpenAI(base_url=URL, api_key="none"))
    settings = changes.pop("settings", ModelSettings(temperature=0, max_tokens=700))
    agent = Agent(name="viewer", model=model, model_settings=settings, **changes)
    return Runner.run_sync(agent, INPUT, max_turns=3).final_output


for kind in MODELS:

    @call(f"Runner.run_sync, an image, by {kind}")
    def _plain(kind: str = kind) -> None:
        assert _run(kind) == ANSWER

    @call(f"output_type, by {kind}")
    def _typed(kind: str = kind) -> None:
        assert isinstance(_run(kind, output_type=Seen), Seen)

    @call(f"a function tool and the turn behind it, by {kind}")
    def _tool(kind: str = kind) -> None:
        noted.clear()
        settings = ModelSettings(tool_choice="required", max_tokens=700, temperature=0)
        _run(kind, tools=[note], settings=settings)
        assert noted
