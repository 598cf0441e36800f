"""A request with as many images as a service may allow, through real workers."""

from __future__ import annotations

import base64
import io
import random
import textwrap
from typing import Any

import openai
import pytest
from PIL import Image
from worker.gateway.image_files import data_url, png
from worker.gateway.stack import E_PD, ONE_PROCESS, client, stack, stack_of

from vlm_worker.annotations import MAX_ITEMS
from vlm_worker.gateway.body import MIN_DATA_URL_BYTES


def body(*urls: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": "What are these?"})
    messages = [{"role": "user", "content": parts}]
    return {"model": "shapes", "messages": messages, "max_tokens": 8, "temperature": 0}


def small(number: int) -> str:
    return data_url(png((number, 2 * number, 90), size=(28, 28)))


@pytest.mark.parametrize("topology", ["E-P-D", ONE_PROCESS])
async def test_a_request_may_have_64_images_where_the_service_allows_them(topology: str) -> None:
    urls = [small(number) for number in range(MAX_ITEMS)]
    async with (
        stack_of(topology, images_per_request=MAX_ITEMS) as served,
        client(served) as api,
    ):
        answer = await api.chat.completions.create(**body(*urls))
        turned = await api.chat.completions.create(**body(*urls[::-1]))
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(**body(*urls, small(99)))
        await served.until_idle()
        num_encoded = sum(sum(worker.runner.batch_sizes) for worker in served.workers)
    assert answer.usage.prompt_tokens_details.image_tokens >= MAX_ITEMS
    assert answer.choices[0].message.content != turned.choices[0].message.content
    assert num_encoded == MAX_ITEMS, "each once"
    assert refused.value.code == "too_many_images"


async def test_the_context_bounds_64_images_with_the_numbers() -> None:
    urls = [data_url(png(size=(448, 448)))] * MAX_ITEMS
    async with stack(*E_PD, images_per_request=MAX_ITEMS) as served, client(served) as api:
        with pytest.raises(openai.BadRequestError, match="of images") as refused:
            await api.chat.completions.create(**body(*urls))
    assert refused.value.code == "context_length_exceeded"


async def test_a_wrapped_and_url_safe_image_is_the_same_image() -> None:
    pixels = random.Random(1).randbytes(112 * 112 * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (112, 112), pixels).save(file, "PNG")
    safe = base64.urlsafe_b64encode(file.getvalue()).decode().rstrip("=")
    wrapped = "data:image/png;base64," + "\r\n".join(textwrap.wrap(safe, 76))
    assert len(wrapped) > MIN_DATA_URL_BYTES
    async with stack(*E_PD) as served, client(served) as api:
        plain = await api.chat.completions.create(**body(data_url(file.getvalue())))
        same = await api.chat.completions.create(**body(wrapped))
        await served.until_idle()
        num_encoded = sum(sum(worker.runner.batch_sizes) for worker in served.workers)
    assert same.choices[0].message.content == plain.choices[0].message.content
    assert num_encoded == 1
