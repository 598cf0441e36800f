"""A chat about an image is answered as transformers answers the same messages."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from worker.checkpoints import make_checkpoint
from worker.identity.reference import load_reference
from worker.serve.test_serve import served

TEXT = "what is this color"
NUM_TOKENS = 16


@torch.inference_mode()
def theirs(model_dir: Path, image: Image.Image) -> tuple[str, int]:
    """The answer, and how many tokens the prompt has."""
    processor = AutoProcessor.from_pretrained(model_dir)
    content = [{"type": "image", "image": image}, {"type": "text", "text": TEXT}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    out = load_reference(model_dir).generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS)
    num_prompt = inputs["input_ids"].shape[1]
    return processor.decode(out[0, num_prompt:], skip_special_tokens=True), num_prompt


@pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        pytest.param("gemma3", (), id="gemma3"),
        pytest.param("gemma3", ("--split",), id="gemma3, split", marks=pytest.mark.full),
        pytest.param("llava", (), id="llava", marks=pytest.mark.full),
        pytest.param("llava", ("--split",), id="llava, split", marks=pytest.mark.full),
    ],
)
async def test_a_chat_about_an_image_is_answered_as_by_transformers(
    tmp_path: Path, model_type: str, flags: tuple[str, ...]
) -> None:
    model_dir = make_checkpoint(tmp_path / model_type, model_type)
    pixels = np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, "PNG")
    data = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    wanted, num_prompt = theirs(model_dir, image)
    async with (
        served("--dtype=float32", *flags, model=model_dir) as (_, url, _),
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(
            model="shapes", temperature=0, max_tokens=NUM_TOKENS,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": data}},
                        {"type": "text", "text": TEXT},
                    ],
                }
            ],
        )  # fmt: skip
    assert answer.choices[0].message.content == wanted
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_prompt
