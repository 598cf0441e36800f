"""A worker declares all that it may take, fits it into its container, or says why it cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from worker.processes.workers import MODEL

from vlm_worker.core.families import load_family
from vlm_worker.core.process_memory import ProcessMemory
from vlm_worker.gateway.gateway_server import most_connections
from vlm_worker.gateway.grammar_process import CHILD_BYTES
from vlm_worker.gateway.memory import CONNECTION_BYTES
from vlm_worker.gateway.pod_caches import CACHES_BYTES
from vlm_worker.media.pool import decoders_bytes
from vlm_worker.serve.budget import MIN_DECODERS, QUEUED_IMAGES, image_bytes, plan_memory
from vlm_worker.serve.loading import Loaded, load
from vlm_worker.serve.local import gateway_bytes
from vlm_worker.settings import ServeSettings, WorkerSettings, parse

MIB, GIB = 1 << 20, 1 << 30
RESIDENT = 700 * MIB
WEIGHTS = 300 * MIB
WORK = 100 * MIB


def settings_of(*flags: str, role: str = "encoder") -> WorkerSettings:
    command = (role, f"--model={MODEL}", "--served-name=m", "--runner=checksum", *flags)
    settings = parse(command, {})
    assert isinstance(settings, WorkerSettings)
    return settings


def loaded_for(settings: WorkerSettings, **changes: Any) -> Loaded:
    """A model with weights, in a container with these numbers."""
    loaded = load(settings, lambda _: None)
    facts = dataclasses.replace(loaded.facts, weights_bytes=WEIGHTS)
    return dataclasses.replace(loaded, facts=facts, work_bytes=WORK, **changes)


def test_the_total_is_the_sum_of_all_parts() -> None:
    numbers = {part: 1 << place for place, part in enumerate(ProcessMemory().by_part())}
    memory = ProcessMemory(**numbers)
    assert memory.total == (1 << len(numbers)) - 1
    assert memory.by_part() == numbers


def test_what_is_resident_already_is_counted_once() -> None:
    settings = settings_of()
    plan = plan_memory(settings, loaded_for(settings), resident_bytes=RESIDENT)
    declared = plan.declared
    assert declared.weights + declared.process == RESIDENT
    assert declared.work == WORK
    assert declared.requests == plan.requests.total
    processor = load_family(MODEL).processor
    assert declared.decoders == decoders_bytes(processor, num_children=plan.num_decoders)


def test_kv_and_the_embeddings_of_its_prompts_are_declared_before_they_are_written() -> None:
    settings = settings_of("--stages=prefill,decode", role="prefill")
    loaded = loaded_for(settings)
    declared = plan_memory(settings, loaded, resident_bytes=RESIDENT).declared
    layout = loaded.runner.kv_layout
    assert layout is not None
    num_tokens = loaded.runner.num_blocks * layout.block_size
    rows = num_tokens * loaded.runner.embed_layout.row_bytes
    assert declared.kv == loaded.runner.num_blocks * layout.block_bytes + rows
    assert declared.decoders == 0


def test_a_worker_that_only_decodes_declares_nothing_for_requests() -> None:
    settings = settings_of(role="decode")
    declared = plan_memory(settings, loaded_for(settings), resident_bytes=RESIDENT).declared
    assert declared.requests == 0
    assert declared.kv > 0


@pytest.mark.parametrize("limit", [2 * GIB, 3 * GIB, 8 * GIB])
def test_without_flags_requests_get_what_the_container_leaves(limit: int) -> None:
    settings = settings_of("--threads=32")
    loaded = loaded_for(settings, limit_bytes=limit, available_bytes=limit - RESIDENT)
    plan = plan_memory(settings, loaded, resident_bytes=RESIDENT)
    assert plan.declared.total <= limit
    assert plan.num_decoders >= 1


def test_images_are_decoded_by_fewer_where_the_container_is_small() -> None:
    settings = settings_of("--threads=32")
    large = loaded_for(settings, limit_bytes=64 * GIB, available_bytes=60 * GIB)
    small = loaded_for(settings, limit_bytes=4 * GIB, available_bytes=3 * GIB)
    assert plan_memory(settings, large, resident_bytes=RESIDENT).num_decoders == 16
    count = plan_memory(settings, small, resident_bytes=RESIDENT).num_decoders
    assert MIN_DECODERS <= count < 16


@pytest.mark.parametrize("limit", [step * GIB // 2 for step in range(4, 16)])
def test_images_may_queue_before_more_children_decode(limit: int) -> None:
    settings = settings_of("--threads=32")
    loaded = loaded_for(settings, limit_bytes=limit, available_bytes=limit - RESIDENT)
    plan = plan_memory(settings, loaded, resident_bytes=RESIDENT)
    queue = QUEUED_IMAGES * image_bytes(loaded.family)
    assert plan.num_decoders == 1 or plan.requests.images >= queue
    if plan.num_decoders < 16:  # one more would not fit, or leave too few images in the queue
        more = settings_of("--threads=32", f"--decode-processes={plan.num_decoders + 1}")
        try:
            found = plan_memory(more, loaded, resident_bytes=RESIDENT)
        except ValueError:
            return
        assert found.requests.images < queue


@pytest.mark.parametrize(
    "flag", ["--max-waiting-pixels=100000", "--request-memory-bytes=600000000"]
)
def test_bounds_that_a_flag_sets_take_no_decode_child(flag: str) -> None:
    settings = settings_of("--threads=32", flag)
    loaded = loaded_for(settings, limit_bytes=64 * GIB, available_bytes=60 * GIB)
    assert plan_memory(settings, loaded, resident_bytes=RESIDENT).num_decoders == 16


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="nothing fits"),
        pytest.param((f"--request-memory-bytes={4 * GIB}",), id="a flag says too much"),
        pytest.param(("--decode-processes=16",), id="so many decoders"),
    ],
)
def test_a_container_that_is_too_small_is_refused_with_the_parts(flags: tuple[str, ...]) -> None:
    settings = settings_of(*flags)
    limit = 4 * GIB if flags else GIB
    loaded = loaded_for(settings, limit_bytes=limit, available_bytes=limit // 2)
    with pytest.raises(ValueError, match="raise the limit by") as refused:
        plan_memory(settings, loaded, resident_bytes=RESIDENT)
    message = str(refused.value)
    assert f"memory limit is {limit}" in message
    assert all(part in message for part in ProcessMemory().by_part())


def test_without_a_limit_nothing_is_refused() -> None:
    settings = settings_of(f"--request-memory-bytes={64 * GIB}")
    plan = plan_memory(settings, loaded_for(settings), resident_bytes=RESIDENT)
    assert plan.declared.requests == 64 * GIB


def test_a_gateway_in_the_same_process_declares_its_requests_and_its_connections() -> None:
    settings = parse(("serve", str(MODEL), "--max-connections=100"), {})
    assert isinstance(settings, ServeSettings)
    connections = gateway_bytes(settings.gateway) - settings.gateway.memory_bytes
    connections -= CACHES_BYTES + CHILD_BYTES
    assert connections == most_connections(settings.gateway) * CONNECTION_BYTES
    assert connections > 100 * CONNECTION_BYTES
