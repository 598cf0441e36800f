"""What enters and leaves a runner: bytes, blocks, images, figures."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from worker.identity.questions import SHAPES, Question, questions
from worker.identity.stepper import Stepper

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.errors import CorruptTransferError, EngineError
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.memory import (
    available_bytes,
    check_kv_device,
    make_kv_cache,
    make_kv_layout,
    num_kv_blocks,
)
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import KVLayout, Stage

SETTINGS = RunnerSettings(
    SHAPES, tuple(Stage), block_size=16, dtype="float32", kv_memory_bytes=16 << 20
)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return build_runner(SETTINGS)


@pytest.fixture(scope="module")
def seen() -> Question:
    return next(question for question in questions() if len(question.prepared_images) == 2)


def test_layouts_say_what_the_model_is(runner: ModelRunner) -> None:
    layout = runner.kv_layout
    assert layout is not None
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (5, 2, 64)
    assert layout.token_bytes == 5 * 2 * 2 * 64 * 4
    assert runner.num_blocks == (16 << 20) // layout.block_bytes
    assert runner.embed_layout.row_bytes == 256 * 4
    assert len(layout.model_revision) == 16


def test_roles_of_one_model_agree_and_other_types_do_not(runner: ModelRunner) -> None:
    encoder = build_runner(dataclasses.replace(SETTINGS, stages=(Stage.ENCODER,)))
    assert encoder.kv_layout is None
    assert encoder.num_blocks == 0
    assert encoder.embed_layout.fingerprint == runner.embed_layout.fingerprint
    other = build_runner(dataclasses.replace(SETTINGS, dtype="bfloat16"))
    assert other.embed_layout.fingerprint != runner.embed_layout.fingerprint
    assert other.kv_layout is not None
    assert runner.kv_layout is not None
    assert other.kv_layout.fingerprint != runner.kv_layout.fingerprint


def test_blocks_of_int8_count_their_scales_and_fit_no_other() -> None:
    layout = KVLayout("r", 5, 2, 64, 16, "int8")
    assert layout.token_bytes == 5 * 2 * 2 * (64 + 4)
    cache = make_kv_cache(layout, 7, torch.device("cpu"))
    assert cache.nbytes == 7 * layout.block_bytes
    others = {dataclasses.replace(layout, dtype=d).fingerprint for d in ("bfloat16", "float32")}
    assert layout.fingerprint not in others
    assert num_kv_blocks(layout, torch.device("cpu"), memory_bytes=1 << 20) == (1 << 20) // (
        16 * layout.token_bytes
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_embedding_crosses_as_bytes(seen: Question, dtype: str) -> None:
    runner = build_runner(dataclasses.replace(SETTINGS, dtype=dtype))
    (embedding, _) = runner.encode(seen.prepared_images)
    assert not isinstance(embedding, Exception)
    num_tokens = seen.prepared_images[0].num_tokens
    rows = runner.export_embedding(embedding)
    assert rows.nbytes == num_tokens * runner.embed_layout.row_bytes
    assert runner.embedding_bytes(embedding) == rows.nbytes
    arrived = runner.import_embedding(memoryview(bytes(rows)), num_tokens)
    assert torch.equal(arrived.rows, embedding.rows)
    with pytest.raises(CorruptTransferError, match=f"of {num_tokens} tokens has {rows.nbytes}"):
        runner.import_embedding(rows[:-1], num_tokens)
    for poison in (torch.nan, torch.inf, -torch.inf):
        sick = embedding.rows.clone()
        sick[-1, -1] = poison
        with pytest.raises(CorruptTransferError, match="is not finite"):
            runner.import_embedding(memoryview(sick.view(torch.uint8).numpy()), num_tokens)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_goes_on_where_its_blocks_go(seen: Question, dtype: str, kv_dtype: str) -> None:
    settings = dataclasses.replace(SETTINGS, dtype=dtype, kv_dtype=kv_dtype)
    home, away = build_runner(settings), build_runner(settings)
    stepper = Stepper(home)
    staying, leaving = (stepper.start(seen, (), max_tokens=8) for _ in range(2))
    stepper.generate([staying, leaving], max_tokens=1, chunk=4096, eos=None)
    other = Stepper(away, seed=1)
    arrived = other.start(seen, leaving.answer, max_tokens=8)
    blocks = bytes(home.export_blocks(leaving.blocks.tolist()))
    away.import_blocks(arrived.blocks.tolist(), memoryview(blocks))
    memory = away.block_memory(arrived.blocks.tolist(), to_write=True)
    assert memory is not None
    assert b"".join(memory.views) == blocks, "written, or lent to be written: the same place"
    arrived.num_computed = leaving.num_computed
    assert away.export_blocks(arrived.blocks.tolist()) == blocks
    stepper.generate([staying], max_tokens=8, chunk=4096, eos=None)
    other.generate([arrived], max_tokens=8, chunk=4096, eos=None)
    assert arrived.answer == staying.answer
    with pytest.raises(CorruptTransferError, match="2 KV blocks have"):
        away.import_blocks([1, 2], memoryview(blocks[:-1]))


def test_no_token_is_read_as_another_one(runner: ModelRunner, seen: Question) -> None:
    """An id without a row ends the step; a placeholder without one is its image's."""
    stepper = Stepper(runner)
    sequence = stepper.start(seen, (), max_tokens=8)
    index = next(i for i, token in enumerate(seen.token_ids) if token > 10)
    sequence.token_ids[index] = runner.family.vocab_size
    with pytest.raises(IndexError):
        stepper.generate([sequence], max_tokens=1, chunk=4096, eos=None)


def test_a_placeholder_may_lie_beyond_the_table(runner: ModelRunner, seen: Question) -> None:
    near, far = build_runner(SETTINGS), build_runner(SETTINGS)
    placeholder = near.family.image_token_id
    beyond = near.family.vocab_size + 3
    far.family = dataclasses.replace(far.family, image_token_id=beyond)
    token_ids = tuple(beyond if token == placeholder else token for token in seen.token_ids)
    answers = []
    for one, question in ((near, seen), (far, dataclasses.replace(seen, token_ids=token_ids))):
        stepper = Stepper(one)
        sequence = stepper.start(question, (), max_tokens=8)
        stepper.generate([sequence], max_tokens=8, chunk=4096, eos=None)
        answers.append(sequence.answer)
    assert answers[0] == answers[1]


def test_one_bad_image_of_a_batch_fails_alone(runner: ModelRunner, seen: Question) -> None:
    good, other = seen.prepared_images
    poisoned = np.frombuffer(other.patches, np.float32).copy()
    poisoned[7] = np.nan
    batch = [
        good,
        dataclasses.replace(other, patches=other.patches[:-1]),
        dataclasses.replace(other, patches=poisoned.data),
        dataclasses.replace(other, num_tokens=other.num_tokens + 1),
        other,
    ]
    results = runner.encode(batch)
    assert [isinstance(result, EngineError) for result in results] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert "patches" in str(results[1])
    assert "not finite" in str(results[2])
    assert "tokens, not" in str(results[3])
    (alone,) = runner.encode([good])
    assert not isinstance(alone, Exception)
    torch.testing.assert_close(results[0].rows, alone.rows)


def test_poisoned_memory_fails_its_own_sequence_and_is_clean_when_written_again(
    runner: ModelRunner, seen: Question
) -> None:
    stepper = Stepper(runner)
    healthy, sick = (stepper.start(seen, (), max_tokens=4) for _ in range(2))
    stepper.generate([healthy, sick], max_tokens=2, chunk=4096, eos=None)
    assert runner.kv_layout is not None
    nan = np.full(runner.kv_layout.block_bytes // 4, np.nan, np.float32)
    runner.import_blocks([int(sick.blocks[0])], memoryview(nan.tobytes()))
    tokens = runner.execute(stepper.inputs([(healthy, 1), (sick, 1)], [[0], [0]])).token_ids
    assert tokens[1] == -1
    assert tokens[0] == runner.execute(stepper.inputs([(healthy, 1)], [[0]])).token_ids[0]
    # the blocks go to somebody else, whose last one stays partly NaN
    runner.import_blocks(sick.blocks.tolist(), memoryview(nan.tobytes() * len(sick.blocks)))
    heir, beside = (stepper.start(seen, (), max_tokens=4) for _ in range(2))
    heir.blocks = sick.blocks
    stepper.generate([heir, beside], max_tokens=4, chunk=50, eos=None)
    assert heir.answer == beside.answer


def test_an_encoder_has_no_kv_and_a_language_model_no_eyes(seen: Question) -> None:
    lm = build_runner(dataclasses.replace(SETTINGS, stages=(Stage.DECODE,)))
    with pytest.raises(EngineError, match="stage encoder is not loaded"):
        lm.encode(seen.prepared_images)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        pytest.param("model.norm.weight", "language model's logits are not finite", id="lm"),
        pytest.param("visual.merger.ln_q.weight", "vision tower fails on a plain", id="vision"),
    ],
)
def test_weights_that_compute_nothing_but_nan_are_found_at_start(
    tmp_path: Path, tensor: str, message: str
) -> None:
    model_dir = Path(shutil.copytree(SHAPES, tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    tensors[tensor] *= float("nan")
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelConfigError, match=message):
        build_runner(dataclasses.replace(SETTINGS, model_dir=model_dir))


def test_figures_of_the_kv_cache_are_bounded_and_explained() -> None:
    layout = KVLayout("r", 5, 2, 64, 64, "bfloat16")
    cpu = torch.device("cpu")
    assert num_kv_blocks(layout, cpu, memory_bytes=layout.block_bytes * 10 + 1) == 10
    assert num_kv_blocks(layout, cpu) * layout.block_bytes <= 1 << 30
    percent = num_kv_blocks(layout, cpu, memory_percent=1) * layout.block_bytes
    assert percent == pytest.approx(available_bytes(cpu) / 100, rel=0.2)
    with pytest.raises(ModelConfigError, match=f"at least {2 * layout.block_bytes} with --kv-mem"):
        num_kv_blocks(layout, cpu, memory_bytes=layout.block_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"kv_dtype": "int4"}, "--kv-dtype=int4: not built yet", id="kv type"),
        pytest.param(
            {"kv_dtype": "fp8", "device": "cpu"}, "--kv-dtype=fp8 needs a GPU", id="kv in fp8"
        ),
        pytest.param(
            {"kv_dtype": "text=int8", "dtype": "float32", "block_size": 6},
            "--block-size=6: with --kv-dtype=text=int8 and float32, it must be a multiple of 4",
            id="narrow block size",
        ),
        pytest.param(
            {"kv_dtype": "vision=kivi4", "dtype": "float32", "block_size": 64},
            "--block-size=64: with --kv-dtype=vision=kivi4, it must be 32",
            id="block in 4 bits",
        ),
        pytest.param({"block_size": 0}, "--block-size=0: must be at least 1", id="block size"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        build_runner(dataclasses.replace(SETTINGS, **change))


def test_wide_rows_without_a_kernel_are_refused() -> None:
    text = SimpleNamespace(
        num_hidden_layers=1, num_key_value_heads=1, num_attention_heads=1, hidden_size=8
    )
    with pytest.raises(ModelConfigError, match="not built beside float16"):
        make_kv_layout(text, "r", dtype=torch.float16, kv_dtype="vision=int8", block_size=4)


def test_heads_of_odd_size_are_refused_in_4_bits() -> None:
    text = SimpleNamespace(
        num_hidden_layers=1, num_key_value_heads=1, num_attention_heads=1, hidden_size=9
    )
    with pytest.raises(ModelConfigError, match="heads of 9 are odd"):
        make_kv_layout(text, "r", dtype=torch.float32, kv_dtype="vision=kivi4", block_size=32)


@pytest.mark.parametrize("kv_dtype", ["vision=int8", "text=int8", "vision=kivi4"])
def test_a_gpu_refuses_blocks_of_two_kinds(kv_dtype: str) -> None:
    check_kv_device(kv_dtype, torch.device("cpu"))
    with pytest.raises(ModelConfigError, match="do not read blocks of two kinds; choose int8"):
        check_kv_device(kv_dtype, torch.device("cuda"))


def test_memory_that_is_only_read_touches_no_state_of_the_steps(runner: ModelRunner) -> None:
    """Readers are on threads of their own."""
    pages, last = runner._kv_pages, runner.num_blocks - 1
    assert pages is not None
    before, pages._used_end = pages._used_end, 0
    assert runner.block_memory([last]) is not None
    assert pages._used_end == 0
    assert runner.block_memory([last], to_write=True) is not None
    assert pages._used_end >= before
