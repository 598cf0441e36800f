"""`vlm-worker serve` answers a chat with an image of an unlisted family as `generate()` does."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from worker.checkpoints import SHAPES
from worker.unlisted_checkpoints import make_unlisted

from vlm_local.subprocesses import tied

SECONDS = 110.0
NUM_TOKENS = 12
QUESTION = "What color is it?"


def made(directory: Path) -> Path:
    """A tiny Qwen3-VL with tokenizer, template and ids of `shapes`."""
    shapes = json.loads((SHAPES / "config.json").read_text())
    ids = {name: value for name, value in shapes.items() if name.endswith("_token_id")}
    make_unlisted(directory, "qwen3_vl", vocab_size=704, **ids)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHAPES / name, directory)
    return directory


def body(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": QUESTION},
    ]
    return {
        "messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS,
        "temperature": 0, "ignore_eos": True, "logprobs": True,
    }  # fmt: skip


async def answer(model: Path, image: Image.Image) -> list[list[int]]:
    """The bytes of each token of the process's answer."""
    start = [
        sys.executable, "-m", "vlm_worker", "serve", str(model), "--port=0", "--dtype=float32",
        "--kv-memory-bytes=8388608", "--max-model-len=512",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*tied(start), stderr=PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as session:
            lines = []
            while " is served at " not in (line := (await process.stderr.readline()).decode()):
                lines.append(line)
                assert line, "".join(lines)
            name, address = line.split("vlm-worker: ")[1].split(" is served at ")
            asked = {"model": name, **body(image)}
            url = f"{address.split(';')[0]}/chat/completions"
            async with session.post(url, json=asked) as response:
                told = await response.json()
        assert response.status == 200, told
        return [token["bytes"] for token in told["choices"][0]["logprobs"]["content"]]
    finally:
        process.terminate()
        await process.wait()


@torch.inference_mode()
def reference(directory: Path, image: Image.Image) -> list[list[int]]:
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    inputs = Qwen2VLImageProcessorPil.from_pretrained(directory)(
        images=[image], return_tensors="pt"
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    at = token_ids.index(model.config.image_token_id)
    count = int(inputs["image_grid_thw"].prod()) // 4
    ids = torch.tensor([[*token_ids[:at], *[token_ids[at]] * count, *token_ids[at + 1 :]]])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
        mm_token_type_ids=(ids == token_ids[at]).int(), max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS, eos_token_id=1 << 20, pad_token_id=0, **inputs,
    )  # fmt: skip
    tokens = tokenizer.convert_ids_to_tokens(output[0, ids.shape[1] :])
    return [list(_bytes(token)) for token in tokens]


def _bytes(token: str) -> bytes:
    """Of a token of a byte-level tokenizer."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(alphabet[character] for character in token)


async def test_a_chat_with_an_image_is_answered_as_by_generate(tmp_path: Path) -> None:
    model = made(tmp_path / "qwen3_vl")
    noise = np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    assert await answer(model, image) == reference(model, image)
