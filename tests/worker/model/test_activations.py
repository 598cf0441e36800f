"""What computing takes follows from the shapes of every family, and grows with the work."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from worker.processes.workers import MODEL

from vlm_worker.core.families import load_family
from vlm_worker.model.memory import encode_bytes, step_bytes

FAMILY = load_family(MODEL)
CONFIGS = (
    transformers.Qwen2VLConfig,
    transformers.Qwen2_5_VLConfig,
    transformers.Gemma3Config,
    transformers.LlavaConfig,
)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_takes_more_for_more_tokens_and_for_more_logits(kind: Any) -> None:
    text = kind().get_text_config()

    def taken(num_tokens: int, num_rows: int) -> int:
        return step_bytes(text, num_tokens=num_tokens, num_rows=num_rows, element_bytes=2)

    assert taken(0, 1) >= text.vocab_size * 10
    assert taken(2048, 1) - taken(1024, 1) >= 1024 * 2 * (text.hidden_size + text.intermediate_size)
    assert taken(1024, 256) > taken(1024, 1)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_call_of_the_encoder_has_memory_for_its_patches_and_for_the_largest_image(
    kind: Any,
) -> None:
    vision = kind().vision_config
    largest = FAMILY.geometry(1 << 14, 1 << 14)

    def taken(num_tokens: int) -> int:
        return encode_bytes(vision, FAMILY, num_tokens=num_tokens, element_bytes=2)

    patches = 4 * 4 * FAMILY.processor.patch_dim
    assert taken(1) == taken(largest.num_tokens) >= largest.num_tokens * patches
    assert taken(2048) >= 2048 * patches
