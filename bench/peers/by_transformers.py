"""transformers' `generate()`: one static batch, padded left, as long as the longest answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import serving
import torch
import transformers
from PIL import Image

MODEL_DIR = sys.argv[1]
PAD = "<|image_pad|>"


def main() -> None:
    """Load, then serve."""
    torch.set_grad_enabled(mode=False)
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(
        MODEL_DIR, dtype=torch.bfloat16
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR, padding_side="left")
    processor = transformers.AutoImageProcessor.from_pretrained(MODEL_DIR)
    pad_id = tokenizer.convert_tokens_to_ids(PAD)

    def run(calls: Sequence[dict[str, Any]]) -> int:
        images = [Image.open(call["image"]) for call in calls if call["image"]]
        seen: dict[str, Any] = {}
        counts = iter(())
        if images:
            seen = dict(processor(images=images, return_tensors="pt"))
            seen["pixel_values"] = seen["pixel_values"].to(torch.bfloat16)
            counts = iter((seen["image_grid_thw"].prod(-1) // 4).tolist())
        texts = [
            serving.prompt(call).replace(PAD, PAD * next(counts)) if call["image"]
            else serving.prompt(call)
            for call in calls
        ]  # fmt: skip
        inputs = {**tokenizer(texts, return_tensors="pt", padding=True), **seen}
        if images:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == pad_id).int()
        longest = max(call["num_output"] for call in calls)
        model.generate(**inputs, max_new_tokens=longest, min_new_tokens=longest, do_sample=False)
        return sum(call["num_output"] for call in calls)

    serving.serve(run)


if __name__ == "__main__":
    main()
