"""A worker that cannot work as it was told to says which flags to change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from worker.checkpoints import make_checkpoint

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.serve.loading import StepReports
from vlm_worker.serve.worker import worker
from vlm_worker.settings import WorkerSettings, parse


@pytest.mark.parametrize(
    ("family", "flags", "match"),
    [
        ("gemma3", ("--max-requests=256",), r"never fits into a step .*--max-batched-tokens"),
        ("llava", ("--embedding-cache-bytes=1",), r"largest image .*--embedding-cache-bytes"),
    ],
)
async def test_bounds_that_contradict_each_other_end_the_start_naming_flags(
    tmp_path: Path, family: str, flags: tuple[str, ...], match: str
) -> None:
    model = make_checkpoint(tmp_path / family, family)
    settings = parse(
        [
            "prefill", f"--model={model}", "--served-name=tiny", "--stages=encoder,prefill",
            "--runner=checksum", "--bind=127.0.0.1", "--grpc-port=0", "--http-port=0",
            "--max-model-len=512", "--max-batched-tokens=16", *flags,
        ],
        {},
    )  # fmt: skip
    assert isinstance(settings, WorkerSettings)
    stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(ModelConfigError, match=match):
        async with worker(settings, stopping=stopping):
            pass


async def test_a_model_with_sliding_windows_does_not_start_with_pruning(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "gemma3", "gemma3")
    settings = parse(
        [
            "decode", f"--model={model}", "--served-name=tiny", "--stages=encoder,prefill,decode",
            "--bind=127.0.0.1", "--grpc-port=0", "--http-port=0", "--data-port=0", "--device=cpu",
            "--max-model-len=512", "--kv-prune-text=700",
        ],
        {},
    )  # fmt: skip
    assert isinstance(settings, WorkerSettings)
    stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(ModelConfigError, match=r"--kv-prune-text=700: .* sliding window"):
        async with worker(settings, stopping=stopping):
            pass


async def test_progress_of_the_model_is_shown_before_the_first_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path / "llava", "llava")
    settings = parse(
        [
            "decode", f"--model={model}", "--served-name=tiny", "--runner=checksum",
            "--bind=127.0.0.1", "--grpc-port=0", "--http-port=0", "--data-port=0",
        ],
        {},
    )  # fmt: skip
    assert isinstance(settings, WorkerSettings)
    stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    said: list[list[str]] = []
    caplog.set_level("INFO")
    async with worker(settings, stopping=stopping, on_loaded=lambda: said.append(caplog.messages)):
        assert "ready" in caplog.messages
    (before,) = said
    assert "listening" in before
    assert "ready" not in before


def test_a_step_of_a_start_has_its_share_once_a_second() -> None:
    now, said = 0.0, []
    reports = StepReports(said.append, clock=lambda: now)
    for now in (0.0, 0.5, 1.0, 1.5, 2.0, 4.0):
        reports.report("reading weights", round(now * 10), 40)
    assert said == [
        "reading weights: 25 %, 3 s left",
        "reading weights: 50 %, 2 s left",
        "reading weights: 100 %, 0 s left",
    ]


def test_a_step_without_a_size_is_named_when_it_begins() -> None:
    now, said = 0.0, []
    reports = StepReports(said.append, clock=lambda: now)
    reports.report("reading weights", 0, 40)  # ends within a second
    for _ in range(2):
        now += 5.0
        reports.report("warming up", 0, 0)
    assert said == ["warming up"]
