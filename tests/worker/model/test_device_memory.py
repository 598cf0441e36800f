"""KV blocks of a GPU leave the memory that steps and the largest image need. The device is fake."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worker.identity.questions import SHAPES

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.model.build import RunnerSettings, choose_num_blocks
from vlm_worker.model.loader import LoadedModel, load_model
from vlm_worker.model.memory import (
    WorkSizes,
    device_work_bytes,
    encode_bytes,
    num_kv_blocks,
    step_bytes,
)
from vlm_worker.types import KVLayout, Stage

CUDA = torch.device("cuda")
LAYOUT = KVLayout("r", 5, 2, 64, 16, "bfloat16")
SIZES = WorkSizes(
    num_tokens=2048, num_rows=256, num_visual_tokens=2048, embedding_cache_bytes=256 << 20
)

SetFree = Callable[[int], None]


@pytest.fixture(scope="module")
def set_free() -> Iterator[SetFree]:
    """`set_free(n)`: a GPU has `n` free bytes, of 80 GiB."""
    free = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80 << 30))
        yield lambda num_bytes: free.__setitem__(0, num_bytes)


@given(
    free=st.integers(0, 80 << 30),
    percent=st.none() | st.integers(1, 95),
    reserved=st.integers(0, 1 << 30),
    work=st.integers(0, 8 << 30),
)
def test_kv_gets_its_share_or_what_the_work_leaves(
    set_free: SetFree, free: int, percent: int | None, reserved: int, work: int
) -> None:
    set_free(free)
    left = max(0, free - reserved)
    expected = max(0, min(left * (percent or 90) // 100, left - work)) // LAYOUT.block_bytes

    def chosen() -> int:
        return num_kv_blocks(
            LAYOUT, CUDA, memory_percent=percent, reserved_bytes=reserved, work_bytes=work
        )

    if expected < 2:
        with pytest.raises(ModelConfigError, match="--kv-memory-bytes"):
            chosen()
    else:
        assert chosen() == expected


def test_the_bytes_that_a_user_sets_are_not_capped(set_free: SetFree) -> None:
    set_free(1 << 20)
    num_bytes = 100 * LAYOUT.block_bytes
    assert num_kv_blocks(LAYOUT, CUDA, memory_bytes=num_bytes, work_bytes=1 << 30) == 100


def test_a_device_without_room_for_kv_names_the_numbers_and_the_flags(set_free: SetFree) -> None:
    set_free(3 << 30)
    with pytest.raises(ModelConfigError) as refused:
        num_kv_blocks(LAYOUT, CUDA, reserved_bytes=1 << 30, work_bytes=2 << 30)
    for part in (
        f"{2 << 30} bytes of the device",
        f"need {2 << 30}",
        f"2 KV blocks of {LAYOUT.block_bytes} bytes",
        "--max-batched-tokens",
        "--max-requests",
        "--embedding-cache-bytes",
        "--kv-memory-bytes",
    ):
        assert part in str(refused.value)


def test_a_smaller_cache_than_the_share_is_logged(
    set_free: SetFree, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    set_free(10 << 30)
    num_kv_blocks(LAYOUT, CUDA, work_bytes=1 << 30)  # as much as the share leaves
    assert not caplog.records
    num_kv_blocks(LAYOUT, CUDA, work_bytes=2 << 30)
    (record,) = caplog.records
    assert vars(record)["kv_bytes"] == 8 << 30


STAGE_SETS = (
    (Stage.ENCODER, Stage.PREFILL, Stage.DECODE),
    (Stage.ENCODER, Stage.PREFILL),
    (Stage.PREFILL, Stage.DECODE),
    (Stage.PREFILL,),
    (Stage.DECODE,),
)


@pytest.fixture(scope="module", params=STAGE_SETS, ids="+".join)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    """A model on the host that says that it is on a GPU: the choice of blocks only reads it."""
    found = load_model(SHAPES, request.param, dtype="bfloat16", device="cpu")
    return dataclasses.replace(found, device=CUDA)


def test_the_work_of_the_loaded_stages_stays_free(loaded: LoadedModel, set_free: SetFree) -> None:
    config, stages = loaded.model.config, set(loaded.stages)
    work = step_bytes(config.get_text_config(), num_tokens=2048, num_rows=256, element_bytes=2)
    if stages != {Stage.DECODE}:
        work += 256 << 20
    if Stage.ENCODER in stages:
        work += encode_bytes(config.vision_config, loaded.family, num_tokens=2048, element_bytes=2)
    found = device_work_bytes(config, loaded.family, stages, SIZES, element_bytes=2)
    assert found == work
    free = work + 50 * LAYOUT.block_bytes
    set_free(free)
    settings = RunnerSettings(SHAPES, tuple(loaded.stages), sizes=SIZES)
    assert choose_num_blocks(loaded, LAYOUT, settings) == 50
    assert choose_num_blocks(loaded, LAYOUT, settings, reserved_bytes=20 * LAYOUT.block_bytes) == 30


def test_the_kv_of_a_cpu_is_as_before(loaded: LoadedModel) -> None:
    on_cpu = dataclasses.replace(loaded, device=torch.device("cpu"))
    huge = WorkSizes(num_tokens=1 << 30, num_rows=1 << 20, num_visual_tokens=1 << 30)
    settings = RunnerSettings(SHAPES, tuple(loaded.stages), kv_memory_percent=1, sizes=huge)
    assert choose_num_blocks(on_cpu, LAYOUT, settings) >= 2
