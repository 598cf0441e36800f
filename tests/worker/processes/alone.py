"""What the arithmetic model answers to a prompt, without any engine, process or wire."""

from __future__ import annotations

from worker.answers import answer_alone
from worker.processes.driver import Driver, Prompt

from vlm_worker.media.image_header import read_header
from vlm_worker.media.patches import image_key, make_patches
from vlm_worker.media.pixels import decode_rgb
from vlm_worker.types import ImageItem, PreparedImage, Request, RequestKey, SamplingParams


def expected(driver: Driver, prompt: Prompt) -> list[int]:
    images = [_prepared(driver, data) for data in prompt.images]
    tokens, offsets = driver.family.expand(prompt.token_ids, [i.num_tokens for i in images])
    items = tuple(
        ImageItem(image.image_key, offset, image.num_tokens, image.grid_thw)
        for image, offset in zip(images, offsets, strict=True)
    )
    sampling = SamplingParams(max_tokens=prompt.max_tokens)
    request = Request(RequestKey("alone", 1), tuple(tokens), len(tokens), sampling, items)
    return answer_alone(request, images)


def _prepared(driver: Driver, data: bytes) -> PreparedImage:
    header = read_header(data, item=0)
    processor = driver.family.processor
    geometry = driver.family.geometry(header.height, header.width)
    rgb = decode_rgb(data, header)
    key = image_key(rgb, processor, model_revision="checksum", salt=bytes(32))
    patches = make_patches(rgb, processor, geometry)
    return PreparedImage(key, geometry.grid_thw, geometry.num_tokens, memoryview(patches))
