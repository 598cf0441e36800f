"""A model with random weights, where a wrong KV entry cannot hide behind a confident answer.

The directory can be served like `shapes`: same sizes, tokenizer and processor, other weights. The
head is scaled until logits have a standard deviation of at least 3.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from worker.identity.questions import SHAPES, Question, questions
from worker.identity.reference import Answer, answer, load_reference

NUM_TOKENS = 64
MIN_LOGITS_STD = 3.0


def make_random_model(directory: Path, *, seed: int = 0) -> Path:
    """Write such a model into a new directory."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

    shutil.copytree(SHAPES, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    fields = json.loads((SHAPES / "config.json").read_text())
    fields["tie_word_embeddings"] = fields["text_config"]["tie_word_embeddings"] = False
    fields["dtype"] = "float32"
    config = modeling.Qwen2_5_VLConfig.from_dict(fields)
    model = modeling.Qwen2_5_VLForConditionalGeneration(config).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim >= 2:
                weights.normal_(0, 1.5 * weights[0].numel() ** -0.5, generator=rng)
            elif "norm" not in name and "ln_q" not in name:
                weights.normal_(0, 0.1, generator=rng)
        model.model.language_model.embed_tokens.weight.normal_(0, 1, generator=rng)
        ids = torch.randint(10, 600, (1, 64), generator=rng)
        model.lm_head.weight.mul_(1.2 * MIN_LOGITS_STD / model(input_ids=ids).logits.std())
    model.save_pretrained(directory)
    return directory


def random_reference(directory: Path, count: int) -> tuple[tuple[Question, Answer], ...]:
    """The first `count` questions with 64-token answers of transformers."""
    model = load_reference(directory)
    return tuple(
        (question, answer(model, question, max_tokens=NUM_TOKENS, ignore_eos=True))
        for question in questions()[:count]
    )
