"""Embeddings in place of images, as clients send them."""

from __future__ import annotations

import base64
from typing import Any

from worker.gateway.stack import MODEL, Stack, Worker
from worker.tensor_files import tensor_file

from vlm_worker.core.families import load_family
from vlm_worker.types import EmbedLayout, Stage

FAMILY = load_family(MODEL)
LAYOUT = EmbedLayout("revision", hidden_size=4, num_levels=0, dtype="bfloat16")
GRID = FAMILY.geometry(84, 112).grid_thw
NUM_TOKENS = FAMILY.geometry(84, 112).num_tokens
ROWS = b"\x80\x3f" * (4 * NUM_TOKENS)  # ones


def file_of(rows: bytes = ROWS, layout: EmbedLayout = LAYOUT, **changes: Any) -> bytes:
    """The rows of an image of 112 x 84 pixels."""
    shape = (NUM_TOKENS, layout.row_elements)
    return tensor_file(rows, layout.dtype, changes.pop("shape", shape), **changes)


def text(file: bytes) -> str:
    return base64.b64encode(file).decode()


def part(file: bytes | str, grid: Any = GRID, **fields: Any) -> dict[str, Any]:
    """A part with an object; without a grid, it has the base64 alone."""
    data = file if isinstance(file, str) else text(file)
    value = data if grid is None else {"data": data, "grid_thw": list(grid)}
    return {"type": "image_embeds", "image_embeds": value, **fields}


def ask_of(one: dict[str, Any], question: str) -> dict[str, Any]:
    """A message of one part and a question."""
    return {"role": "user", "content": [one, {"type": "text", "text": question}]}


def encoder(served: Stack) -> Worker:
    """The one worker with the stage encoder."""
    found = [one for one in served.workers if Stage.ENCODER in one.server.settings.stages]
    assert len(found) == 1
    return found[0]


def encoded_rows(worker: Worker) -> bytes:
    """The rows of the one embedding in a worker's cache. Call it while the engine is idle."""
    requests = worker.components.engine._thread.state.encode_requests
    (entry,) = requests.cache._listed.values()
    return bytes(requests.copies.export_embedding(entry.buffer))
