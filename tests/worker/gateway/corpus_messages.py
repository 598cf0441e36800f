"""Bad messages: what stands in them, and who says it."""

from __future__ import annotations

from worker.gateway.corpus import Bad, chat, content, message
from worker.gateway.image_files import ask, png

PARTS = [{"type": "text", "text": "x"}] * 2000

MESSAGE_ROWS = [
    Bad(
        "no role",
        chat(messages=[{"content": "x"}]),
        400,
        "missing_required_parameter",
        "messages[0].role",
    ),
    Bad("an unknown role", content("x", role="god"), 400, "invalid_value", "messages[0].role"),
    Bad(
        "a tool's answer to no call",
        content("x", role="tool"),
        400,
        "missing_required_parameter",
        "messages[0].tool_call_id",
    ),
    Bad(
        "a function's answer",
        content("x", role="function"),
        400,
        "unsupported_parameter",
        "messages[0].role",
    ),
    Bad(
        "no content",
        chat(messages=[{"role": "user"}]),
        400,
        "missing_required_parameter",
        "messages[0].content",
    ),
    Bad("content as a number", content(5), 400, "invalid_type", "messages[0].content"),
    Bad("no parts", content([]), 400, "invalid_value", "messages[0].content"),
    Bad("2000 parts", content(PARTS), 400, "invalid_value", "messages[0].content"),
    Bad(
        "1200 parts of three messages",
        chat(messages=[{"role": "user", "content": PARTS[:400]}] * 3),
        400,
        "invalid_value",
        "messages[2].content",
    ),
    Bad("20 000 parts", content(PARTS * 10), 400, "invalid_json"),
    Bad(
        "a long data URL in another place",
        chat(metadata={"url": "data:image/png;base64," + "A" * 5000}),
        400,
        "invalid_value",
    ),
    Bad(
        "a message with a long name",
        message(name="b" * 65),
        400,
        "invalid_value",
        "messages[0].name",
    ),
    Bad("a message with an empty name", message(name=""), 400, "invalid_value", "messages[0].name"),
    Bad("a name that is a number", message(name=5), 400, "invalid_type", "messages[0].name"),
    Bad(
        "tool calls",
        message(tool_calls=[{}]),
        400,
        "invalid_value",
        "messages[0].tool_calls",
    ),
    Bad("an unknown field in a message", message(x=1), 400, "unknown_parameter", "messages[0].x"),
    Bad("a part as text", content(["x"]), 400, "invalid_type", "messages[0].content[0]"),
    Bad(
        "a part without a type",
        content([{"text": "x"}]),
        400,
        "missing_required_parameter",
        "messages[0].content[0].type",
    ),
    Bad(
        "an unknown part",
        content([{"type": "smell"}]),
        400,
        "invalid_value",
        "messages[0].content[0].type",
    ),
    Bad(
        "sound",
        content([{"type": "input_audio"}]),
        400,
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    Bad(
        "a video",
        content([{"type": "video_url"}]),
        400,
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    Bad(
        "a text part without text",
        content([{"type": "text"}]),
        400,
        "missing_required_parameter",
        "messages[0].content[0].text",
    ),
    Bad(
        "a text part with more",
        content([{"type": "text", "text": "x", "y": 1}]),
        400,
        "unknown_parameter",
        "messages[0].content[0].y",
    ),
    Bad(
        "an image in a system message",
        chat(messages=[ask(png(), role="system")]),
        400,
        "invalid_value",
        "messages[0].content[0]",
    ),
    Bad(
        "five images",
        chat(messages=[ask(*[png()] * 5)]),
        400,
        "too_many_images",
        "messages[0].content[4].image_url",
    ),
]
