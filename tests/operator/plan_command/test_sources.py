"""The worked examples of the texts that `vlm plan` is built from, as tests; notes where they err.

The texts count memory in two ways: the concurrency quiz in 10⁹ bytes, the transfer example in 2²⁰
bytes although it writes "MB".
"""

from pathlib import Path
from typing import Any

import pytest

from plan_command.models import (
    GEMMA3_4B,
    LLAVA_7B,
    QWEN2_VISION,
    QWEN_7B,
    facts,
    qwen_7b,
    with_text,
)
from vlm_cli.plan import capacity
from vlm_cli.plan.facts import ModelFacts
from vlm_cli.plan.model import read_model
from vlm_operator.names import Role

GB = 10**9
MIB = 2**20
GIB = 2**30
WHOLE = tuple(Role)[:3]


@pytest.fixture
def llava(tmp_path: Path) -> ModelFacts:
    return facts(tmp_path / "llava", LLAVA_7B)


@pytest.fixture
def layers_80(tmp_path: Path) -> ModelFacts:
    """A decoder of 80 layers, 8 KV heads of 128: the language model of 70 B and 90 B models."""
    shape = qwen_7b(
        num_hidden_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
    )
    return facts(tmp_path / "large", shape)


def test_305_text_requests_fit_into_50_gb(layers_80: ModelFacts):
    """The quiz: 500 tokens · 80 layers · 4096 B = 164 MB; 50 GB / 164 MB = 305.

    Three notes. The weights are on three GPUs, and so is the KV: the whole budget is 150 GB. Eight
    KV heads do not divide by three. A cache of whole blocks of 16 tokens holds 297.
    """
    token_bytes = capacity.kv_token_bytes(layers_80, "bfloat16")
    assert token_bytes == 80 * 4096
    assert 500 * token_bytes == pytest.approx(164e6, rel=1e-2)
    assert 50 * GB // (500 * token_bytes) == 305
    assert 8 % 3
    assert 3 * 50 * GB // (500 * token_bytes) == 915
    fits = capacity.concurrency(50 * GB, 500, token_bytes=token_bytes, block_size=16)
    assert fits == 297


def test_141_image_requests_fit_where_the_quiz_rounds_up_to_142(layers_80: ModelFacts):
    """The quiz: 1076 tokens are 352 MB, 50 GB / 352 MB = 142.

    Two notes. The quotient is 141.8, so 141 requests fit. Llama 3.2 Vision 90B, which the quiz
    names, has 80 self-attention and 20 cross-attention layers: its images are not in this KV.
    """
    token_bytes = capacity.kv_token_bytes(layers_80, "bfloat16")
    assert 1076 * token_bytes == pytest.approx(352e6, rel=5e-3)
    assert 50 * GB / (1076 * token_bytes) == pytest.approx(141.8, abs=0.05)
    assert capacity.concurrency(50 * GB, 1076, token_bytes=token_bytes, block_size=1) == 141
    assert capacity.concurrency(50 * GB, 1076, token_bytes=token_bytes, block_size=16) == 140


def test_an_image_of_576_tokens_is_189_mb_of_a_decoder_with_80_layers(layers_80: ModelFacts):
    """188.7 MB per image hold for a decoder-only model; a text gives them for a 90 B with cross
    attention, whose images take 20 · 4096 B per token of the tower instead."""
    token_bytes = capacity.kv_token_bytes(layers_80, "bfloat16")
    assert 576 * token_bytes == pytest.approx(188.7e6, rel=1e-3)


def test_kv_of_a_70_b_model_is_84_mb_for_256_tokens_not_5_gb(layers_80: ModelFacts):
    """A text gives 5.2 GB for 2 · 256 · 80 · 8 · 128 · 2 B, and 41.6 GB for 2048 tokens: 66 times
    too much. The savings that it derives shrink by 66; its percentages hold."""
    token_bytes = capacity.kv_token_bytes(layers_80, "bfloat16")
    assert 256 * token_bytes == 2 * 256 * 80 * 8 * 128 * 2 == 83_886_080
    assert 2048 * token_bytes == pytest.approx(671e6, rel=1e-3)
    assert 5.2e9 / (256 * token_bytes) == pytest.approx(62, abs=1)


def test_embeddings_are_4_5_mb_and_kv_350_mb(llava: ModelFacts):
    """576 visual tokens of 4096 in two bytes against the KV of 704 tokens: 78 times less.

    Note: both are MiB; in 10⁶ bytes they are 4.7 and 369 MB.
    """
    visual = llava.sizing.count(336, 336).num_tokens
    assert visual == 576
    embeddings = capacity.embedding_bytes(llava, visual)
    kv = capacity.handoff_bytes(llava, "float16", 128 + visual, block_size=16)
    assert embeddings / MIB == 4.5
    assert kv / MIB == 352
    assert kv / embeddings == pytest.approx(78, abs=0.3)
    assert 128 * capacity.kv_token_bytes(llava, "float16") == 64 * MIB


def ratio(model: ModelFacts, *, visual: int, text: int) -> float:
    kv = capacity.kv_token_bytes(model, "bfloat16") * (visual + text)
    return kv / capacity.embedding_bytes(model, visual)


def test_12_to_196_times_less_needs_text_or_unshared_heads(llava: ModelFacts, tmp_path: Path):
    """The ratio is 2 · layers · KV heads · head size / hidden size · (prompt / visual tokens).

    Without text it is 2 · layers for unshared heads: 64 for LLaVA 7B, 80 for 13 B. Models with
    shared heads have 8 to 20, below the range that the text gives "across current architectures".
    They enter it with text: Qwen2.5-VL 7B has 12 from half as many text tokens as visual ones on.
    """
    qwen = read_model(QWEN_7B)
    larger = with_text(LLAVA_7B, num_hidden_layers=40, hidden_size=5120, num_attention_heads=40)
    llava_13b = facts(tmp_path / "13b", larger)
    assert ratio(llava, visual=576, text=0) == 64
    assert ratio(llava_13b, visual=576, text=0) == 80
    assert ratio(qwen, visual=1196, text=0) == 8
    assert ratio(qwen, visual=1196, text=598) == 12
    assert ratio(llava, visual=576, text=1188) == 196
    assert 12 <= ratio(facts(tmp_path / "g", GEMMA3_4B), visual=256, text=0) <= 196


def test_the_vram_estimator_multiplies_the_kv_by_its_overhead(llava: ModelFacts):
    """(15 GB weights + 20 · 0.53 GB KV) · 1.2 = 30.8 GB: the KV of a fixed cache needs no overhead.

    Activations, runtime and encoder cache do; the estimator lacks the last and video. Here they
    are sums, not a factor. Without images the estimator gives 24 GB, and 6.75 GB for the images,
    which are 5.6 GB.
    """
    token_bytes = capacity.kv_token_bytes(llava, "float16")
    per_request = (512 + 576) * token_bytes / GIB
    assert per_request == pytest.approx(0.531, abs=1e-3)
    kv = 20 * per_request
    assert (15.0 + kv) * 1.2 == pytest.approx(30.75, abs=0.01)
    assert 15.0 * 1.2 + kv == pytest.approx(28.6, abs=0.05)
    images = 20 * 576 * token_bytes / GIB
    assert images * 1.2 == pytest.approx(6.75, abs=0.01)
    assert images == pytest.approx(5.625)

    memory = capacity.device_memory(llava, WHOLE, 80 * GIB, weights="auto")
    assert memory.weights == pytest.approx(14.1e9, rel=0.01)  # 13.5 and 0.6 GB
    fixed = memory.runtime + memory.weights + memory.activations + memory.encoder_cache
    assert fixed + memory.kv <= 80 * GIB
    fits = capacity.concurrency(memory.kv, 1088, token_bytes=token_bytes, block_size=16)
    assert fits == memory.kv // (token_bytes * 16) // 68


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAVA_7B, 7_063_427_072),
        (GEMMA3_4B, 4_300_079_472),
        (qwen_7b(), 8_292_166_656),
        ({**qwen_7b(), "model_type": "qwen2_vl", "vision_config": QWEN2_VISION}, 8_291_375_616),
    ],
    ids=["llava-1.5-7b", "gemma-3-4b", "qwen2.5-vl-7b", "qwen2-vl-7b"],
)
def test_a_published_shape_has_its_published_number_of_parameters(
    tmp_path: Path, config: dict[str, Any], published: int
):
    assert facts(tmp_path / "m", config).num_parameters == published


def test_sliding_layers_keep_all_tokens_but_read_the_window(tmp_path: Path):
    """Gemma 3 4B: 29 of 34 layers attend to 1024 tokens; the worker frees none of the others."""
    gemma = facts(tmp_path / "gemma", GEMMA3_4B)
    assert (gemma.num_sliding_layers, gemma.sliding_window) == (29, 1024)
    token_bytes = capacity.kv_token_bytes(gemma, "bfloat16")
    assert token_bytes == 2 * 34 * 4 * 256 * 2
    assert capacity.kv_read_bytes(gemma, "bfloat16", 512) == 512 * token_bytes
    read = capacity.kv_read_bytes(gemma, "bfloat16", 32_768)
    assert read == token_bytes // 34 * (5 * 32_768 + 29 * 1024)
