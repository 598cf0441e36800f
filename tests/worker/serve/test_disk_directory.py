"""A worker starts with a directory for embeddings that it can use, or says what is wrong."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from worker.engine.encode_helpers import prepared_image
from worker.processes.workers import MODEL

from vlm_worker.core.disk_index import StoredFile
from vlm_worker.core.embedding_file import StoredEmbedding, file_name
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.engine.embedding_files import EmbeddingFiles, WriteJob
from vlm_worker.engine.embedding_reads import BUFFER_BYTES
from vlm_worker.model.checkpoint import open_checkpoint
from vlm_worker.serve import worker
from vlm_worker.serve.budget import plan_memory
from vlm_worker.serve.loading import load
from vlm_worker.serve.worker import open_embedding_files
from vlm_worker.settings import WorkerSettings, parse
from vlm_worker.testing import embed


def settings_of(*flags: str, role: str = "encoder") -> WorkerSettings:
    settings = parse((role, f"--model={MODEL}", "--served-name=m", "--runner=checksum", *flags), {})
    assert isinstance(settings, WorkerSettings)
    return settings


def opened(*flags: str, **changes: Any) -> EmbeddingFiles:
    settings = settings_of(*flags)
    loaded = dataclasses.replace(load(settings, lambda _: None), **changes)
    files = open_embedding_files(settings, loaded)
    assert files is not None
    return files


async def stored(files: EmbeddingFiles) -> None:
    """Write one embedding, and close."""
    image, ended = prepared_image(1), asyncio.Event()
    loop = asyncio.get_running_loop()
    rows = memoryview(embed(image).tobytes())
    embedding = StoredEmbedding(image.image_key, image.num_tokens, rows, memoryview(b""))
    file = StoredFile(file_name(image.image_key), rows.nbytes, 0.0)
    files.start(lambda: loop.call_soon_threadsafe(ended.set))
    files.write(WriteJob((), file, embedding))
    await ended.wait()
    assert files.take()[0].is_written
    files.close()


def test_without_the_flag_there_is_no_directory() -> None:
    settings = settings_of()
    assert open_embedding_files(settings, load(settings, lambda _: None)) is None


def test_a_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    opened(f"--embedding-disk-dir={path}").close()
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_what_is_no_directory_is_refused_with_the_flag(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelConfigError, match=r"--embedding-disk-dir=.*name a directory"):
        opened(f"--embedding-disk-dir={tmp_path / name}")


def test_two_workers_may_not_share_a_directory(tmp_path: Path) -> None:
    files = opened(f"--embedding-disk-dir={tmp_path}")
    with pytest.raises(ModelConfigError, match="another process uses it"):
        opened(f"--embedding-disk-dir={tmp_path}")
    files.close()


def test_a_worker_that_does_not_encode_is_refused(tmp_path: Path) -> None:
    settings = settings_of(
        f"--embedding-disk-dir={tmp_path}", "--stages=prefill,decode", role="prefill"
    )
    with pytest.raises(ModelConfigError, match="only a worker with the stage encoder"):
        open_embedding_files(settings, load(settings, lambda _: None))


@pytest.mark.parametrize(
    ("flags", "num_files"), [((), 1), (("--weights=int8",), 0)], ids=["same", "rounded weights"]
)
async def test_files_of_other_weights_are_deleted(
    tmp_path: Path, flags: tuple[str, ...], num_files: int
) -> None:
    directory = f"--embedding-disk-dir={tmp_path}"
    await stored(opened(directory))
    files = opened(directory, *flags)
    assert len(files.found) == num_files
    assert (tmp_path / file_name(prepared_image(1).image_key)).exists() == bool(num_files)
    files.close()


@pytest.mark.parametrize(
    ("content", "version", "num_files"),
    [("old", "1", 1), ("new", "1", 0), ("old", "2", 0)],
    ids=["same", "other content", "other version"],
)
async def test_files_of_another_content_under_the_same_revision_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, version: str, num_files: int
) -> None:
    """A tag as `main` moves, and the container restarts with the same emptyDir."""
    directory, versions = f"--embedding-disk-dir={tmp_path}", iter(["1", version])
    monkeypatch.setattr(worker, "_version", lambda: next(versions))
    await stored(opened(directory, content_revision=lambda: "old"))
    files = opened(directory, content_revision=lambda: content)
    assert len(files.found) == num_files
    files.close()


def test_a_loaded_model_knows_the_hash_of_its_files() -> None:
    settings = parse(("encoder", f"--model={MODEL}", "--served-name=m"), {})
    assert isinstance(settings, WorkerSettings)
    loaded = load(settings, lambda _: None)
    assert loaded.content_revision() == open_checkpoint(MODEL).revision()


def test_the_buffers_of_the_disk_tier_are_declared(tmp_path: Path) -> None:
    def embeddings(*flags: str) -> int:
        settings = settings_of(*flags)
        loaded = load(settings, lambda _: None)
        return plan_memory(settings, loaded, resident_bytes=1 << 20).requests.embeddings

    assert embeddings(f"--embedding-disk-dir={tmp_path}") == embeddings() + 2 * BUFFER_BYTES
